"""Convolutional, differential, routed, transient-global, disentangled, mixed, grouped attention, and that with global tokens."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.attention.convolutional import ConvolutionalAttention
from hooked_lm.components.attention.differential import DifferenceNorm, DifferentialAttention
from hooked_lm.components.attention.disentangled import DisentangledAttention
from hooked_lm.components.attention.global_tokens import WindowAttention, every_third
from hooked_lm.components.attention.grouped import GroupedAttention
from hooked_lm.components.attention.mixed import MixedAttention, SpanConv
from hooked_lm.components.attention.multihead import Attend, Attention, project
from hooked_lm.components.attention.routed import RoutedAttention
from hooked_lm.components.attention.transient_global import TransientGlobalAttention
from hooked_lm.components.attention.value_mask import ValueMaskedAttention
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import norm_of, root_mean_square
from hooked_lm.components.verification.attention import mixable, mixing_identities, products
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    input_weights,
    norm_identity,
    norm_output,
    output_from_sites,
    within,
)


@identities.register
def _(
    attn: ConvolutionalAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention after the convolutions, and those of what is convolved and delayed."""

    def values() -> Tensor:
        return project((value_input or get_input)(), attn.W_V, None)

    def convolved(part: int) -> Tensor:
        heads = torch.cat([at("hook_q_proj"), at("hook_k_proj"), values()], 2)
        return attn.split(attn.convolved(heads, Context(heads.shape[1], heads.device)))[part]

    for name, W, b in (("q_proj", attn.W_Q, attn.b_Q), ("k_proj", attn.W_K, attn.b_K)):
        made = partial(project, W=W, b=b)
        yield f"ln1.normalized * w + b -> {name}", partial(_made_and_site, at, name, made, get_input)
    yield "conv(q_proj) + mean == q", lambda: (convolved(0), at("hook_q"))
    yield "conv(k_proj) + mean == k", lambda: (convolved(1), at("hook_k"))
    yield (
        "ln1.normalized of the token or the one before * w + b -> v",
        lambda: (
            attn.with_bias(convolved(2)),
            at("hook_v"),
        ),
    )
    for name, pair in identities.dispatch(Attention)(attn, at, get_input, value_input):
        if not name.startswith("ln1.normalized"):
            yield name, pair


def _made_and_site(
    at: Sites, name: str, make: Callable[[Tensor], Tensor], get_input: LazyTensor
) -> tuple[Tensor, Tensor]:
    return make(get_input()), at(f"hook_{name}")


@input_weights.register
def _(attn: ConvolutionalAttention) -> list[InputWeight]:
    """None: the values of the first token have a bias where others have a projection."""
    return []


