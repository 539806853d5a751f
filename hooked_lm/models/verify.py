"""Do the sites of a model mean what they promise? Right logits do not prove right hooks; these identities do."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention import Attention
from hooked_lm.components.block import AttentionOnlyBlock, ParallelBlock
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norm import LayerNorm, RMSNorm
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]
Errors = dict[str, list[float]]


@dataclass(frozen=True)
class Check:
    """One identity: its largest error in each layer (or one number for the model), and what is allowed."""

    name: str
    errors: tuple[float, ...]
    tolerance: float

    @property
    def largest(self) -> float:
        return max(self.errors, default=0.0, key=lambda error: float("inf") if error != error else error)

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for error in self.errors)


@dataclass(frozen=True)
class Verification:
    """A table of checks; `ok` says whether all of them hold, `str` prints it."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> list[str]:
        """The names of the checks that do not hold."""
        return [check.name for check in self.checks if not check.ok]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{check.name:<{width}}  {check.largest:9.2e}  "
            + ("ok" if check.ok else f"FAILED: more than {check.tolerance:.0e}{_where(check)}")
            for check in self.checks
        ]
        return "\n".join(lines)


def _where(check: Check) -> str:
    layers = [str(layer) for layer, error in enumerate(check.errors) if not error <= check.tolerance]
    return f" in layers {', '.join(layers)}" if len(check.errors) > 1 else ""


@torch.no_grad()
def verify(model: Any, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
    """Check the identities between a HookedTransformer's sites on one run, over random tokens unless given.

    Errors are relative to the largest value compared, where that is above one; 1e-5 is allowed in fp32, and four
    units of rounding in lower precision. Nothing is raised for an identity that does not hold.

    >>> from hooked_lm import HookedTransformer, HookedTransformerConfig
    >>> from hooked_lm.models.verify import verify
    >>> cfg = HookedTransformerConfig(n_layers=2, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="relu")
    >>> verify(HookedTransformer(cfg)).ok
    True
    """
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.cfg.d_vocab, (2, min(12, model.cfg.n_ctx)), generator=generator)
    tokens = tokens.to(model.device)
    plain = [name for name, p in model.hook_dict.items() if not p.on_demand or name.endswith("hook_result")]
    logits, sites, fired = _run(model, tokens, plain)
    with_copies, _, fired_then = _run(model, tokens, [name for name in model.hook_dict if name not in plain])
    errors: Errors = {"logits == logits with sites on demand": [_error(lambda: (with_copies, logits))]}
    for layer, block in enumerate(model.blocks):
        last = layer + 1 == len(model.blocks)
        identities = _block_identities(block, f"blocks.{layer}.", sites, last, model.cfg.tree.shortformer)
        for name, values in identities:
            errors.setdefault(name, []).append(_error(values))
    for name, values in _output_identities(model, sites, logits):
        errors.setdefault(name, []).append(_error(values))
    tolerance = max(1e-5, 4 * torch.finfo(logits.dtype).eps)
    wrong = sum((fired + fired_then)[name] != 1 for name in model.hook_dict)
    checks = [Check(name, tuple(found), tolerance) for name, found in errors.items()]
    return Verification((Check("sites that do not fire once", (float(wrong),), 0.0), *checks))


def _run(model: Any, tokens: Tensor, names: list[str]) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """Logits, what passed at these sites, and how often."""
    fired: Counter[str] = Counter()
    sites: dict[str, Tensor] = {}

    def record(value: Tensor, hook: HookPoint) -> None:
        fired[hook.name or ""] += 1
        sites[hook.name or ""] = value.clone()

    logits = model.run_with_hooks(tokens, fwd_hooks=[(names, record)])
    return logits, sites, fired


Pair = Callable[[], tuple[Tensor, Tensor]]


