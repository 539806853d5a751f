"""Significance: which cells of a grid have an effect at all, after correction for how many cells there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.results.bootstrap import ENOUGH_PROMPTS, LEAST_SKEWED, MANY_PROMPTS, TOO_L_SKEWED, SkewWarning, skewness
from hooked_lm.results.groups import sums_by_group
from hooked_lm.results.scores import METRIC, Scores
from hooked_lm.results.sign_flips import CORRECTIONS, FlipTest, flip_test, has_effect

SKEWED, MOST_SKEWED = "skewed", 0.2  # in `about`; the L-skewness from which on it is said of many prompts
TESTED = "tested"  # in `about`: which effects were tested, where a result has several


@dataclass(frozen=True, eq=False, repr=False)
class Significance(Scores):
    """Effects, and which of them differ from 0 by more than the spread over prompts and the number of cells explain.

    Args:
        values: the effects, [*grid, prompt].
        p: the p-value of each cell alone, [*grid].
        adjusted: the p-value after correction for all cells (of each metric); NaN, as `p`, where a value is missing.
        level: the share of errors that is allowed; a cell is significant if `adjusted` is no larger.
        correction: "max" and "holm" keep any error in the table to that share of all tables, "bh" the share of errors among the
            significant cells.
        n_flips: the number of sign flips of each metric.

    `SweepResult.significant` makes one; of other scores with an effect for each prompt, `Significance.of`. Parts that are
    selected keep the p-values of the whole.

    >>> effects = Scores(
    ...     torch.tensor([[1.0, 2, 1, 2, 1, 2], [4, -1, 1, -1, 1, -1]]), {"layer": [0, 1]}
    ... )
    >>> found = Significance.of(effects)
    >>> found.is_significant.tolist(), found.p.tolist()
    ([True, False], [0.03125, 0.8125])
    """

    p: Float[Tensor, "..."]
    adjusted: Float[Tensor, "..."]
    level: float
    correction: str
    n_flips: int
    GRID: ClassVar[tuple[str, ...]] = ("values", "p", "adjusted")
    _METRIC_IN_ABOUT: ClassVar[str] = METRIC

    @classmethod
    def of(
        cls,
        effects: Scores,
        level: float = 0.05,
        correction: str = "max",
        n_permutations: int | None = None,
        seed: int = 0,
    ) -> "Significance":
        """Tests the means of effects over prompts, or over their groups, against 0 by flipping signs; see `flip_test`.

        The arguments and the errors are those of `SweepResult.significant`.
        """
        n_metrics = len(effects.axes.get(METRIC, [""]))
        tests, skewed = list[FlipTest](), 0.0
        counted = effects._counted if effects.groups is None else "group"
        for part in effects.values.reshape(n_metrics, -1, effects.n_prompts):
            by_unit = sums_by_group(part, effects.groups)
            tests.append(flip_test(by_unit, level, correction, n_permutations, seed, counted))
            if by_unit.shape[1] >= ENOUGH_PROMPTS:
                skewed = max(skewed, skewness(by_unit[has_effect(by_unit)], by_rank=True))
        both = [test.p for test in tests], [test.adjusted for test in tests]
        p, adjusted = (torch.cat(each).view(effects.values.shape[:-1]) for each in both)
        given = effects.values, effects.axes, p, adjusted, level, correction, tests[0].n_flips
        about = {**effects.about, "seed": seed}
        if skewed > (MOST_SKEWED if by_unit.shape[1] >= MANY_PROMPTS else TOO_L_SKEWED):
            about[SKEWED] = skewed
            is_least = any(name in effects._measured() for name in LEAST_SKEWED)
            metric = "" if is_least else "a metric that is less skewed, such as a logit difference, "
            warn_caller(
                f"the effects are skewed over the {counted}s (L-skewness {skewed:.2f}), and sign flips suppose that they are "
                f"symmetric around 0 if there are none: more cells may be significant without an effect than level {level:g} "
                f"says; use more {counted}s, {metric}or interval(simultaneous=True)",
                SkewWarning,
            )
        return cls(*given, about=about, groups=effects.groups)

    def _check(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(f"correction must be one of {', '.join(map(repr, CORRECTIONS))}, got {self.correction!r}")
        for name, tensor in (("p", self.p), ("adjusted", self.adjusted)):
            if tensor.shape != self.values.shape[:-1]:
                raise ValueError(f"{name} must be {list(self.values.shape[:-1])}, got {list(tensor.shape)}")

    @property
    def is_significant(self) -> Bool[Tensor, "*grid"]:
        """Which cells have an effect at this level."""
        return self.adjusted <= self.level

    @property
    def n_significant(self) -> int:
        """How many cells have an effect at this level."""
        return int(self.is_significant.sum())

    @property
    def n_tested(self) -> int:
        """How many cells have a value for each prompt, and an effect on some."""
        return int(self._is_tested().sum())

    def _is_tested(self) -> Bool[Tensor, " cell"]:
        parts = self.values.reshape(len(self.axes.get(METRIC, [""])), -1, self.n_prompts)
        return torch.cat([has_effect(sums_by_group(part, self.groups)) for part in parts])

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def _more_columns(self) -> dict[str, Tensor]:
        return {"p": self.p, "adjusted": self.adjusted, "significant": self.is_significant}

    @property
    def _column(self) -> str:
        return "effect"

    def _drawn(self, means: Float[Tensor, "which *grid"]) -> Float[Tensor, "which *grid"]:
        return means.where(self.is_significant, torch.nan)

    def _pictured(self) -> dict[str, Any]:
        what = str(self.about.get("what", "effects"))
        metrics: Sequence[object] = self.axes.get(METRIC, ())
        return {
            "title": f"{what[:1].upper()}{what[1:]}: the significant effects",
            "subtitle": f"{', '.join(self._summary())}; the other cells are blank",
            "value_name": f"change of {self._measured() or 'metric'}",
            "baselines": [{"no effect": 0.0}] * max(1, len(metrics)),
        }

    def _summary(self) -> list[str]:
        n_cells, n_tested = prod(self.values.shape[:-1]), self.n_tested
        n_missing = int(self.p.isnan().sum())
        none = n_cells - n_missing - n_tested
        said = [
            f"{self.n_significant} of {n_tested} cells significant at {self.level:g}",
            f"{CORRECTIONS[self.correction]} in {self.n_flips:,} sign flips",
        ]
        said += [f"tested: {self.about[TESTED]}"] if TESTED in self.about else []
        said += ["effects are skewed, so more may seem significant"] if SKEWED in self.about else []
        said += [f"{none} without any effect are not counted"] if none else []
        return said + ([f"{n_missing} without a value"] if n_missing else [])

    def __repr__(self) -> str:
        if METRIC not in self.axes:
            return super().__repr__()
        parts = [self.select(metric=one) for one in self.axes[METRIC]]
        counts = [f"{one}: {part.n_significant}" for one, part in zip(self.axes[METRIC], parts, strict=True)]
        return f"{super().__repr__()[:-1]}; cells significant at {self.level:g}: {', '.join(counts)})"
