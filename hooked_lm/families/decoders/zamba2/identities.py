"""Identities of attention and MLPs with adapters."""

from torch import Tensor

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.mlp import AbstractGatedMLP
from hooked_lm.components.verification.attention import projected_heads
from hooked_lm.components.verification.mlp import branches
from hooked_lm.families.decoders.zamba2.adapters import AdaptedAttention, AdaptedGatedMLP


@projected_heads.register
def _(attn: AdaptedAttention, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Queries, keys or values of an input, with what the adapter adds."""
    return projected_heads.dispatch(Attention)(attn, x, W, b) + attn.adapter_of(W)(x)


@branches.register
def _(mlp: AdaptedGatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both branches of an input, with what the adapter adds."""
    gate, linear = branches.dispatch(AbstractGatedMLP)(mlp, x)
    to_gate, to_linear = mlp.adapter(x)
    return gate + to_gate, linear + to_linear