def _error(pair: Pair) -> float:
    """How far two tensors are apart; infinite where a site is missing or the shapes do not go together."""
    try:
        left, right = pair()
        difference = (left.float() - right.float()).abs().max()
        return float(difference / right.float().abs().max().clamp(min=1.0))
    except (KeyError, RuntimeError, AttributeError):
        return float("inf")


def _block_identities(
    block: nn.Module, prefix: str, sites: dict[str, Tensor], last: bool, shortformer: bool
) -> Iterator[tuple[str, Pair]]:
    def at(name: str) -> Tensor:
        return sites[name if name == "hook_pos_embed" else prefix + name]

    def next_resid_pre() -> Tensor:
        head, layer, _ = prefix.split(".")
        return sites[f"{head}.{int(layer) + 1}.hook_resid_pre"]

    has_mlp, parallel = not isinstance(block, AttentionOnlyBlock), isinstance(block, ParallelBlock)
    if has_mlp and not parallel:
        yield (
            "resid_pre + attn_out == resid_mid",
            lambda: (
                at("hook_resid_pre") + at("hook_attn_out"),
                at("hook_resid_mid"),
            ),
        )
        yield (
            "resid_mid + mlp_out == resid_post",
            lambda: (
                at("hook_resid_mid") + at("hook_mlp_out"),
                at("hook_resid_post"),
            ),
        )
    elif has_mlp:
        yield (
            "resid_pre + attn_out + mlp_out == resid_post",
            lambda: (
                at("hook_resid_pre") + at("hook_attn_out") + at("hook_mlp_out"),
                at("hook_resid_post"),
            ),
        )
    else:
        yield (
            "resid_pre + attn_out == resid_post",
            lambda: (
                at("hook_resid_pre") + at("hook_attn_out"),
                at("hook_resid_post"),
            ),
        )
    if not last:
        yield "resid_post == next resid_pre", lambda: (at("hook_resid_post"), next_resid_pre())
    yield from _attention_identities(block, at, shortformer)
    if has_mlp:
        yield from _mlp_identities(block, at)


