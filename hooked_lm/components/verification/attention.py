"""Attention: identities from the inputs of queries, keys and values to the output of each head.

The steps between are generic functions, which a kind of attention with another step registers for its class.
"""

from collections.abc import Iterator, Sequence
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.cross import AbstractCrossAttention
from hooked_lm.components.attention.differential import DifferenceNorm, DifferentialAttention
from hooked_lm.components.attention.disentangled import DisentangledAttention
from hooked_lm.components.attention.gated import OutputGate
from hooked_lm.components.attention.multihead import AbstractAttention, ProjectedAttention, project
from hooked_lm.components.attention.position_bias import Sparsity
from hooked_lm.components.attention.position_scale import ScaledQueries
from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import norm_of, norm_unhooked, root_mean_square
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
    Sites,
    add_bias,
    identities,
    input_weights,
    norm_output,
    output_from_sites,
)


def mixing_identities(
    attn: AbstractAttention, at: Sites, queries: LazyTensor | None = None, keys: LazyTensor | None = None
) -> Iterator[Identity]:
    """The identities from the scores on, and of the scores themselves if queries and keys are given."""
    if queries is not None and keys is not None:
        yield from score_identity(attn, at, queries, keys)
    yield (
        "softmax(attn_scores) == pattern",
        lambda: (softmax(all_keys(attn, at, "attn_scores", 3), attn.sinks), all_keys(attn, at, "pattern", 3)),
    )

    def z() -> tuple[Tensor, Tensor]:
        v = mixable(attn, all_keys(attn, at, "v", 1))
        return gated(attn, at, mixed(all_keys(attn, at, "pattern", 3), v)), at("hook_z")

    is_gated = gated.dispatch(type(attn)) is not gated.dispatch(object)
    yield "pattern @ v == z" + (", gated" if is_gated else ""), z
    yield result_identity(attn, at)


def score_identity(attn: AbstractAttention, at: Sites, queries: LazyTensor, keys: LazyTensor) -> Iterator[Identity]:
    """The identity of the scores that are not masked; none where a learned bias of positions is in them."""

    def scores() -> tuple[Tensor, Tensor]:
        q, k, shown = queries(), keys(), at("hook_attn_scores")
        if isinstance(attn, ScaledQueries):
            q = attn.scaled(q, Context(q.shape[1], q.device))
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        product = torch.einsum("bqnh,bknh->bnqk", q, k) * attn.scale
        if attn.soft_cap is not None:
            product = attn.soft_cap * (product / attn.soft_cap).tanh()
        if isinstance(attn.position_bias, Sparsity):
            product = product + attn.position_bias.bias(Context(q.shape[1], q.device), product.dtype)
        product = biased(attn, at, product)
        seen = shown > float("-inf")
        return product.masked_fill(~seen, 0.0), shown.masked_fill(~seen, 0.0)

    if attn.position_bias is None or isinstance(attn.position_bias, Sparsity):
        yield "q k^T * scale, capped == attn_scores", scores


def result_identity(attn: AbstractAttention, at: Sites) -> Identity:
    """The identity of each head's output."""
    return (
        "z @ W_O == result",
        lambda: (torch.einsum("bpnh,nhm->bpnm", _normed_z(attn, at), attn.W_O), at("hook_result")),
    )


@singledispatch
def all_keys(attn: nn.Module, at: Sites, name: str, axis: int) -> Tensor:
    """The value at the site of a name, with that of the keys that are no tokens, which follow on this axis."""
    return at(f"hook_{name}")


@singledispatch
def biased(attn: nn.Module, at: Sites, scores: Tensor) -> Tensor:
    """The scores plus a bias of the keys, if there is one."""
    return scores


@singledispatch
def mixable(attn: nn.Module, v: Tensor) -> Tensor:
    """The values that heads mix, from those at their site."""
    return v


@singledispatch
def gated(attn: nn.Module, at: Sites, z: Tensor) -> Tensor:
    """The mixed values after the gate of each head, if there is one."""
    return z


