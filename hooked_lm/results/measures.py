"""Measures: scores of which some are shares from 0 to 1, with the intervals of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.bootstrap import wilson_prompts
from hooked_lm.results.scores import METRIC, SHARE, UNBOUNDED, Scores


@dataclass(frozen=True, eq=False, repr=False)
class Measures(Scores):
    """Metrics for each prompt; `shares` says of each metric whether it is a share from 0 to 1, as accuracies are.

    The intervals of shares are Wilson's (1927), which have a width even if all prompts are right; other metrics have those of
    `Scores`. Without an axis "metric", `shares` has one entry. Raises ValueError for another number of entries.

    >>> low, high = Measures(torch.ones(12), {}, [True]).interval()
    >>> round(float(low), 2), float(high)
    (0.76, 1.0)
    """

    shares: Sequence[bool]

    def _check(self) -> None:
        super()._check()
        object.__setattr__(self, "shares", list(self.shares))
        if len(self.shares) != (n := len(self.axes.get(METRIC, [""]))):
            raise ValueError(f"shares has an entry for each of {n} metrics, got {len(self.shares)}")

    @property
    def _bounds(self) -> tuple[float, float]:
        return SHARE if self.shares == [True] else UNBOUNDED

    def power(self, width: float | int, level: float = 0.95, simultaneous: bool = False) -> Float[Tensor, "*grid"]:
        """As `Scores.power`; of shares, the number for which Wilson's interval of the same mean is as narrow."""
        if METRIC in self.axes or not self.shares[0]:
            return super().power(width, level, simultaneous)
        return torch.tensor(float(wilson_prompts(float(self.mean), width, level)))

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any]:
        changed = super()._changed_by(name, index)
        if name != METRIC:
            return changed
        return {**changed, "shares": [self.shares[i] for i in ([index] if isinstance(index, int) else index)]}
