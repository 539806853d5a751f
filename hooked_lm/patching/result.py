"""SweepResult: what a sweep found, a number for each cell of a grid and each prompt."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.patching.bootstrap import bootstrap

if TYPE_CHECKING:
    import plotly.graph_objects as go

Label = str | int
FORMAT = "hooked_lm.patching.SweepResult"
COLUMNS = ("prompt", "value", "effect", "mean", "low", "high")  # of the tables; no axis may take their names
METRIC, POSITION = "metric", "position"


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The numbers of a sweep over a grid of interventions, kept for each prompt, with the runs that they lie between.

    Args:
        values: [*grid, prompt], in fp32 on the CPU; NaN for cells that do not exist, such as a head that a layer lacks.
            A metric that gives one number for all prompts has one prompt.
        axes: the axes of the grid in order, each with its labels (strings or ints, no two alike), e.g.
            {"metric": ["logit_difference"], "layer": [0, 1], "position": ["0 <bos>", "1 When"]}. Several metrics are
            the first axis, "metric".
        corrupted: the metric of the corrupted run, [prompt], or [metric, prompt] if there is that axis.
        clean: that of the clean run, or None.
        cost: what the sweep has spent (forwards, layer_rows, flops, seconds), or None.
        base: which of the two runs was changed, "corrupted" or "clean".
        fingerprint: tells the sweeps apart that may go on from one file; empty for parts and rescaled results.

    Raises ValueError for shapes that do not go together.

    >>> result = SweepResult(torch.tensor([[1.0, 2.0], [5.0, 7.0]]), {"layer": [0, 1]}, torch.zeros(2), torch.full((2,), 6.0))
    >>> result
    SweepResult(layer 2, 2 prompts; means 1.5 to 6, corrupted 0, clean 6)
    >>> result.normalized().mean
    tensor([0.2500, 1.0000])
    """

    values: Float[Tensor, "..."]  # the shapes are checked below, in the words of the axes
    axes: Mapping[str, Sequence[Label]]
    corrupted: Float[Tensor, "..."]
    clean: Float[Tensor, "..."] | None = None
    cost: Mapping[str, int | float] | None = None
    base: str = "corrupted"
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("values", "corrupted", "clean"):
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(self, name, tensor.detach().to("cpu", torch.float32, copy=True).contiguous())
        object.__setattr__(self, "axes", {name: tuple(labels) for name, labels in self.axes.items()})
        object.__setattr__(self, "cost", None if self.cost is None else dict(self.cost))
        self._check()

    def _check(self) -> None:
        if self.base not in ("corrupted", "clean") or (self.base == "clean" and self.clean is None):
            raise ValueError(f"base must be 'corrupted', or 'clean' where there is that run; got {self.base!r}")
        for name, labels in self.axes.items():
            if name in COLUMNS:
                raise ValueError(f"an axis cannot be called {name!r}: the tables have a column of that name")
            if strange := [label for label in labels if not isinstance(label, Label) or isinstance(label, bool)]:
                raise ValueError(f"labels are strings or ints, and axis {name!r} has {strange[0]!r}")
            if len(set(labels)) < len(labels):
                twice = next(label for label in labels if labels.count(label) > 1)
                raise ValueError(f"axis {name!r} has the label {twice!r} twice")
        if METRIC in self.axes and next(iter(self.axes)) != METRIC:
            raise ValueError(f"the metric must be the first axis, these are {list(self.axes)}")
        lengths = {name: len(labels) for name, labels in self.axes.items()}
        if self.values.ndim < 1 or tuple(self.values.shape[:-1]) != tuple(lengths.values()):
            raise ValueError(f"values {list(self.values.shape)} do not have the axes {lengths} and the prompts")
        shape = [*([lengths[METRIC]] if METRIC in lengths else []), self.n_prompts]
        for name, tensor in (("corrupted", self.corrupted), ("clean", self.clean)):
            if tensor is not None and list(tensor.shape) != shape:
                raise ValueError(f"the {name} baseline must be {shape}, got {list(tensor.shape)}")

    @property
    def unchanged(self) -> Float[Tensor, "..."]:
        """The metric of the run that was changed, as it is without a change: of the shape of the baselines."""
        return self.clean if self.base == "clean" and self.clean is not None else self.corrupted

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def n_prompts(self) -> int:
        """How many numbers there are in a cell."""
        return self.values.shape[-1]

    @property
    def mean(self) -> Float[Tensor, "*grid"]:
        """The means over prompts."""
        return self.values.mean(-1)

    def interval(
        self, level: float = 0.95, n_resamples: int = 1000, seed: int = 0
    ) -> tuple[Float[Tensor, "*grid"], Float[Tensor, "*grid"]]:
        """The lowest and highest mean that these prompts make plausible: percentile bootstrap over prompts (Efron 1979).

        Prompts are drawn again with replacement, the same for all cells, by a generator of its own. For few
        prompts the intervals are too narrow: those of 0.95 hold the true mean of normal numbers 83 times in 100 with 5
        prompts, 93 times with 20. NaN with one prompt, which tells nothing about others.
        """
        flat = self.values.reshape(-1, self.n_prompts)
        low, high = bootstrap(flat, level, n_resamples, seed)
        return low.view(self.values.shape[:-1]), high.view(self.values.shape[:-1])

    def effects(self) -> "SweepResult":
        """What each cell changes: every value minus that of the unchanged run of the same prompt."""
        start = self.unchanged
        clean = None if self.clean is None else self.clean - start
        values = self.values - self._for_cells(start)
        return replace(self, values=values, corrupted=self.corrupted - start, clean=clean, fingerprint="")

    def normalized(self) -> "SweepResult":
        """The values on a scale on which the mean of the corrupted run is 0 and that of the clean run is 1.

        Each metric by itself, and the scale is taken as given: the intervals are those of the values. Raises ValueError if
        there is no clean run, or none that differs by more than 1e-6.
        """
        if self.clean is None:
            raise ValueError("this sweep has no clean baseline, so there is no 1 to its 0; effects() needs none")
        corrupted, clean = (part.double().mean(-1, keepdim=True) for part in (self.corrupted, self.clean))
        for metric, low, high in zip(self.axes.get(METRIC, [""]), corrupted.flatten(), clean.flatten(), strict=True):
            if not abs(high - low) > 1e-6:
                of = f" of {metric!r}" if metric else ""
                raise ValueError(
                    f"no scale: the clean mean{of} is {high:.6g}, the corrupted one {low:.6g}; they must differ by more than 1e-6"
                )

        def scaled(values: Tensor, of_cells: bool = False) -> Tensor:
            start, span = corrupted, clean - corrupted
            if of_cells:
                start, span = self._for_cells(start), self._for_cells(span)
            return ((values.double() - start) / span).float()

        values = scaled(self.values, True)
        return replace(self, values=values, corrupted=scaled(self.corrupted), clean=scaled(self.clean), fingerprint="")

    def _for_cells(self, baseline: Float[Tensor, "*metric prompt_or_1"]) -> Tensor:
        """A baseline in the shape in which it goes with the values."""
        n_other = self.values.ndim - baseline.ndim
        return baseline.view(*baseline.shape[:-1], *[1] * n_other, baseline.shape[-1])

    # ---- parts -------------------------------------------------------------------------------------------------------

    def select(self, **labels: Any) -> "SweepResult":
        """The part with these labels: `layer=3` drops the axis, `layer=[3, 4]` keeps it with these, in this order.

        >>> result = SweepResult(torch.tensor([[1.0], [5.0]]), {"layer": [0, 1]}, torch.zeros(1))
        >>> result.select(layer=1).mean
        tensor(5.)

        Raises ValueError for axes and labels that there are not.
        """
        values, axes, baselines = self.values, dict(self.axes), [self.corrupted, self.clean]
        for name, wanted in labels.items():
            if name not in axes:
                raise ValueError(f"there is no axis {name!r}; the axes are {', '.join(axes) or 'none'}")
            single = isinstance(wanted, str) or not isinstance(wanted, Iterable)
            places = [self._place(name, label) for label in ([wanted] if single else wanted)]
            index: Any = places[0] if single else places
            axis = list(axes).index(name)
            values = values[(slice(None),) * axis + (index,)]
            if name == METRIC:
                baselines = [part if part is None else part[index] for part in baselines]
            if single:
                del axes[name]
            else:
                axes[name] = [self.axes[name][place] for place in places]
        corrupted, clean = baselines
        assert corrupted is not None
        return replace(self, values=values, axes=axes, corrupted=corrupted, clean=clean, fingerprint="")

    def _place(self, name: str, label: Any) -> int:
        labels = list(self.axes[name])
        if label not in labels:
            shown = ", ".join(map(repr, labels[:12])) + (f", ... {len(labels)} in all" if len(labels) > 12 else "")
            raise ValueError(f"axis {name!r} has no label {label!r}; its labels are {shown}")
        return labels.index(label)

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> pd.DataFrame:
        """A row for each cell: its labels, the mean over prompts and the interval (`low`, `high`).

        With `per_prompt` a row for each cell and prompt: the labels, `prompt` and `value`. Cells that do not exist
        are rows with NaN; `.dropna()` leaves them out.
        """
        if per_prompt:
            rows = list(product(*self.axes.values(), range(self.n_prompts)))
            table = pd.DataFrame(rows, columns=[*self.axes, "prompt"])
            return table.assign(value=self.values.flatten().numpy())
        low, high = self.interval(level)
        columns = {"mean": self.mean, "low": low, "high": high}
        return self._cells().assign(**{name: column.flatten().numpy() for name, column in columns.items()})

    def _cells(self) -> pd.DataFrame:
        """The labels of all cells, in order."""
        n_cells = prod(self.values.shape[:-1])
        return pd.DataFrame(list(product(*self.axes.values())), columns=list(self.axes), index=range(n_cells))

    def top(self, k: int = 10, level: float = 0.95) -> pd.DataFrame:
        """The `k` cells (of each metric) with the largest effect: the mean difference from the unchanged run, up or down.

        Columns: the labels, `value` (the mean), `effect`, and the interval of the effect (`low`, `high`).
        """
        if METRIC in self.axes:
            parts = [(metric, self.select(metric=metric).top(k, level)) for metric in self.axes[METRIC]]
            for metric, part in parts:
                part.insert(0, METRIC, metric)
            return pd.concat([part for _, part in parts], ignore_index=True)
        effects = (self.values - self.unchanged).reshape(-1, self.n_prompts)
        size = effects.mean(-1).abs()
        best = size.nan_to_num(nan=-1.0, posinf=torch.inf).argsort(descending=True, stable=True)
        best = best[: min(k, int((~size.isnan()).sum()))]
        low, high = bootstrap(effects[best], level)
        columns = {"value": self.mean.flatten()[best], "effect": effects[best].mean(-1), "low": low, "high": high}
        table = self._cells().iloc[best.tolist()].reset_index(drop=True)
        return table.assign(**{name: column.numpy() for name, column in columns.items()})

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """A heat map of the means over the last two axes of the grid, positions from left to right.

        Axes with one label go into the title. Colours are white at zero: `result.normalized().plot()` or
        `result.effects().plot()` show what a cell changes. Raises ValueError if more than two axes are left.
        """
        from hooked_lm.viz import heatmap

        long = [name for name, labels in self.axes.items() if len(labels) != 1]
        if len(long) > 2:
            fix = ", ".join(f"{name}={self.axes[name][0]!r}" for name in long[:-2])
            raise ValueError(f"a heat map has two axes, and {', '.join(long)} are left: plot select({fix})")
        shown = (long + [name for name in reversed(list(self.axes)) if name not in long])[:2]
        shown = [name for name in self.axes if name in shown]
        fixed = [f"{name} {labels[0]}" for name, labels in self.axes.items() if name not in shown]
        matrix = self.mean.reshape([len(self.axes[name]) for name in shown])
        if len(shown) == 2 and shown[0] == POSITION:
            shown, matrix = shown[::-1], matrix.T
        *rows, columns = shown or [""]
        return heatmap(
            matrix.reshape(-1, len(self.axes.get(columns, [""]))),
            x_labels=self.axes.get(columns, [""]),
            y_labels=self.axes[rows[0]] if rows else [""],
            title=title or ", ".join(fixed),
            x_title=columns,
            y_title=rows[0] if rows else "",
            value_name="mean",
            show_values=show_values,
        )

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, which appears when it is whole; `load` gives it back bit for bit."""
        from safetensors.torch import save_file

        about = {"format": FORMAT, "axes": json.dumps(list(self.axes.items())), "cost": json.dumps(self.cost)}
        about |= {"base": self.base, "fingerprint": self.fingerprint}
        tensors = {"values": self.values, "corrupted": self.corrupted, "clean": self.clean}
        unfinished = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.unfinished")
        try:
            save_file({name: part.clone() for name, part in tensors.items() if part is not None}, unfinished, about)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "SweepResult":
        """Read what `save` wrote. Raises ValueError for any other file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"{path} holds no SweepResult: it was not written by SweepResult.save")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
        axes, cost = dict(json.loads(about["axes"])), json.loads(about["cost"])
        return cls(**tensors, axes=axes, cost=cost, base=about["base"], fingerprint=about["fingerprint"])

    # ---- at a glance -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        grid = " x ".join(f"{name} {len(labels)}" for name, labels in self.axes.items()) or "one cell"
        prompts = f"{self.n_prompts} prompt{'s' * (self.n_prompts != 1)}"
        if METRIC in self.axes:
            return f"SweepResult({grid}, {prompts}; metrics {', '.join(map(str, self.axes[METRIC]))})"
        found = self.mean[~self.mean.isnan()]
        means = f"means {found.min():.4g} to {found.max():.4g}" if len(found) else "no value"
        baselines = {"corrupted": self.corrupted, "clean": self.clean}
        said = [f"{name} {part.mean():.4g}" for name, part in baselines.items() if part is not None]
        return f"SweepResult({grid}, {prompts}; {', '.join([means, *said])})"

    def _repr_html_(self) -> str:
        table = self.top(5).to_html(index=False, float_format=lambda number: f"{number:.4g}", border=0)
        return f"<p>{escape(repr(self))}</p><p>The largest effects:</p>{table}"
