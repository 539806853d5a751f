"""Position biases, which are added to attention scores."""

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
    """Attention with linear biases (Press et al. 2021, arXiv:2108.12409): a bias linear in distance, with a slope per head.

    The bias is slope * (key position - query position) * scale. For a power of two of heads the slopes are a geometric
    sequence that ends at 2 ** -max_slope; other numbers of heads take those of the next lower power of two, then every
    other one of the next higher. `rounded` is the dtype of the bias in training, where the model depends on it; positions
    are then counted from the first key, which changes the softmax by rounding only.
    """

    n_heads: int
    max_slope: float = 8.0
    scale: float = 1.0
    rounded: torch.dtype | None = None

    def slopes(self) -> Float[Tensor, " head"]:
        """The slope of each head."""
        lower = 2 ** math.floor(math.log2(self.n_heads))
        exponents = [(i + 1) / lower for i in range(lower)]
        exponents += [(2 * i + 1) / (2 * lower) for i in range(self.n_heads - lower)]
        return torch.tensor([2 ** (-self.max_slope * exponent) for exponent in exponents])

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch head #query_pos key_pos"]:
        """The bias of the scores. Counted from the query it is small for near keys, so half precision is enough."""

        def compute() -> Tensor:
            slopes, positions = self.slopes().to(context.device, self.rounded), context.key_positions[:, None, None, :]
            if self.rounded is None:
                positions = positions - context.positions[:, None, :, None]
            return (slopes[:, None, None] * positions.to(slopes.dtype)).to(dtype) * self.scale

        return context.once((self, dtype), compute)

    def build(self) -> "Alibi":
        """Returns this object, which has no weights."""
        return self


@dataclass(frozen=True)
class SharedBias:
    """The bias that a stack computes once for all its layers, in `context.score_bias`."""

    is_from_context: ClassVar[bool] = True

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch head query_pos key_pos"]:
        """The bias of the scores."""
        assert isinstance(context, StackContext), "a shared bias needs the context of a stack"
        assert context.score_bias is not None, "the context has no score_bias"
        return context.score_bias.to(dtype)

    def build(self) -> "SharedBias":
        """Returns this object, which has no weights."""
        return self


@dataclass(frozen=True)
class Chunks:
    """Attention within chunks of `size` positions: minus infinity between queries and keys of different chunks (Llama 4)."""

    size: int

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch 1 #query_pos #key_pos"]:
        """The bias of the scores: a zero for texts of one chunk."""

        def compute() -> Tensor:
            if context.n_key <= self.size:
                return torch.zeros(1, 1, 1, 1, dtype=dtype, device=context.device)
            query, key = context.positions // self.size, context.key_positions // self.size
            apart = query[:, None, :, None] != key[:, None, None, :]
            return torch.zeros(apart.shape, dtype=dtype, device=context.device).masked_fill_(apart, float("-inf"))

        return context.once((self, dtype), compute)

    def build(self) -> "Chunks":
        """Returns this object, which has no weights."""
        return self


PositionBias = Alibi | SharedBias | RelativeBias.Config | Chunks
