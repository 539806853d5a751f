"""Finds the sites whose gradients explode, vanish or are not finite."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.base import Detector, check_no_functions
from hooked_lm.interventions.per_thread import Lock
from hooked_lm.results import stored
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.GradientReport"


@dataclass(eq=False, repr=False)
class GradientReport(Tabular, Detector):
    """Measures the gradients of its sites, and reports exploding and vanishing ones.

    Args:
        factor: a site's gradient explodes if its root mean square is more than `factor` times the median of all sites, and
            vanishes if it is less than the median divided by `factor`, or zero.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> report = GradientReport("blocks.*.hook_resid_post")
    >>> with model.hooks([report]):
    ...     model("The capital of France is", return_type="loss").backward()
    >>> list(report.to_dataframe().columns)
    ['site', 'calls', 'rms', 'largest', 'zeros', 'not_finite', 'verdict']
    >>> len(report.to_dataframe()), report.problems
    (4, [])
    """

    factor: float | int = field(default=1000.0, kw_only=True)
    direction: ClassVar[str] = "bwd"
    copies: ClassVar[bool] = False
    _sums: dict[str, "RunningMoments"] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lock = Lock()
        if not self.factor > 1:
            raise ValueError(f"factor must be above 1, got {self.factor}")

    def see(self, value: object, hook: HookPoint) -> None:
        if not isinstance(value, Tensor):
            return
        with self._lock:  # threads may share the report
            self._sums.setdefault(hook.name or "", RunningMoments()).add(value.detach())

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each site, in the order of the forward pass.

        Columns: `calls`; `rms` (root mean square), `largest` absolute value and `zeros` (fraction of 0) of the finite entries;
        `not_finite`, the number of NaN or infinite entries; `verdict`: "not finite", "explodes", "vanishes" or "".
        """
        rows = [{"site": site, **sums.columns()} for site, sums in reversed(self._sums.items())]
        table = pd.DataFrame(rows, columns=["site", "calls", "rms", "largest", "zeros", "not_finite"])
        median = table["rms"][table["rms"] > 0].median()
        return table.assign(verdict=[self._verdict(row, median) for row in rows])

    def _verdict(self, row: dict[str, Any], median: float) -> str:
        if row["not_finite"]:
            return "not finite"
        if row["rms"] > self.factor * median:
            return "explodes"
        return "vanishes" if row["rms"] == 0 or row["rms"] * self.factor < median else ""

    @property
    def problems(self) -> list[str]:
        """A message for each site with a problem; empty if there are none."""
        table = self.to_dataframe()
        wrong = table[table["verdict"] != ""].to_dict("records")
        return [
            f"'{row['site']}': the gradient is not finite in {row['not_finite']} places"
            if row["verdict"] == "not finite"
            else f"'{row['site']}': the gradient {row['verdict']}, its root mean square is {row['rms']:.2g}"
            for row in wrong
        ]

    def plot(self, title: str = "") -> "go.Figure":
        """Bars of the root mean square of the gradients, a bar for each site, in the order of the forward pass."""
        from hooked_lm import viz

        table = self.to_dataframe()
        labels = [
            f"{site} ({verdict})" if verdict else site
            for site, verdict in zip(table["site"], table["verdict"], strict=True)
        ]
        return viz.bars(torch.tensor([*table["rms"]]), labels, title=title or "Gradients", y_title="root mean square")

    def save(self, path: str | Path) -> None:
        """Writes the settings and the measurements to one file; `load` restores them."""
        settings = {"hook_point": self.hook_point, "layer": self.layer, "factor": self.factor, "when": self.when}
        check_no_functions(self, settings)
        stored.write(path, FORMAT, {}, {**settings, "sums": {site: vars(sums) for site, sums in self._sums.items()}})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "GradientReport":
        """The report that `save` wrote, to which more runs can be added. Raises ValueError for any other file."""
        _, header = stored.read(path, FORMAT)
        sums = header.pop("sums")
        found = cls(header.pop("hook_point"), header.pop("layer"), **header)
        for site, numbers in sums.items():
            found._sums[site] = RunningMoments()
            vars(found._sums[site]).update(numbers)
        return found

    def clear(self) -> None:
        """Deletes all measurements."""
        self._sums.clear()


class RunningMoments:
    """Running sums over the gradients at a site."""

    def __init__(self) -> None:
        self.calls = self.n = self.n_finite = self.n_zero = 0
        self.squares = self.largest = 0.0

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient."""
        finite = gradient[gradient.isfinite()].double()
        self.calls += 1
        self.n += gradient.numel()
        self.n_finite += finite.numel()
        self.n_zero += int((finite == 0).sum())
        self.squares += float(finite.square().sum())
        self.largest = max(self.largest, float(finite.abs().max()) if finite.numel() else 0.0)

    def columns(self) -> dict[str, float | int]:
        """The columns of the report."""
        n = max(1, self.n_finite)
        return {
            "calls": self.calls,
            "rms": (self.squares / n) ** 0.5,
            "largest": self.largest,
            "zeros": self.n_zero / n,
            "not_finite": self.n - self.n_finite,
        }
