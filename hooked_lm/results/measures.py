"""Measures: scores of which some are shares from 0 to 1, with the intervals of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.results.bootstrap import wilson, wilson_prompts
from hooked_lm.results.groups import by_group
from hooked_lm.results.scores import METRIC, Scores


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

    def _interval_of(
        self, values: Float[Tensor, "cell prompt"], level: float, n_resamples: int = 1000, seed: int = 0
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
        [is_share] = self.shares  # intervals are those of one metric at a time
        if is_share:
            return wilson(by_group(values, self.groups), level)
        return super()._interval_of(values, level, n_resamples, seed)

    def _simultaneous(
        self,
        values: Float[Tensor, "cell prompt"],
        places: Int[Tensor, " place"],
        level: float,
        n_resamples: int = 1000,
        seed: int = 0,
    ) -> tuple[Float[Tensor, " place"], Float[Tensor, " place"]]:
        if not self.shares[0]:
            return super()._simultaneous(values, places, level, n_resamples, seed)
        return self._interval_of(
            values[places], 1 - (1 - level) / len(values)
        )  # Bonferroni's, which stay between 0 and 1

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
