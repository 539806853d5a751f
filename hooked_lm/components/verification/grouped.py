"""Weights of groups of dimensions."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.attention.grouped import GroupedAttention
from hooked_lm.components.grouped import GroupedMLP
from hooked_lm.components.verification.attention import mixing_identities, projection_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    identities,
    input_weights,
    output_weights,
)


@identities.register
def _(
    attn: GroupedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`, by the whole matrices."""
    yield from projection_identities(attn, at, get_input)
    yield from mixing_identities(attn, at, lambda: at("hook_q"), lambda: at("hook_k"))


@input_weights.register
def _(attn: GroupedAttention) -> list[InputWeight]:
    """None: a norm's weights cannot be folded into whole matrices, which are not parameters."""
    return []


@output_weights.register
def _(attn: GroupedAttention) -> list[Tensor]:
    """Only the bias: a matrix of groups cannot be centred."""
    return [] if attn.b_O is None else [attn.b_O]


@input_weights.register
def _(mlp: GroupedMLP) -> list[InputWeight]:
    """None: a norm's weights cannot be folded into `W_in`, which is not a parameter."""
    return []


@output_weights.register
def _(mlp: GroupedMLP) -> list[Tensor]:
    """Only the bias: a matrix of groups cannot be centred."""
    return [] if mlp.b_out is None else [mlp.b_out]
