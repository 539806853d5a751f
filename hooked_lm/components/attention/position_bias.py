"""Position biases, which are added to attention scores."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.constants import constant
from hooked_lm.components.context import Context
from hooked_lm.components.masks import query_rows
from hooked_lm.components.stack_context import StackContext

T = TypeVar("T")


class Unlearned:
    """A bias without weights."""

    def build(self: T) -> T:
        """Returns this object."""
        return self


@dataclass(frozen=True)
class Alibi(Unlearned):
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
            positions = context.key_positions[:, None, None, :]
            slopes = constant(positions, self.slopes)
            slopes = slopes if self.rounded is None else slopes.to(self.rounded)
            if self.rounded is None:
                positions = positions - context.positions[:, None, :, None]
            return (slopes[:, None, None] * positions.to(slopes.dtype)).to(dtype) * self.scale

        return context.once((self, dtype), compute)


@dataclass(frozen=True)
class SharedBias(Unlearned):
    """The bias that a stack computes once for all its layers, in `context.score_bias`.

    Attention that is called by itself has no such context: its scores then have no bias, as in transformers.
    """

    is_from_context: ClassVar[bool] = True
    of_stack: ClassVar[RelativeBias | None] = None  # what computes it also outside of the stack

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch #head #query_pos #key_pos"]:
        """The bias of the scores; a zero outside of a stack."""
        if isinstance(context, StackContext) and context.score_bias is not None:
            bias = context.score_bias.to(dtype)
            return bias if context.whole is None else query_rows(bias, context.rows_of_whole)
        if self.of_stack is not None:
            return self.of_stack.bias(context, dtype)
        return torch.zeros(1, 1, 1, 1, dtype=dtype, device=context.device)


class FirstSharedBias(SharedBias):
    """That of a stack's first layer, which computes the bias also outside of the stack. The weights are the stack's."""

    of_stack: RelativeBias  # type: ignore[misc]

    def __init__(self, of_stack: RelativeBias) -> None:
        self.of_stack = of_stack

    @classmethod
    def give(cls, of_stack: RelativeBias | None, blocks: nn.ModuleList) -> None:
        """Gives the bias of a stack, if there is one, to the first of its blocks."""
        if of_stack is not None:
            blocks[0].attn.position_bias = cls(of_stack)  # type: ignore[union-attr]


class Sparsity(Unlearned, ABC):
    """Which keys a query attends to: the bias of all others is minus infinity."""

    @property
    @abstractmethod
    def longest_full(self) -> int:
        """The length of the longest text in which all queries attend to all keys."""

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch 1 #query_pos #key_pos"]:
        """The bias of the scores; a zero for texts with full attention."""
        if not changes_scores(self, context):
            return torch.zeros(1, 1, 1, 1, dtype=dtype, device=context.device)
        return context.once((self, dtype), lambda: self._bias(context, dtype))

    @abstractmethod
    def _bias(self, context: Context, dtype: torch.dtype) -> Tensor:
        """The bias of the scores, computed once."""


@dataclass(frozen=True)
class Chunks(Sparsity):
    """Attention within chunks of `size` positions (Llama 4). The first chunk is shorter by `offset`."""

    size: int
    offset: int = 0

    @property
    def longest_full(self) -> int:
        """The length of the longest text of one chunk."""
        return self.size - self.offset

    def _bias(self, context: Context, dtype: torch.dtype) -> Tensor:
        query, key = ((pos + self.offset) // self.size for pos in (context.positions, context.key_positions))
        return _except(query[:, None, :, None] == key[:, None, None, :], dtype)


@dataclass(frozen=True)
class Band(Sparsity):
    """Attention to at most `before` positions before the query and `after` positions after it (T5Gemma 2)."""

    before: int
    after: int

    @property
    def longest_full(self) -> int:
        """The length of the longest text with full attention."""
        return min(self.before, self.after) + 1

    def _bias(self, context: Context, dtype: torch.dtype) -> Tensor:
        distance = context.key_positions[:, None, None, :] - context.positions[:, None, :, None]
        return _except((distance >= -self.before) & (distance <= self.after), dtype)


@dataclass(frozen=True)
class BlockSparse(Sparsity):
    """Attention between blocks of `size` positions (BigBird, Zaheer et al. 2020, arXiv:2007.14062).

    A block attends to itself, its two neighbours, the first and the last block, which attend to all. In training each of the
    other blocks also attends to `n_random` blocks that are drawn; to compute the same in every run, transformers takes the
    first block in their place. So its keys count `1 + n_random` times: the bias is the logarithm of that. Blocks are counted in
    each row, without its padding.
    """

    size: int
    n_random: int

    @property
    def longest_full(self) -> int:
        """The length of the longest text with full attention."""
        return (5 + 2 * self.n_random) * self.size

    def _bias(self, context: Context, dtype: torch.dtype) -> Tensor:
        length = context.key_positions[:, -1:, None, None] + 1
        query, key = context.positions[:, None, :, None] // self.size, context.key_positions[:, None, None] // self.size
        last, is_short = (length - 1) // self.size, length <= self.longest_full
        sees_all = is_short | (query == 0) | (query == last)
        near = (query - key).abs() <= 1
        bias = _except(sees_all | near | (key == 0) | (key == last), dtype)
        return bias.masked_fill_((key == 0) & ~sees_all, math.log(1 + self.n_random))


def _except(seen: Bool[Tensor, "#batch 1 query_pos key_pos"], dtype: torch.dtype) -> Tensor:
    """Minus infinity except where a key is seen."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


PositionBias = Alibi | SharedBias | RelativeBias.Config | Chunks | Band | BlockSparse


def changes_scores(position_bias: object, context: Context) -> bool:
    """Whether a bias is not a zero for a text of this length."""
    return not (isinstance(position_bias, Sparsity) and context.n_key <= position_bias.longest_full)