@identities.register
def _(
    attn: DifferentialAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the difference of each pair of heads."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)
    norm = norm_of(attn, "z_norm")
    if not isinstance(norm, DifferenceNorm):
        return

    def difference() -> Tensor:
        first, second = at("hook_pattern").chunk(2, 1)
        v = mixable(attn, at("hook_v")).chunk(2, 2)[0]
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


@identities.register
def _(
    attn: RoutedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the router."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)
    yield "ln1.normalized * w + b -> router_logits", lambda: (attn.router_logits(get_input()), at("hook_router_logits"))
    for index, name in enumerate(("expert_weights", "expert_indices")):

        def chosen(index: int = index, name: str = name) -> tuple[Tensor, Tensor]:
            return attn.choice(at("hook_router_logits"))[index], at(f"hook_{name}")

        yield f"router(router_logits) == {name}", chosen


@identities.register
def _(
    attn: WindowAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()` in which every third token is global."""
    for name in ("q", "k", "v", "q_global", "k_global", "v_global"):

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            kind = name[0].upper() + name[1:]
            return project(get_input(), getattr(attn, f"W_{kind}"), getattr(attn, f"b_{kind}")), at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected

    def of_row(local: Tensor, of_global: Tensor, dim: int) -> Tensor:
        shape = [-1 if axis == dim else 1 for axis in range(4)]
        return torch.where(every_third(local.shape[dim]).to(local.device).view(shape), of_global, local)

    def scores() -> tuple[Tensor, Tensor]:
        found = at("hook_attn_scores")
        kinds = [torch.einsum("bqnh,bknh->bnqk", at(f"hook_q{x}"), at(f"hook_k{x}")) for x in ("", "_global")]
        return (of_row(kinds[0], kinds[1], 2) * attn.scale)[found.isfinite()], found[found.isfinite()]

    def mixed() -> tuple[Tensor, Tensor]:
        kinds = [torch.einsum("bnqk,bknh->bqnh", at("hook_pattern"), at(f"hook_v{x}")) for x in ("", "_global")]
        return of_row(kinds[0], kinds[1], 1), at("hook_z")

    yield "q k^T * scale, of global tokens q_global k_global^T * scale == attn_scores", scores
    yield "pattern @ v, of global tokens pattern @ v_global == z", mixed
    rest = ("softmax(attn_scores) == pattern", "z @ W_O == result")
    yield from ((name, pair) for name, pair in mixing_identities(attn, at) if name in rest)


@identities.register
def _(
    attn: ValueMaskedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the bias and the choice of keys."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)
    yield "exp(A softplus(v W_dt + b_dt)) == key_bias", lambda: (attn.key_bias(at("hook_v")), at("hook_key_bias"))

    def seen() -> tuple[Tensor, Tensor]:
        shown = at("hook_attn_scores") > float("-inf")
        bias = at("hook_key_bias").repeat_interleave(shown.shape[1] // attn.cfg.n_kv, 2).transpose(1, 2)[:, :, None]
        allowed = Context(shown.shape[2], shown.device).full_mask(attn.causal, attn.window)
        own, other = bias[..., None], bias[..., None, :]  # [... key_pos other_pos]
        is_later = torch.ones_like(allowed[0, 0], dtype=torch.bool).triu(1)
        before = ((other > own) | (other == own) & is_later) & allowed[..., None, :]
        return (allowed & (before.sum(-1) < attn.cfg.keep)).float(), shown.float()

    yield "the keys of largest bias, of equal ones the last, are seen", seen


@identities.register
def _(
    attn: TransientGlobalAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the blocks of a text without padding."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)

    def summed() -> tuple[Tensor, Tensor]:
        x, shown = get_input(), at("hook_block_sum")
        size, n_blocks = attn.cfg.block_size, shown.shape[1]
        sums = [x[:, i * size : (i + 1) * size if i < n_blocks - 1 else None].sum(1) for i in range(n_blocks)]
        return torch.stack(sums, 1) if sums else shown, shown

    yield "sum of the inputs of a block == block_sum", summed
    yield from norm_identity(attn, "global_norm", at, lambda: at("hook_block_sum"))
    for name, W, b in (("k", attn.W_K, attn.b_K), ("v", attn.W_V, attn.b_V)):

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            x = norm_output(attn, "global_norm", at, lambda: at("hook_block_sum"))
            return add_bias(torch.einsum("bgm,nmh->bgnh", x, W), b), at(f"hook_{name}_global")

        yield f"global_norm -> {name}_global", projected


@input_weights.register
def _(attn: TransientGlobalAttention) -> list[InputWeight]:
    """None: a norm cannot be folded, since sums of its outputs are normalised too."""
    return []


def projection_identities(attn: Attend, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
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
    attn: GroupedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`, by the whole matrices."""
    yield from projection_identities(attn, at, get_input)
    yield from mixing_identities(attn, at, lambda: at("hook_q"), lambda: at("hook_k"))


@identities.register
def _(
    attn: MixedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of both kinds of heads."""
    yield from projection_identities(attn, at, get_input)
    yield from mixing_identities(attn, at, lambda: at("hook_q"), lambda: at("hook_k"))
    for name, pair in identities(attn.conv, within(at, "conv"), get_input, lambda: at("hook_q")):
        yield f"conv: {name}", pair


@output_from_sites.register
def _(attn: MixedAttention, at: Sites) -> Tensor:
    """The output, from that of each head."""
    return add_bias(at("hook_result").sum(2) + at("conv.hook_result").sum(2), attn.b_O)


@input_weights.register
def _(attn: MixedAttention) -> list[InputWeight]:
    """None: the input is convolved too, and is zero outside of the text, where the output of a norm would not be."""
    return []


@identities.register
def _(conv: SpanConv, at: Sites, get_input: LazyTensor, queries: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding, with input `get_input()` and these queries."""

    def around(x: Tensor) -> Tensor:
        """The values around each position, with a last axis of offsets."""
        sides = (0, 0) * (x.ndim - 2) + (conv.cfg.n_offsets // 2,) * 2
        return F.pad(x, sides).unfold(1, conv.cfg.n_offsets, 1)

    def keys() -> Tensor:
        spans = torch.einsum("bpmo,om->bpm", around(get_input()), conv.W_depth)
        return project(spans, conv.W_K, conv.b_K)

    def scores() -> Tensor:
        return torch.einsum("bpnh,nhko->bpko", queries() * at("hook_k"), conv.W_kernel) + conv.b_kernel

    made: dict[str, tuple[str, LazyTensor]] = {
        "k": ("input around each position, W_depth, W_K + b_K", keys),
        "kernel_scores": ("(q * k) W_kernel + b_kernel", scores),
        "kernel": ("softmax(kernel_scores)", lambda: at("hook_kernel_scores").softmax(-1)),
        "v": ("input W_V + b_V", lambda: project(get_input(), conv.W_V, conv.b_V)),
        "z": ("kernel @ v", lambda: torch.einsum("bpnho,bpno->bpnh", around(at("hook_v")), at("hook_kernel"))),
        "result": ("z @ W_O", lambda: torch.einsum("bpnh,nhm->bpnm", at("hook_z"), conv.W_O)),
    }
    for site, (label, make) in made.items():
        yield f"{label} == {site}", partial(_with_site, make, at, f"hook_{site}")


def _with_site(make: LazyTensor, at: Sites, site: str) -> tuple[Tensor, Tensor]:
    return make(), at(site)
