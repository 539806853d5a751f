"""Identities of MLPs with adapters."""

from torch import Tensor

from hooked_lm.components.mlp import AbstractGatedMLP
from hooked_lm.components.verification.mlp import branches
from hooked_lm.families.decoders.zamba2.adapters import AdaptedGatedMLP


@branches.register
def _(mlp: AdaptedGatedMLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both branches of an input, with what the adapter adds."""
    gate, linear = branches.dispatch(AbstractGatedMLP)(mlp, x)
    to_gate, to_linear = mlp.adapter(x)
    return gate + to_gate, linear + to_linear
