"""Positions that enter attention as a bias on the scores."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.context import Context
from hooked_lm.components.stack_context import StackContext


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press et al. 2021, arXiv:2108.12409): each head prefers near keys by its own slope.

    The bias of a key is slope * (its position - that of the query). The slopes of a power of two of heads are a geometric
    sequence that ends at 2 ** -max_slope; other numbers of heads take those of the next lower power of two, and every
    other one of the next higher. `scale` multiplies the bias. `rounded` says in which type it was trained, if that is
    part of the model; positions are then counted from the first one, which a softmax does not see but for the rounding.
    """

    n_heads: int
    max_slope: float = 8.0
    scale: float = 1.0
    rounded: torch.dtype | None = None

    def slopes(self) -> Float[Tensor, " head"]:
        """One for each head."""
        lower = 2 ** math.floor(math.log2(self.n_heads))
        exponents = [(i + 1) / lower for i in range(lower)]
        exponents += [(2 * i + 1) / (2 * lower) for i in range(self.n_heads - lower)]
        return torch.tensor([2 ** (-self.max_slope * exponent) for exponent in exponents])

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch head #query_pos key_pos"]:
        """What is added to the scores. Counted from the query it is small where it matters, and half precision is enough."""

        def make() -> Tensor:
            slopes, positions = self.slopes().to(context.device, self.rounded), context.key_positions[:, None, None, :]
            if self.rounded is None:
                positions = positions - context.positions[:, None, :, None]
            return (slopes[:, None, None] * positions.to(slopes.dtype)).to(dtype) * self.scale

        return context.once((self, dtype), make)

    def build(self) -> "Alibi":
        """There are no weights."""
        return self


@dataclass(frozen=True)
class SharedBias:
    """The bias that a stack of layers makes once for all of them; it stands in the context."""

    is_given: ClassVar[bool] = True

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch head query_pos key_pos"]:
        """What is added to the scores."""
        assert isinstance(context, StackContext), "only a stack of layers shares a bias"
        assert context.score_bias is not None, "the stack has made no bias"
        return context.score_bias.to(dtype)

    def build(self) -> "SharedBias":
        """There are no weights here."""
        return self


PositionBias = Alibi | SharedBias | RelativeBias.Config