@gated.register
def _(attn: OutputGate, at: Sites, z: Tensor) -> Tensor:
    """Times the open gate."""
    return z * attn.opened(at("hook_gate"))


def _normed_z(attn: AbstractAttention, at: Sites) -> Tensor:
    return norm_output(attn, "z_norm", at, lambda: at("hook_z"))


@output_from_sites.register
def _(attn: AbstractAttention, at: Sites) -> Tensor:
    """The output, from that of each head."""
    return add_bias(at("hook_result").sum(2), attn.b_O)


def mixed(
    pattern: Float[Tensor, "batch head query_pos key_pos"], v: Float[Tensor, "batch key_pos kv_head d_value"]
) -> Float[Tensor, "batch query_pos head d_value"]:
    """The values, mixed by a pattern."""
    v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    return torch.einsum("bnqk,bknh->bqnh", pattern, v)


@identities.register
def _(
    attn: ProjectedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`; values may have another input."""
    yield from head_identities(attn, at, get_input, value_input)
    yield from mixing_identities(attn, at, lambda: scored(attn, "q", at), lambda: scored(attn, "k", at))


def head_identities(
    attn: ProjectedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """The identities from the input to queries, keys and values."""
    weights = {"q": (attn.W_Q, attn.b_Q), "k": (attn.W_K, attn.b_K), "v": attn.value_weights}
    for name in weights:

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            W, b = weights[name]
            x = value_input() if name == "v" and value_input is not None else get_input()
            made = projected_heads(attn, x, W, b)
            return norm_unhooked(norm_of(attn, "v_norm"), made) if name == "v" else made, at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected
    yield from gate_identity(attn, at, get_input)
    if attn.cfg.rotary is not None:
        for name in "qk":
            yield f"rotary({name}) keeps lengths", _lengths(attn, name, at)


def projected_heads(attn: ProjectedAttention, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Queries, keys or values of an input, by their weight and bias."""
    made, clip = add_bias(torch.einsum("bpm,nmh->bpnh", x, W), b), attn.cfg.clip if attn.clips_projections else None
    return attn.adapted(made if clip is None else made.clamp(-clip, clip), x, W)


def gate_identity(attn: AbstractAttention, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """The identity of the gate, if there is one."""
    if isinstance(attn, OutputGate):
        yield (
            "ln1.normalized * w + b -> gate",
            lambda: (project(get_input(), attn.W_gate, attn.b_gate), at("hook_gate")),
        )


def scored(attn: ProjectedAttention, name: str, at: Sites) -> Tensor:
    """The queries or keys from which the scores are computed."""
    shown = f"hook_{name}" if attn.cfg.rotary is None else f"hook_rot_{name}"
    if attn.cfg.qk_norm is not None and (attn.cfg.rotary is None or attn.cfg.rotary_first):
        return norm_output(attn, f"{name}_norm", at, lambda: at(shown))
    return at(shown)


def _lengths(attn: ProjectedAttention, name: str, at: Sites) -> Pair:
    def before() -> Tensor:
        if attn.cfg.qk_norm is None or attn.cfg.rotary_first:
            return at(f"hook_{name}")
        return norm_output(attn, f"{name}_norm", at, lambda: at(f"hook_{name}"))

    assert attn.cfg.rotary is not None, "only a rotary embedding keeps lengths"
    return same_lengths(attn.cfg.rotary, before, lambda: at(f"hook_rot_{name}"))


def same_lengths(rotary: Rotary, before: LazyTensor, after: LazyTensor) -> Pair:
    """Rotary does not change the norms of vectors, up to the temperature of its scaling."""

    def lengths() -> tuple[Tensor, Tensor]:
        x = before()
        temperature = rotary.angles(torch.zeros(1, 1, dtype=torch.long), x.shape[1])[0].max()
        turned = x[..., : rotary.dim].norm(dim=-1) * temperature.to(x)
        return turned, after()[..., : rotary.dim].norm(dim=-1)

    return lengths


@input_weights.register
def _(attn: ProjectedAttention) -> list[InputWeight]:
    """The weights that the input is multiplied by; none if their products are clipped."""
    return [] if attn.cfg.clip is not None else input_weights.dispatch(object)(attn)


@identities.register
def _(
    attn: AbstractCrossAttention, at: Sites, get_input: LazyTensor, source: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()` and encoder output `source()`."""
    inputs = {"q": get_input, "k": source or get_input, "v": source or get_input}
    weights = {"q": (attn.W_Q, attn.b_Q), "k": (attn.W_K, attn.b_K), "v": (attn.W_V, attn.b_V)}
    for name, (W, b) in weights.items():

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            return add_bias(torch.einsum("bpm,nmh->bpnh", inputs[name](), W), b), at(f"hook_{name}")

        yield f"input of cross attention -> {name}", projected
    yield from mixing_identities(attn, at, lambda: at("hook_q"), lambda: at("hook_k"))


def products(scale: float, at: Sites, terms: Sequence[str] = ()) -> Pair:
    """The products of queries and keys, plus the values of some sites, and the scores that are not masked."""

    def scores() -> tuple[Tensor, Tensor]:
        found = at("hook_attn_scores")
        made = torch.einsum("bqnh,bknh->bnqk", at("hook_q"), at("hook_k")) * scale
        made = sum((at(term) for term in terms), made)
        return made[found.isfinite()], found[found.isfinite()]

    return scores


def projection_identities(attn: AbstractAttention, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """The identities of queries, keys and values of a run with input `get_input()`."""
    for name in "qkv":

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            W, b = getattr(attn, f"W_{name.upper()}"), getattr(attn, f"b_{name.upper()}")
            return add_bias(torch.einsum("bpm,nmh->bpnh", get_input(), W), b), at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected


@identities.register
def _(
    attn: DisentangledAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from projection_identities(attn, at, get_input)
    terms = ["hook_c2p"] * attn.cfg.c2p + ["hook_p2c"] * attn.cfg.p2c
    yield "q k^T * scale + c2p + p2c == attn_scores, where a key is real", products(attn.scale, at, terms)
    yield from mixing_identities(attn, at)


@identities.register
def _(
    attn: DifferentialAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the difference of each pair of heads."""
    yield from identities.dispatch(ProjectedAttention)(attn, at, get_input, value_input)
    norm = norm_of(attn, "z_norm")
    if not isinstance(norm, DifferenceNorm):
        return

    def difference() -> Tensor:
        first, second = at("hook_pattern").chunk(2, 1)
        v = attn.paired(at("hook_v")).chunk(2, 2)[0]
        v = v.repeat_interleave(first.shape[1] // v.shape[2], 2)
        return torch.einsum("bpqk,bkph->bqph", first - norm.lam() * second, v)

    def scales() -> tuple[Tensor, Tensor]:
        return root_mean_square(difference(), norm.cfg.eps).repeat(1, 1, 2, 1), at("z_norm.hook_scale")

    def results() -> tuple[Tensor, Tensor]:
        first, second = at("hook_result").chunk(2, 2)
        normed = difference() / at("z_norm.hook_scale").chunk(2, 2)[0] * (1 - norm.cfg.lam_init)
        return torch.einsum("bqph,phm->bqpm", normed, attn.W_O_pair), first + second

    yield (
        "z_norm: normalized * scale == z",
        lambda: (at("z_norm.hook_normalized") * at("z_norm.hook_scale"), at("hook_z")),
    )
    yield "size of (pattern_1 - lam pattern_2) v == z_norm.scale", scales
    yield "(pattern_1 - lam pattern_2) v, normalised, through W_O_pair == sum of the pair's results", results


@mixable.register
def _(attn: DifferentialAttention, v: Tensor) -> Tensor:
    """The values of a pair of heads, side by side."""
    return attn.paired(v)
