"""Differential attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.differential import DifferenceNorm, DifferentialAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.norms.norm import norm_of, root_mean_square
from hooked_lm.components.verification.attention import mixable
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
)


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
