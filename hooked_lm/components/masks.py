"""Masks: which keys a query may attend to, where this does not go without saying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from copy import copy
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

T = TypeVar("T")
Own = TypeVar("Own", bound="Masks")
Mask = Bool[Tensor, "batch 1 query_pos key_pos"]
Scores = Float[Tensor, "#batch #head #query_pos #key_pos"]


class Masks(ABC):
    """The masks of a context, each computed once. A plain forward pass, where queries attend to all earlier keys, needs none."""

    device: torch.device
    n_pos: int
    n_past: int
    n_key: int
    real: Bool[Tensor, "batch key_pos"] | None
    positions: Int[Tensor, "batch pos"]
    key_positions: Int[Tensor, "batch key_pos"]
    added_mask: Scores | None
    _shared: dict[Hashable, object]
    whole: "Masks | None" = None  # of the context of some queries: that of all
    rows_of_whole: Int[Tensor, " query_pos"]  # their columns among these

    @property
    def queries(self) -> Int[Tensor, " query_pos"]:
        """The columns of the queries among the keys."""
        if self.whole is not None:
            return self.whole.queries[self.rows_of_whole]
        return torch.arange(self.n_past, self.n_past + self.n_pos, device=self.device)

    @property
    @abstractmethod
    def needs_mask(self) -> bool:
        """Whether more than padding, windows and the order of tokens decides which keys a query may attend to."""

    def of_queries(self: Own, rows: Int[Tensor, " row"]) -> Own:
        """The context of the scores of some of these queries, with all keys."""
        found = copy(self)
        found.n_pos, found._shared, found.whole = len(rows), {}, self.whole or self
        found.rows_of_whole = rows if self.whole is None else self.rows_of_whole[rows]
        found.positions = self.positions[:, rows]
        found.added_mask = None if self.added_mask is None else query_rows(self.added_mask, rows)
        return found

    @abstractmethod
    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once per pass for each key."""

    def full_mask(self, causal: bool, window: int | None) -> Mask:
        """Which keys a query may attend to. It may always attend to itself, so that padding has no empty rows."""
        return self.once((causal, window), lambda: self._full_mask(causal, window))

    def _full_mask(self, causal: bool, window: int | None) -> Mask:
        if self.whole is not None and self.whole.needs_mask:
            return self.whole.full_mask(causal, window)[:, :, self.rows_of_whole]
        if (known := self.known_mask(causal, window)) is not None:
            return known
        query = self.queries[None, None, :, None]
        key = torch.arange(self.n_key, device=self.device)
        allowed = key <= query if causal else torch.ones_like(key <= query)
        if window is not None:
            distance = self.positions[:, None, :, None] - self.key_positions[:, None, None, :]
            allowed = allowed & ((distance if causal else distance.abs()) < window)
        if self.real is not None:
            allowed = allowed & self.real[:, None, None, :] | (key == query)
        return self.changed_mask(allowed, window)

    def known_mask(self, causal: bool, window: int | None) -> Mask | None:
        """The mask of a run whose mask does not follow from its positions."""
        return None

    def changed_mask(self, allowed: Bool[Tensor, "#batch 1 query_pos key_pos"], window: int | None) -> Mask:
        """The mask of padding, window and order, changed by what else decides which keys a query may attend to."""
        return allowed

    def additive_mask(
        self, causal: bool, window: int | None, dtype: torch.dtype
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """Numbers to add to the scores: `added_mask` or 0 where a query may attend to a key, minus infinity elsewhere."""

        def make() -> Tensor:
            forbidden = ~self.full_mask(causal, window)
            return torch.zeros(forbidden.shape, dtype=dtype, device=self.device).masked_fill_(forbidden, float("-inf"))

        mask = self.once((causal, window, dtype), make)
        return mask if self.added_mask is None else mask + self.added_mask.to(mask)

    def adding(self: Own, numbers: Scores) -> Own:
        """The same context, with numbers to add to the scores."""
        found = copy(self)
        found.added_mask = numbers if self.added_mask is None else self.added_mask + numbers
        return found


def query_rows(scores: Scores, rows: Int[Tensor, " row"]) -> Float[Tensor, "#batch #head #row #key_pos"]:
    """Some rows of what is added to scores; of what is the same for all queries the only one."""
    return scores if scores.shape[-2] == 1 else scores[..., rows, :]