def _attention_identities(block: Any, at: Callable[[str], Tensor], shortformer: bool) -> Iterator[tuple[str, Pair]]:
    attn = block.attn
    yield (
        "softmax(attn_scores) == pattern",
        lambda: (
            at("attn.hook_attn_scores").float().softmax(-1),
            at("attn.hook_pattern"),
        ),
    )
    yield "pattern @ v == z", lambda: (_mixed(at("attn.hook_pattern"), at("attn.hook_v")), at("attn.hook_z"))
    if not isinstance(attn, Attention):
        return
    yield (
        "z @ W_O == result",
        lambda: (
            torch.einsum("bpnh,nhm->bpnm", at("attn.hook_z"), attn.W_O),
            at("attn.hook_result"),
        ),
    )
    yield (
        "sum of results + b_O, normed and scaled == attn_out",
        lambda: (
            _added(_plus(at("attn.hook_result").sum(2), attn.b_O), block.ln1_post, block.cfg.residual_scale),
            at("hook_attn_out"),
        ),
    )
    yield from _norm_identity(block.ln1, at, "ln1", "hook_resid_pre")
    for name, W, b in (("q", attn.W_Q, attn.b_Q), ("k", attn.W_K, attn.b_K), ("v", attn.W_V, attn.b_V)):

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            x = _normed(block.ln1, at, "ln1", at("hook_resid_pre"))
            if shortformer and name != "v":
                x = x + at("hook_pos_embed")
            return _plus(torch.einsum("bpm,nmh->bpnh", x, W), b), at(f"attn.hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected


def _mlp_identities(block: Any, at: Callable[[str], Tensor]) -> Iterator[tuple[str, Pair]]:
    mlp = block.mlp
    if not isinstance(mlp, (MLP, GatedMLP)):
        return
    resid = "hook_resid_pre" if isinstance(block, ParallelBlock) else "hook_resid_mid"
    yield from _norm_identity(block.ln2, at, "ln2", resid)

    def pre(name: str, W: Tensor, b: Tensor | None) -> Pair:
        return lambda: (_plus(_normed(block.ln2, at, "ln2", at(resid)) @ W, b), at(name))

    if isinstance(mlp, GatedMLP):
        yield "ln2.normalized * w + b -> pre", pre("mlp.hook_pre", mlp.W_gate, mlp.b_gate)
        yield "ln2.normalized * w + b -> pre_linear", pre("mlp.hook_pre_linear", mlp.W_in, mlp.b_in)
        yield (
            "act(pre) * pre_linear == post",
            lambda: (
                mlp.act(at("mlp.hook_pre")) * at("mlp.hook_pre_linear"),
                at("mlp.hook_post"),
            ),
        )
    else:
        yield "ln2.normalized * w + b -> pre", pre("mlp.hook_pre", mlp.W_in, mlp.b_in)
        if mlp.cfg.mid_norm is None:
            yield "act(pre) == post", lambda: (mlp.act(at("mlp.hook_pre")), at("mlp.hook_post"))
    yield (
        "post -> mlp_out, normed and scaled",
        lambda: (
            _added(_plus(at("mlp.hook_post") @ mlp.W_out, mlp.b_out), block.ln2_post, block.cfg.residual_scale),
            at("hook_mlp_out"),
        ),
    )


def _output_identities(model: Any, sites: dict[str, Tensor], logits: Tensor) -> Iterator[tuple[str, Pair]]:
    final, unembed, last = model.ln_final, model.unembed, f"blocks.{len(model.blocks) - 1}.hook_resid_post"

    def predicted() -> tuple[Tensor, Tensor]:
        x = _normed(final, sites.__getitem__, "ln_final", sites[last])
        out = _plus(x @ unembed.W_U, unembed.b_U) * unembed.cfg.scale
        cap = unembed.cfg.soft_cap
        return out if cap is None else cap * (out / cap).tanh(), logits

    yield from _norm_identity(final, sites.__getitem__, "ln_final", last)
    yield "unembed(ln_final(resid_post)) == logits", predicted


def _mixed(
    pattern: Float[Tensor, "batch head query_pos key_pos"], v: Float[Tensor, "batch key_pos kv_head d_head"]
) -> Float[Tensor, "batch query_pos head d_head"]:
    v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    return torch.einsum("bnqk,bknh->bqnh", pattern, v)


def _normed(norm: nn.Module, at: Callable[[str], Tensor], name: str, resid: Stream) -> Stream:
    """The output of a norm, computed from the value that its site shows."""
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return norm(resid)
    shown = at(f"{name}.hook_normalized")
    offset = norm.cfg.offset if isinstance(norm, RMSNorm) else 0.0
    scaled = shown if norm.w is None else (shown.float() * (norm.w.float() + offset)).to(shown.dtype)
    return _plus(scaled, getattr(norm, "b", None))


def _norm_identity(norm: nn.Module, at: Callable[[str], Tensor], name: str, resid: str) -> Iterator[tuple[str, Pair]]:
    """The divisor and the normalised value give back what was normalised."""
    if isinstance(norm, LayerNorm):
        yield (
            f"{name}: normalized * scale == stream - mean",
            lambda: (
                at(f"{name}.hook_normalized") * at(f"{name}.hook_scale"),
                at(resid) - at(resid).mean(-1, keepdim=True),
            ),
        )
    elif isinstance(norm, RMSNorm):
        yield (
            f"{name}: normalized * scale == stream",
            lambda: (
                at(f"{name}.hook_normalized") * at(f"{name}.hook_scale"),
                at(resid),
            ),
        )


def _added(out: Stream, post_norm: nn.Module, scale: float) -> Stream:
    """What a sublayer's output becomes before it is added to the stream."""
    plain = getattr(post_norm, "plain", post_norm)
    return plain(out) * scale


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
