"""Kinds of attention heads: the keys that each query of a prompt is expected to attend to."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

Row = Int[Tensor, " pos"]  # the ids of one prompt, without padding
Targets = Bool[Tensor, "query_pos pos"]  # [query, key]: the keys that a query is expected to attend to
TargetRows = Callable[[slice], Targets]  # some queries -> their rows of the targets
WHOLE = slice(None)


def previous_token(tokens: Row, queries: slice = WHOLE) -> Targets:
    """For each query, the previous token."""
    positions = torch.arange(len(tokens), device=tokens.device)
    return positions == positions[queries, None] - 1


def duplicate_token(tokens: Row, queries: slice = WHOLE) -> Targets:
    """For each query, the earlier occurrences of the same token."""
    positions = torch.arange(len(tokens), device=tokens.device)
    return (tokens == tokens[queries, None]) & (positions < positions[queries, None])


def induction(tokens: Row, queries: slice = WHOLE) -> Targets:
    """For each query, the tokens that follow earlier occurrences of the same token.

    >>> induction(torch.tensor([7, 8, 9, 7])).nonzero()
    tensor([[3, 1]])
    """
    return F.pad(duplicate_token(tokens, queries)[:, :-1], (1, 0))


Kind = Callable[[Row], Targets]
KINDS: dict[str, Kind] = {
    "previous_token": previous_token,
    "duplicate_token": duplicate_token,
    "induction": induction,
}
