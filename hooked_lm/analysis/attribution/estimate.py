"""The result of attribution: the estimated effects of many exchanges, and how well they agree with exact ones."""

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import later
from hooked_lm.results import Label

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = later("pandas", "viz")

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

    >>> import torch
    >>> estimated = torch.tensor([[1.0], [2.0], [4.0]])
    >>> found = Attribution(estimated, {"layer": [0, 1, 2]}, torch.zeros(1), method="gradient", exact=estimated.sqrt())
    >>> float(found.agreement["spearman"].item())
    1.0
    """

    method: str = ""
    exact: Float[Tensor, "..."] | None = None
    GRID: ClassVar[tuple[str, ...]] = ("values", "exact")

    def _check(self) -> None:
        super()._check()
        if self.exact is not None and self.exact.shape != self.values.shape:
            raise ValueError(
                f"exact values {list(self.exact.shape)} are not those of the estimates {list(self.values.shape)}"
            )

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
