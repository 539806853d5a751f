"""Convolutions over positions: in attention, beside its heads, and beside a block."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.attention.convolutional import ConvolutionalAttention
from hooked_lm.components.attention.mixed import MixedAttention, SpanConv
from hooked_lm.components.attention.multihead import Attention, project
from hooked_lm.components.blocks.conv import ConvPostNormBlock
from hooked_lm.components.context import Context
from hooked_lm.components.verification.attention import mixing_identities, projection_identities
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    input_weights,
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


@identities.register
def _(block: ConvPostNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of its wiring, and those of the convolution."""
    yield from wired_identities(block, at, block.wiring(), shift)
    yield "conv(resid_pre) == conv_pre", lambda: (block.convolved(at("hook_resid_pre")), at("hook_conv_pre"))
    yield "act(conv_pre) == conv_out", lambda: (block.conv_act(at("hook_conv_pre")), at("hook_conv_out"))
