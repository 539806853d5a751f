"""The result of one task: the circuits of each method at all sizes, on prompts that no method saw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.rankings.areas import by_prompt, faithfulness_of
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import bootstrap, in_words
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.TaskRankings"
TENSORS = ("values", "signed", "full", "empty")
METHOD = "method"
CPR, CMD = "cpr", "cmd"
AGREEMENT = ("spearman", "sign", "slope")  # with exact patching
OF_TRUTH = ("auroc", "average_precision")
COST = ("passes", "seconds")
NUMBERS = (*AGREEMENT, *OF_TRUTH, *COST)
HIGHER_IS_BETTER = {CPR: True, CMD: False, "spearman": True, "sign": True, "auroc": True, "average_precision": True}
UNTRAINED = " (untrained)"  # after the name of a method whose ranking is that of the untrained twin
CONTROLS = ("random",)


@dataclass(frozen=True, eq=False, repr=False)
class TaskRankings(Tabular):
    """The circuits of each method for one task, by their number of edges, on held-out prompts.

    Args:
        name: the name of the task.
        methods: the names of the methods. Those that end with "(untrained)" are controls: the ranking of the untrained twin's
            edges, used for the model.
        shares: the shares of all edges.
        values: the metric of each circuit of the largest scores, [method, share, prompt]: CMD and figures are of these.
        signed: that of each circuit of the edges without which the metric falls most, by the signs of scores, of which CPR is. As
            `values` for methods whose scores have no sign.
        full, empty: the metric of the model, and of the circuit without edges, [prompt].
        n_edges: the number of edges of each circuit of `values` that are on paths, [method][share].
        numbers: of each method, `spearman`, `sign` and `slope` (agreement with exact patching), `auroc` and `average_precision`
            (of the true circuit), `passes` and `seconds`; those that are left out are NaN.
        about: the model, versions, settings.

    Raises ValueError for other numbers of methods, shares or prompts.
    """

    name: str
    methods: Sequence[str]
    shares: Sequence[float]
    values: Float[Tensor, "..."]  # the shapes are checked below, with errors that name the axes
    signed: Float[Tensor, "..."]
    full: Float[Tensor, "..."]
    empty: Float[Tensor, "..."]
    n_edges: Sequence[Sequence[int]]
    numbers: Mapping[str, Sequence[float]]
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        for name in TENSORS:
            object.__setattr__(
                self, name, getattr(self, name).detach().to("cpu", torch.float32, copy=True).contiguous()
            )
        shape = [len(self.methods), len(self.shares)]
        if self.values.ndim != 3 or list(self.values.shape[:2]) != shape:
            raise ValueError(
                f"values {list(self.values.shape)} are not those of {shape} [method, share] and the prompts"
            )
        if self.signed.shape != self.values.shape:
            raise ValueError(f"signed must be {list(self.values.shape)} as values, got {list(self.signed.shape)}")
        for name in ("full", "empty"):
            if list(getattr(self, name).shape) != [self.n_prompts]:
                raise ValueError(f"{name} must be [{self.n_prompts}], got {list(getattr(self, name).shape)}")
        numbers = {name: list(self.numbers.get(name, [math.nan] * len(self.methods))) for name in NUMBERS}
        if odd := [name for name, column in numbers.items() if len(column) != len(self.methods)]:
            raise ValueError(f"{odd[0]} must have a number for each of {len(self.methods)} methods")
        lists = {
            "methods": tuple(self.methods),
            "shares": tuple(self.shares),
            "n_edges": [list(row) for row in self.n_edges],
        }
        for name, value in {**lists, "numbers": numbers, "about": dict(self.about)}.items():
            object.__setattr__(self, name, value)

    @property
    def n_prompts(self) -> int:
        """The number of prompts on which circuits are judged."""
        return self.values.shape[-1]

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def faithfulness(self) -> Float[Tensor, "method share"]:
        """The share of the metric that each circuit of the largest scores makes up: 0 without edges, 1 with all."""
        return faithfulness_of(self.values, self.full, self.empty).float()

    @property
    def signed_faithfulness(self) -> Float[Tensor, "method share"]:
        """That of the circuits of the edges without which the metric falls most: more than 1 where others lower the metric."""
        return faithfulness_of(self.signed, self.full, self.empty).float()

    def by_prompt(self, name: str) -> Float[Tensor, "method prompt"]:
        """ "cpr" or "cmd" as a mean over prompts: their spread is that of the number."""
        values = {CPR: self.signed, CMD: self.values}[name]
        return by_prompt(values, self.full, self.empty, self.shares)[(CPR, CMD).index(name)]

    def column(self, name: str) -> Float[Tensor, " method"]:
        """A number of each method: "cpr", "cmd", or one of `numbers`; raises KeyError for another name."""
        if name in (CPR, CMD):
            return self.by_prompt(name).mean(1).float()
        if name not in self.numbers:
            raise KeyError(f"there is no column {name!r}: there are {', '.join((CPR, CMD, *self.numbers))}")
        return torch.tensor(self.numbers[name])

    def interval_of(
        self, name: str, level: float = 0.95, minus: str | None = None
    ) -> tuple[Float[Tensor, " method"], Float[Tensor, " method"]]:
        """The interval of "cpr" or "cmd" over prompts; with `minus`, that of the difference from this method on the same
        prompts. NaN with one prompt."""
        of_prompts = self.by_prompt(name)
        if minus is not None:
            of_prompts = of_prompts - of_prompts[self.methods.index(minus)]
        with in_words():
            low, high = bootstrap(of_prompts.float(), level, measure="faithfulness")
        return (low.clamp(min=0.0), high) if name == CMD and minus is None else (low, high)

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95, by: str = CMD) -> "pd.DataFrame":
        """A row for each method, the best by the column `by` first: `method`, `cpr` and `cmd` with their intervals over prompts
        (`cpr_low`, ...), and the numbers that are known.

        With `per_prompt`, a row for each method, share and prompt: `method`, `share`, `prompt`, `value`.
        """
        if per_prompt:
            places = product(self.methods, self.shares, range(self.n_prompts))
            return pd.DataFrame(places, columns=[METHOD, "share", "prompt"]).assign(value=self.values.flatten().numpy())
        columns: dict[str, Tensor] = {}
        for name in (CPR, CMD):
            columns[name] = self.column(name)
            columns[f"{name}_low"], columns[f"{name}_high"] = self.interval_of(name, level)
        columns |= {name: self.column(name) for name in NUMBERS}
        known = {name: column.numpy() for name, column in columns.items() if not bool(column.isnan().all())}
        table = pd.DataFrame({METHOD: self.methods, **known})
        return table.iloc[best_first(self.column(by), by)].reset_index(drop=True)

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """Plot the faithfulness of each method, the best first, with its interval over prompts, over the share of edges on a
        logarithmic axis. Random edges are grey; those of the untrained twin are left out."""
        from hooked_lm import viz

        order = [i for i in best_first(self.column(CMD), CMD) if not self.methods[i].endswith(UNTRAINED)]
        curves = {self.methods[i]: self.faithfulness[i] for i in order}
        intervals = {self.methods[i]: self._ends_of_curve(i) for i in order} if self.n_prompts > 1 else {}
        return viz.lines(
            [100 * share for share in self.shares],
            curves,
            intervals,
            title or f"Circuits of {self.name}",
            "% of the edges, logarithmic",
            "faithfulness",
            show_values,
            {"full model": 1.0, "no edges": 0.0},
            self.of_intervals,
            logarithmic=True,
            references=[name for name in curves if name in CONTROLS],
        )

    def _ends_of_curve(self, method: int) -> tuple[Float[Tensor, " share"], Float[Tensor, " share"]]:
        """The interval of faithfulness at each share: that of a ratio of means."""
        gap, share = (self.full - self.empty).double(), self.faithfulness[method].double()
        residual = (self.values[method].double() - self.empty.double() - share[:, None] * gap) / gap.mean()
        with in_words():
            low, high = bootstrap((share[:, None] + residual).float())
        return low, high

    @property
    def of_intervals(self) -> str:
        """What intervals are, in words; nothing if there is one prompt."""
        return f"95% intervals over {self.n_prompts} prompts" if self.n_prompts > 1 else ""

    # ---- files -------------------------------------------------------------------------------------------------------

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and all else, as files have them."""
        others = [of.name for of in fields(self) if of.name not in TENSORS]
        return {name: getattr(self, name) for name in TENSORS}, {name: getattr(self, name) for name in others}

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, atomically; `load` restores it exactly."""
        stored.write(path, FORMAT, *self.parts())

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "TaskRankings":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        parts: dict[str, Any] = {**header, **tensors}
        return cls(**parts)

    def __repr__(self) -> str:
        column = self.column(CMD)
        order = ", ".join(f"{self.methods[i]} {float(column[i]):.3f}" for i in best_first(column, CMD))
        prompts = f"{self.n_prompts} prompt{'s' * (self.n_prompts > 1)}"
        return f"TaskRankings({self.name}, {prompts}; CMD, the best first: {order})"


def best_first(column: Float[Tensor, " method"], name: str) -> list[int]:
    """The places of the methods, the best by a column first; raises ValueError for a column of which no end is best."""
    if name not in HIGHER_IS_BETTER:
        raise ValueError(f"methods are sorted by one of {', '.join(map(repr, HIGHER_IS_BETTER))}, got {name!r}")
    descending = HIGHER_IS_BETTER[name]
    worst = -torch.inf if descending else torch.inf
    order: list[int] = column.nan_to_num(nan=worst).argsort(descending=descending, stable=True).tolist()
    return order
