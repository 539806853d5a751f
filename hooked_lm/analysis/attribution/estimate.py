"""The result of attribution: the estimated effects of many exchanges, and how well they agree with exact ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import later

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = later("pandas", "viz")

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

        Columns: `cells` (the number measured exactly), `spearman` (rank correlation), `pearson`, `sign` (the share of cells
        with the right sign, of those whose exact effect is above a hundredth of the largest). Empty without exact values.
        """
        if self.exact is None:
            return pd.DataFrame(columns=["cells", "spearman", "pearson", "sign"])
        unchanged = self._for_cells(self.unchanged)
        both = torch.stack([self.values - unchanged, self.exact - unchanged]).mean(-1)
        by = [name for name in ("metric", "site") if name in self.axes]
        table = self._cells().assign(estimated=both[0].flatten().numpy(), exact=both[1].flatten().numpy()).dropna()
        groups = table.groupby(by, sort=False) if by else [((), table)]
        rows = []
        for key, part in groups:
            ends = (torch.tensor(part[name].to_numpy()) for name in ("estimated", "exact"))
            rows.append(dict(zip(by, key, strict=True)) | agreement(*ends))
        return pd.DataFrame(rows)

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """The table of a SweepResult; if exact patching was run, with a column `exact`, NaN for cells it did not include."""
        table = super().to_dataframe(per_prompt, level)
        if self.exact is None:
            return table
        return table.assign(exact=(self.exact if per_prompt else self.exact.mean(-1)).flatten().numpy())

    def _summary(self) -> list[str]:
        parts = [*super()._summary(), *([self.method] if self.method else [])]
        table = self.agreement
        if not len(table) or not table["cells"].sum():
            return [*parts, "not checked by exact patching"]
        worst = table["spearman"].min()
        of = f"{table['cells'].sum()} cells"
        if worst != worst:
            return [
                *parts,
                f"agreement with exact patching of {of} is undefined: estimates or exact effects do not vary",
            ]
        return [
            *parts,
            f"agrees with exact patching of {of}: rank correlation {worst:.2f}{' or more' * (len(table) > 1)}",
        ]


def agreement(estimated: Float[Tensor, " cell"], exact: Float[Tensor, " cell"]) -> dict[str, float | int]:
    """How well estimates agree with exact effects: the number of cells, the rank correlation (Spearman 1904), the correlation
    (Pearson), and the share of right signs among the effects above a hundredth of the largest. NaN where nothing varies.

    For ranks, effects below a hundred-thousandth of the largest count as 0: they are rounding.

    >>> import torch
    >>> agreement(torch.tensor([0.1, 0.2, -5.0]), torch.tensor([1.0, 2.0, -1.0]))["spearman"]
    1.0
    """
    table = pd.DataFrame({"estimated": estimated.double().numpy(), "exact": exact.double().numpy()}).dropna()
    large = table[table["exact"].abs() > table["exact"].abs().max() / 100]
    sign = float((large["estimated"] * large["exact"] > 0).mean()) if len(large) else float("nan")
    ranks = table.where(table.abs() > ROUNDING * table.abs().max(), 0.0).rank()
    return {
        "cells": len(table),
        "spearman": _correlation(ranks["estimated"], ranks["exact"]),
        "pearson": _correlation(table["estimated"], table["exact"]),
        "sign": sign,
    }


def _correlation(one: "pd.Series", other: "pd.Series") -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float((one**2).sum() * (other**2).sum()) ** 0.5
    return float((one * other).sum()) / size if size > 0 else float("nan")
