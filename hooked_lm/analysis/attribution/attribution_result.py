"""The result of attribution: the estimated effects of many exchanges, and how well they agree with exact ones."""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import lazy_import
from hooked_lm.results import Label
from hooked_lm.results.bootstrap import Resampling
from hooked_lm.results.scores import METRIC
from hooked_lm.results.significance import TESTED

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

TOP = 0.05  # the share of the cells that are the largest
NUMBERS = ("spearman", "spearman_live", "pearson", "slope", "top", "sign")
BY = ("metric", "site")  # the axes whose agreement is measured separately
ROUNDING = 1e-5  # relative to the largest effect; smaller ones count as 0


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(SweepResult):
    """Estimates, from gradients, of the results of a sweep over the same grid.

    `values` are estimates of the metric with each cell exchanged, so `effects()`, `normalized()`, `top` and `plot` mean the same
    as for a SweepResult. `exact` has the results of exact patching where it was run (NaN elsewhere), and `agreement` how well
    the estimates agree with them.

    `interval`, `top` and figures have intervals of the *exact* mean effect. More prompts do not make an estimate right, so its
    spread over prompts is not enough: for a cell that was patched exactly, the interval is that of its exact values, extended to
    the estimate; for others it is that of the estimates, widened by the error that 95% of the exact cells do not exceed, relative
    to the size of their estimate and the mean size of all. That takes 19 exact cells at level 0.95. Otherwise intervals are NaN,
    and tables have none; `estimates` has those of the mean estimate.

    `significant` tests the estimates, or the exact effects if every cell was patched exactly, and says which.

    >>> import torch
    >>> estimated = torch.tensor([[1.0], [2.0], [4.0]])
    >>> found = Attribution(
    ...     estimated,
    ...     {"layer": [0, 1, 2]},
    ...     torch.zeros(1),
    ...     method="gradient",
    ...     exact=estimated.sqrt(),
    ... )
    >>> float(found.agreement["spearman"].item())
    1.0
    """

    method: str = ""
    exact: Float[Tensor, "..."] | None = None
    errors: Float[Tensor, "..."] | None = (
        None  # of all exact cells, [cell] or [metric, cell]; parts keep those of the whole
    )
    floor: Float[Tensor, "..."] | None = None  # the mean size of an estimated effect, [] or [metric]
    GRID: ClassVar[tuple[str, ...]] = ("values", "exact")
    _BY_METRIC: ClassVar[tuple[str, ...]] = (*SweepResult._BY_METRIC, "errors", "floor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact is not None and self.exact.shape != self.values.shape:
            raise ValueError(
                f"exact values {list(self.exact.shape)} are not those of the estimates {list(self.values.shape)}"
            )
        if self.exact is not None and self.errors is None:
            lead = len(self.axes[METRIC]) if METRIC in self.axes else 1
            start = self._for_cells(self.unchanged)
            effects, exact = (
                (values - start).double().mean(-1).reshape(lead, -1) for values in (self.values, self.exact)
            )
            floor = effects.abs().nanmean(1)
            errors = [_relative(*each) for each in zip(effects, exact, floor, strict=True)]
            of_metrics = torch.stack(errors).float(), floor.float()
            both = of_metrics if METRIC in self.axes else tuple(each[0] for each in of_metrics)
            for name, tensor in zip(("errors", "floor"), both, strict=True):
                object.__setattr__(self, name, tensor)

    # ---- intervals ---------------------------------------------------------------------------------------------------

    @property
    def estimates(self) -> SweepResult:
        """The estimates alone, as a SweepResult, whose intervals are those of the mean estimate over prompts: they say nothing of
        how far it is from the exact effect."""
        names = ("corrupted", "clean", "cost", "base", "about", "groups", "binary")
        return SweepResult(self.values, self.axes, **{name: getattr(self, name) for name in names})

    def normalized(self) -> "Attribution":
        """As `SweepResult.normalized`, of estimates and exact values."""
        found = super().normalized()
        if self.floor is None or self.clean is None:
            return found
        return replace(found, floor=self.floor / (self.clean - self.corrupted).mean(-1).abs())

    def _tested(self) -> SweepResult:
        """The exact effects if every cell was patched exactly, else the estimates: exact effects among estimates, which may be
        larger or smaller throughout, would be significant by their kind."""
        has_all = self.exact is not None and not bool((self.exact.isnan() & ~self.values.isnan()).any())
        found = self.estimates if self.exact is None or not has_all else replace(self.estimates, values=self.exact)
        said = "the exact effects" if has_all else "the estimates, not exact effects"
        return replace(found, about={**found.about, TESTED: said}).effects()

    @property
    def _has_intervals(self) -> bool:
        return self.errors is not None and self.errors.numel() > 0

    @property
    def _about_intervals(self) -> str:
        if not self._has_intervals:
            return "estimated, without intervals: no cell was patched exactly"
        return f"estimated, {super()._about_intervals}, of the exact effect"

    def _ends(
        self, cells: Int[Tensor, " cell"], resampling: Resampling, simultaneous: bool = True
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
        """The intervals of the exact means, from those of the estimates and of the cells with exact values."""
        if self.exact is None or self.errors is None or self.floor is None:
            return torch.full(cells.shape, torch.nan), torch.full(cells.shape, torch.nan)
        is_exact = ~self.exact.isnan().any(-1)
        measured = replace(self.estimates, values=self.exact.where(is_exact[..., None], self.values))
        low, high = measured._ends(cells, resampling, simultaneous)
        mean, size, is_exact = (each.flatten()[cells] for each in (self.mean, self.effects().mean.abs(), is_exact))
        error = _quantile(self.errors, resampling.level) * (size + self.floor)
        return (
            torch.where(is_exact, low.minimum(mean), mean - torch.hypot(mean - low, error)),
            torch.where(is_exact, high.maximum(mean), mean + torch.hypot(high - mean, error)),
        )

    # ---- agreement ---------------------------------------------------------------------------------------------------

    @property
    def agreement(self) -> "pd.DataFrame":
        """How well estimated and exact mean effects agree: a row for each metric and site.

        Columns: `cells` (the number measured exactly) and the numbers of `hooked_lm.analysis.attribution.estimate.agreement`:
        `spearman` and `spearman_live` (rank correlation, and that among cells with an effect), `pearson`, `slope` (1 if the
        sizes are right), `top` (how much the largest 5 % have in common) and `sign`. Empty without exact values.
        """
        if self.exact is None:
            return pd.DataFrame(columns=["cells", *NUMBERS])
        by = [name for name in BY if name in self.axes]
        return pd.DataFrame([dict(zip(by, key, strict=True)) | row for key, row in self._agreements().items()])

    def _agreements(self) -> dict[tuple[Label, ...], dict[str, float | int]]:
        """The agreement for each metric and site that has exact values."""
        if self.exact is None:
            return {}
        by = [name for name in BY if name in self.axes]
        found = {}
        for key in product(*(self.axes[name] for name in by)):
            part = self.select(**dict(zip(by, key, strict=True)))
            assert part.exact is not None
            unchanged = part._for_cells(part.unchanged)
            row = agreement(*((values - unchanged).mean(-1).flatten() for values in (part.values, part.exact)))
            if row["cells"] or not by:
                found[key] = row
        return found

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """The table of a SweepResult; if exact patching was run, with a column `exact`, NaN for cells it did not include."""
        table = super().to_dataframe(per_prompt, level)
        if self.exact is None:
            return table
        return table.assign(exact=(self.exact if per_prompt else self.exact.mean(-1)).flatten().numpy())

    def _summary(self) -> list[str]:
        parts = [*super()._summary(), *([self.method] if self.method else [])]
        found = self._agreements()
        n_cells = int(sum(row["cells"] for row in found.values()))
        if not n_cells:
            return [*parts, "not checked by exact patching"]
        known = [row["spearman"] for row in found.values() if row["spearman"] == row["spearman"]]
        of = f"{n_cells} cells"
        if not known:
            return [
                *parts,
                f"agreement with exact patching of {of} is undefined: estimates or exact effects do not vary",
            ]
        several = " or more" * (len(found) > 1)
        slopes = sorted({f"{row['slope']:.2f}" for row in found.values() if row["slope"] == row["slope"]}, key=float)
        slope = f", slope {slopes[0]}{f' to {slopes[-1]}' * (len(slopes) > 1)}" if slopes else ""
        return [*parts, f"agrees with exact patching of {of}: rank correlation {min(known):.2f}{several}{slope}"]


def _relative(
    estimated: Float[Tensor, " cell"], exact: Float[Tensor, " cell"], floor: Float[Tensor, ""]
) -> Float[Tensor, " some"]:
    """The errors of the cells with exact effects, relative to the estimate and the mean size of all."""
    known = ~(estimated.isnan() | exact.isnan())
    sizes = estimated[known].abs() + floor
    return ((exact[known] - estimated[known]).abs() / sizes).nan_to_num(nan=0.0, posinf=torch.inf)


def _quantile(errors: Float[Tensor, " some"], level: float) -> float:
    """What an error of a further cell does not exceed with this probability, if the cells were drawn at random (Vovk et al. 2005,
    doi:10.1007/b106715); NaN if there are too few to know."""
    rank = math.ceil((len(errors) + 1) * level - 1e-9)
    return float(errors.sort().values[rank - 1]) if 1 <= rank <= len(errors) else math.nan


def agreement(estimated: Float[Tensor, " cell"], exact: Float[Tensor, " cell"]) -> dict[str, float | int]:
    """How well estimates agree with exact effects.

    `cells` is their number. `spearman` is the rank correlation (Spearman 1904), `spearman_live` that among the cells whose exact
    effect is above a hundredth of the largest: most cells of a grid have none, and to rank those among themselves is of no use.
    `pearson` is the correlation. `slope` is that of the line through 0 from exact effects to estimates: 1 if the sizes are right,
    less if the estimates are too small. `top` is the share of the largest 5 % of the exact effects that are among the largest
    5 % of the estimates, `sign` that of the right signs among live cells. NaN where nothing varies.

    For ranks, effects below a hundred-thousandth of the largest count as 0: they are rounding.

    >>> import torch
    >>> agreement(torch.tensor([0.1, 0.2, -5.0]), torch.tensor([1.0, 2.0, -1.0]))["spearman"]
    1.0
    """
    both = torch.stack([estimated, exact]).double()
    both = both[:, ~both.isnan().any(0)]
    live = both[:, both[1].abs() > both[1].abs().amax() / 100] if both.shape[1] else both
    ranks = [_ranks(one.where(one.abs() > ROUNDING * one.abs().max(), 0.0)) if len(one) else one for one in both]
    return {
        "cells": both.shape[1],
        "spearman": _correlation(*ranks),
        "spearman_live": _correlation(*(_ranks(one) if len(one) else one for one in live)),
        "pearson": _correlation(*both),
        "slope": float((both[0] * both[1]).sum() / both[1].square().sum()),
        "top": _in_common(*both.abs()),
        "sign": float((live[0] * live[1] > 0).double().mean()),
    }


def _in_common(one: Float[Tensor, " cell"], other: Float[Tensor, " cell"]) -> float:
    """The share of the largest 5 % that two lists of numbers have in common."""
    n = math.ceil(TOP * len(one))
    if not n or not bool(other.any()):
        return math.nan
    return len({*one.topk(n).indices.tolist()} & {*other.topk(n).indices.tolist()}) / n


def _ranks(numbers: Float[Tensor, " cell"]) -> Float[Tensor, " cell"]:
    """The rank of each number; equal ones share the mean of their ranks."""
    _, place, counts = numbers.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def _correlation(one: Float[Tensor, " cell"], other: Float[Tensor, " cell"]) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float(one.square().sum() * other.square().sum()) ** 0.5
    return float((one * other).sum()) / size if size > 0 else float("nan")
