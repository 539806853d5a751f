"""Identities of heads that convolve beside heads that attend."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.attention.multihead import project
from hooked_lm.components.verification.attention import mixing_identities, projection_identities
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
from hooked_lm.families.encoders.convbert.mixed import MixedAttention, SpanConv


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
