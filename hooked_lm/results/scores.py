"""Scores: numbers over a grid with named axes, for each prompt; with tables, figures and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.notebook_repr import NotebookRepr
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import Resampling, bootstrap, in_words, largest_t, simultaneous_level
from hooked_lm.results.bounds import UNBOUNDED, Bounds
from hooked_lm.results.groups import Groups, by_group, checked_groups
from hooked_lm.results.labels import Label, Wanted, check_labels, chosen_places, entries_at, headline
from hooked_lm.results.power import Aim, Number, units_needed
from hooked_lm.results.tabular import in_summary, table_of_largest, with_values
from hooked_lm.results.turns import means_by, turns_along, turns_read_now

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")
    go = lazy_import("plotly.graph_objects", "viz")

METRIC, POSITION = "metric", "position"
SELECTED = "selected"  # in `about`: axis -> the label that was selected
SHOWN = 5  # cells in a notebook
Own = TypeVar("Own", bound="Scores")


@dataclass(frozen=True, eq=False, repr=False)
class Scores(NotebookRepr):
    """Numbers over a grid with named axes, one for each cell and prompt.

    Args:
        values: [*grid, prompt], in fp32 on the CPU; NaN for cells that do not exist, such as a head that a layer lacks.
            One number for all prompts counts as one prompt.
        axes: the axes of the grid in order, each with its labels (strings or ints, no two alike), e.g.
            {"layer": [0, 1], "position": ["0 <bos>", "1 When"]}.
        about: the origin of the numbers: the model, versions, seeds, settings.
        groups: a label for each prompt; those of one group, such as a template, a name or an item, are not independent, and
            intervals count groups. None: each prompt is a group. Raises ValueError if shapes or groups do not fit.

    >>> scores = Scores(torch.tensor([[1.0, 2.0], [5.0, 7.0]]), {"layer": [0, 1]})
    >>> scores
    Scores(layer 2, 2 prompts; means 1.5 to 6)
    >>> scores.select(layer=1).mean
    tensor(6.)
    """

    values: Float[Tensor, "..."]  # the shapes are checked below, with errors that name the axes
    axes: Mapping[str, Sequence[Label]]
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    groups: Sequence[Label] | None = field(default=None, kw_only=True)
    GRID: ClassVar[tuple[str, ...]] = ("values",)  # the tensors that have the axes of the grid
    _BY_METRIC: ClassVar[tuple[str, ...]] = ()  # the fields with an entry for each metric
    _OF_MEANS: ClassVar[Mapping[str, Any]] = {}  # other fields of means over cells
    _METRIC_IN_ABOUT: ClassVar[str] = "of"  # where `about` has the metric that was selected

    def __post_init__(self) -> None:
        for name in self._tensors():
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(self, name, tensor.detach().to("cpu", torch.float32, copy=True).contiguous())
        object.__setattr__(self, "axes", {name: tuple(labels) for name, labels in self.axes.items()})
        object.__setattr__(self, "about", {**(turns_read_now() if POSITION in self.axes else {}), **self.about})
        check_labels(self.axes)
        if METRIC in self.axes and next(iter(self.axes)) != METRIC:
            raise ValueError(f"the metric must be the first axis, these are {list(self.axes)}")
        lengths = {name: len(labels) for name, labels in self.axes.items()}
        if self.values.ndim < 1 or tuple(self.values.shape[:-1]) != tuple(lengths.values()):
            raise ValueError(f"values {list(self.values.shape)} do not have the axes {lengths} and the prompts")
        self._check()
        object.__setattr__(self, "groups", checked_groups(self.groups, self.n_prompts))

    def _tensors(self) -> list[str]:
        """The names of the fields that are tensors."""
        return [of.name for of in fields(self) if isinstance(getattr(self, of.name), Tensor)]

    def _check(self) -> None:
        """Raises ValueError for other fields that do not fit."""

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def n_prompts(self) -> int:
        """The number of prompts."""
        return self.values.shape[-1]

    @property
    def mean(self) -> Float[Tensor, "*grid"]:
        """The means over prompts."""
        return self.values.mean(-1)

    def grouped(self: Own, groups: Groups) -> Own:
        """The same numbers with these `groups`: a label for each prompt, or None. Raises ValueError as the class.

        >>> scores = Scores(torch.tensor([1.0, 1.1, 2.0, 2.1, 3.0, 3.1]), {})
        >>> low, high = scores.interval()
        >>> by_name = scores.grouped(["Mary", "Mary", "Alice", "Alice", "Sarah", "Sarah"])
        >>> bool(by_name.interval()[0] < low), bool(by_name.interval()[1] > high)
        (True, True)
        """
        return replace(self, groups=checked_groups(groups, self.n_prompts))

    def interval(
        self, level: float = 0.95, n_resamples: int = 1000, seed: int = 0, simultaneous: bool = False
    ) -> tuple[Float[Tensor, "*grid"], Float[Tensor, "*grid"]]:
        """The confidence interval (low, high) of the means: Student's, or bootstrap over prompts (Efron 1979; of skewed
        values the bootstrap-t of Hall 1988) where it is wider. With `groups`, groups are drawn instead of prompts. Shares and
        0/1 values of a sweep have Wilson's, differences of those Newcombe's, and at once Hoeffding's (see `results.bounds`).

        Prompts are drawn with replacement, the same for all cells. Intervals of level 0.95 contain the true mean of normal
        numbers in 95 to 96% of cases. NaN with one prompt or group. Warns (`SkewWarning`) of skewed values.

        Each of these intervals is of a cell that was chosen beforehand: of a thousand cells without effect fifty exclude 0. With
        `simultaneous`, all cells (of each metric) contain their means at once in 95% of cases, by Bonferroni, or by the largest
        |t| of all cells in resamples where that is wider; `top`, figures and notebooks have these.
        """
        if METRIC in self.axes:
            ends = [part.interval(level, n_resamples, seed, simultaneous) for part in self._by_metric()]
            return tuple(torch.stack(each) for each in zip(*ends, strict=True))  # type: ignore[return-value]
        low, high = self._ends(torch.arange(self.mean.numel()), Resampling(level, n_resamples, seed), simultaneous)
        return low.view(self.values.shape[:-1]), high.view(self.values.shape[:-1])

    def power(
        self,
        width: Number | None = None,
        level: float = 0.95,
        simultaneous: bool = False,
        *,
        effect: Number | None = None,
    ) -> Float[Tensor, "*grid"]:
        """How many prompts (pairs, or groups) each cell needs, of values that vary as much: for an interval no wider than
        `width`, or one that excludes 0 in 80% of experiments if the mean is `effect`, by Student's (see `results.power`).

        With `simultaneous`, for the intervals of all cells (of each metric) at once, by Bonferroni. Of 0/1 values, the number
        for the width of the same share. At least 2, and for an effect as many as give a p-value that small; NaN where a value is
        missing, and with one prompt. ValueError for a width that is not positive, an effect of 0, and for both or neither.

        >>> scores = Scores(torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.1, 1.2]]), {"layer": [0, 1]})
        >>> scores.power(0.5), scores.power(0.5, simultaneous=True), scores.power(effect=0.5)
        (tensor([64.,  3.]), tensor([84.,  4.]), tensor([34.,  6.]))
        """
        if METRIC in self.axes:
            return torch.stack([part.power(width, level, simultaneous, effect=effect) for part in self._by_metric()])
        values = self.values.reshape(-1, self.n_prompts)
        aim = Aim(width, effect, self._level_of_each(values, level) if simultaneous else level, level)
        return units_needed(values, self.groups, self._bounds, aim).view(self.values.shape[:-1])

    @property
    def _bounds(self) -> Bounds:
        """The least and the largest value that is possible. Intervals stay between known ends, and those of all cells at once
        are then Bonferroni's alone."""
        return self._known_bounds() or UNBOUNDED

    def _known_bounds(self) -> Bounds | None:
        """The bounds of values that have some."""
        return None

    def _level_of_each(self, values: Float[Tensor, "cell prompt"], level: float) -> float:
        """The level of each cell's interval for which all contain their means at once. Intervals of shares have a width, so
        that they count, even if all prompts agree."""
        if self._bounds == UNBOUNDED:
            return simultaneous_level(by_group(values, self.groups), level)
        return 1 - (1 - level) / max(1, int(values.isfinite().all(1).sum()))

    def _ends(
        self, cells: Int[Tensor, " cell"], resampling: Resampling, simultaneous: bool = True
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
        """The confidence intervals of some cells of the flattened grid; `simultaneous`, of all cells at once."""
        values = self.values.reshape(-1, self.n_prompts)
        if not simultaneous or len(values) < 2:
            return self._interval_of(values, cells, resampling)
        level = self._level_of_each(values, resampling.level)
        low, high = self._interval_of(values, cells, resampling._replace(level=level), at_once=True)
        of_groups = by_group(values, self.groups)
        if self._bounds != UNBOUNDED or of_groups.shape[1] < 2:
            return low, high
        mean, errors = values[cells].double().mean(1), of_groups[cells].double().std(1) / of_groups.shape[1] ** 0.5
        reach = largest_t(of_groups, *resampling) * errors
        return low.minimum((mean - reach).float()), high.maximum((mean + reach).float())

    def _interval_of(
        self,
        values: Float[Tensor, "cell prompt"],
        cells: Int[Tensor, " chosen"],
        resampling: Resampling,
        at_once: bool = False,
    ) -> tuple[Float[Tensor, " chosen"], Float[Tensor, " chosen"]]:
        """The confidence interval of the means of some cells; `at_once`, for the level of all cells at once."""
        bounds = self._bounds
        if bounds.are_finite:
            return bounds.interval(values[cells], self.groups, resampling.level, at_once)
        low, high = bootstrap(by_group(values, self.groups), *resampling, chosen=cells, measure=self._measured())
        return low.clamp(min=bounds.least), high.clamp(max=bounds.most)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def select(self: Own, **labels: Wanted) -> Own:
        """The cells with these labels: `layer=3` removes the axis, `layer=[3, 4]` keeps it with these labels, in this order.

        >>> scores = Scores(torch.tensor([[1.0], [5.0]]), {"position": ["0 <bos>", "1  Mary"]})
        >>> [scores.select(position=which).mean.item() for which in (1, -1, " Mary", "1  Mary")]
        [5.0, 5.0, 5.0, 5.0]

        Besides the label itself, these select an entry of an axis: the number of a position, or its token; a head such as
        "L1H7", which selects from both axes, layer and head; an index, for labels that are words. Negative indices count from
        the end of the axis, -1 is its last entry; the numbers of its labels have to be ascending and not negative.

        Raises ValueError for unknown axes, and for unknown or ambiguous labels, with the nearest ones.
        """
        found = self
        for name, places in chosen_places(self.axes, labels).items():
            found = found._taken(name, places)
        return found

    def _by_metric(self: Own) -> list[Own]:
        """The part of each metric; all of it if it has no axis of metrics."""
        return [self._taken(METRIC, i) for i in range(len(self.axes[METRIC]))] if METRIC in self.axes else [self]

    def _taken(self: Own, name: str, index: int | list[int]) -> Own:
        """The part at one index of an axis, which is removed, or at several."""
        at = (slice(None),) * list(self.axes).index(name) + (index,)
        axes = dict(self.axes)
        if isinstance(index, int):
            del axes[name]
        else:
            axes[name] = [self.axes[name][i] for i in index]
        changed = {**self._of_cells(lambda values: values[at]), **(self._changed_by(name, index) or {})}
        if name == METRIC:
            changed |= {of: entries_at(getattr(self, of), index) for of in self._BY_METRIC}
        if isinstance(index, int):  # the axis is gone: `about` still says of which label the values are
            label, before = self.axes[name][index], self.about.get(SELECTED, {})
            gone = {self._METRIC_IN_ABOUT: str(label)} if name == METRIC else {SELECTED: {**before, name: label}}
            changed["about"] = {**changed.get("about", self.about), **gone}
        return replace(self, axes=axes, **changed)

    def _of_cells(self, made_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The results of a function of each tensor that has the axes of the grid, by name."""
        return {name: made_of(getattr(self, name)) for name in self._tensors() if name in self.GRID}

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any] | None:
        """Other fields that differ in a part of the grid."""
        return None

    def mean_by(self: Own, by: str) -> Own:
        """The means over the positions of each "turn", "role" or "part" of a conversation, an axis in place of "position".

        Raises ValueError for another word, and for positions that are not of a conversation (`model.chat`), or of no one turn.
        """
        axes, about, means = means_by(self.axes, self.about, by)
        return replace(self, axes=axes, about=about, **self._of_cells(means), **self._OF_MEANS)

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """A row for each cell: its labels, the mean over prompts and, of several, the interval of this cell alone (`low`,
        `high`; those of all cells at once are in `top` and in `interval(simultaneous=True)`).

        With `per_prompt` a row for each cell and prompt: the labels, `prompt` and `value`. Cells that do not exist
        are rows with NaN; `.dropna()` removes them.
        """
        if per_prompt:
            return self._by_prompt()
        low, high = self.interval(level)
        columns = {"mean": self.mean, **with_values(low=low, high=high), **(self._more_columns() or {})}
        return self._cells().assign(**{name: column.flatten().numpy() for name, column in columns.items()})

    def _more_columns(self) -> dict[str, Tensor] | None:
        """Further columns of tables, each [*grid]."""
        return None

    def _by_prompt(self) -> "pd.DataFrame":
        """A row for each cell and prompt."""
        rows = list(product(*self.axes.values(), range(self.n_prompts)))
        return pd.DataFrame(rows, columns=[*self.axes, "prompt"]).assign(value=self.values.flatten().numpy())

    def _cells(self) -> "pd.DataFrame":
        """The labels of all cells, in order."""
        return pd.DataFrame([*product(*self.axes.values())], None, list(self.axes))

    def _ranked(self: Own) -> Own:
        """The numbers that rank the cells, by absolute value."""
        return self

    def top(self, n: int = 10, level: float = 0.95) -> "pd.DataFrame":
        """The `n` cells (of each metric) with the largest absolute values.

        Columns: the labels, the mean by which cells are ranked, its interval (`low`, `high`) if there are several prompts. This
        mean is `value`; in a sweep `effect`, the difference from the unpatched run, or `restored` for a share. The mean of the
        values follows if it is another number: `value`, or `kept` for shares where the clean run is changed.

        The largest of many cells are large in part by chance, so the intervals are simultaneous (see `interval`). A cell that
        was chosen beforehand has a narrower one: `to_dataframe`.
        """
        if METRIC in self.axes:
            parts = {metric: self.select(metric=metric).top(n, level) for metric in self.axes[METRIC]}
            return pd.concat(parts, names=[METRIC]).reset_index(METRIC).reset_index(drop=True)
        best, columns = self._largest(n, level)
        table = self._cells().iloc[best.tolist()].reset_index(drop=True)
        return table.assign(**{name: column.numpy() for name, column in columns.items()})

    def _largest(self, n: int, level: float = 0.95) -> tuple[Int[Tensor, " cell"], dict[str, Float[Tensor, " cell"]]]:
        """The places of the cells of `top` in the flattened grid, and its columns of numbers."""
        ranked = self._ranked()
        effects = ranked.mean.flatten()
        best = effects.abs().nan_to_num(nan=-1.0, posinf=torch.inf).argsort(descending=True, stable=True)
        best = best[: min(n, int((~effects.isnan()).sum()))]
        numbers = {ranked._column: effects[best]}
        if self.n_prompts > 1:
            low, high = ranked._ends(best, Resampling(level))
            numbers |= {"low": low, "high": high} if self._has_intervals else {}
        numbers |= {name: column.flatten()[best] for name, column in (self._more_columns() or {}).items()}
        numbers.setdefault(self._column, self.mean.flatten()[best])
        return best, numbers

    @property
    def _column(self) -> str:
        """The name of the means in `top`."""
        return "value"

    @property
    def _has_intervals(self) -> bool:
        """Whether cells have intervals, given several prompts."""
        return True

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """A figure of the means, with their simultaneous intervals over prompts (see `interval`).

        One axis of names, such as heads and tokens, gives bars; one of numbers, such as layers and steps, a line. Two axes give
        a heat map, with positions from left to right and layer 0 at the bottom, or lines over steps. Three axes give a heat map
        for each label of the first. Of more axes, layers and their heads become one, L1H7. Axes with one label are part of the
        subtitle. `about["of"]`, or the only metric, names the values. Raises ValueError if more axes are left, or for more than
        32 heat maps.

        >>> Scores(torch.tensor([[1.0], [2.0]]), {"head": ["L1H7", "L2H0"]}).plot().data[0].type
        'bar'
        """
        from hooked_lm.results.pictures import ScoreFigure, selected

        if (own := self._own_figure(title, show_values)) is not None:
            return own
        ends = self.interval(simultaneous=True) if self.n_prompts > 1 and self._has_intervals else ()
        name = self._measured() or ("mean" if self.n_prompts > 1 else "value")
        of = headline(self._measured(), self.axes)
        about = self._pictured() or {"title": of, "subtitle": "", "value_name": name, "baselines": [{}]}
        about["title"] = title or about["title"]
        about["subtitle"] = "; ".join(filter(None, [about["subtitle"], selected(self.about.get(SELECTED, {}))]))
        note = f"mean of {self.n_prompts} prompts, {self._about_intervals}" if self.n_prompts > 1 else ""
        about["turns"] = turns_along(self.about, self.axes.get(POSITION, ()))
        means = self._drawn(torch.stack([self.mean, *ends]))
        return ScoreFigure(means, self.axes, note=note, show_values=show_values, **about).draw()

    def _own_figure(self, title: str, show_values: bool) -> "go.Figure | None":
        """The figure of a kind of scores that has one of its own; None for the one that all have."""
        return None

    def _drawn(self, means: Float[Tensor, "which *grid"]) -> Float[Tensor, "which *grid"]:
        """The means and the ends of their intervals that a figure draws; NaN for cells that it leaves blank."""
        return means

    @property
    def _about_intervals(self) -> str:
        """What the intervals of figures are, in words."""
        n_cells = prod(len(labels) for name, labels in self.axes.items() if name != METRIC)
        return "with its 95% interval" if n_cells == 1 else f"with 95% intervals of all {n_cells:,} cells at once"

    @property
    def _of_each(self) -> str:
        """What intervals of single cells are, in words: "95% intervals over 8 prompts"; nothing if there is one."""
        n, what = (self.n_prompts, self._counted) if self.groups is None else (len({*self.groups}), "group")
        return f"95% intervals over {n} {what}s" if n > 1 else ""

    def _pictured(self) -> dict[str, Any] | None:
        """Titles and baselines of the figure, if they are known: `title`, `subtitle`, `value_name`, `baselines`."""
        return None

    def _measured(self) -> str:
        """What the values are: what `about` says, or the label of the only metric; "" if nothing says it."""
        metrics = self.axes.get(METRIC, ())
        return str(self.about.get(self._METRIC_IN_ABOUT, metrics[0] if len(metrics) == 1 else "")).replace("_", " ")

    # ---- files -------------------------------------------------------------------------------------------------------

    @classmethod
    def _format(cls) -> str:
        return f"hooked_lm.{cls.__name__}"

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file, atomically; `load` restores it bit for bit."""
        tensors = {name: getattr(self, name) for name in self._tensors()}
        metadata = {of.name: getattr(self, of.name) for of in fields(self) if of.name not in tensors}
        stored.write(path, self._format(), tensors, {**metadata, "axes": list(self.axes.items())})

    @classmethod
    @stored.names_the_file
    def load(cls: type[Own], path: str | Path) -> Own:
        """The scores that `save` wrote. Raises ValueError for any other file."""
        tensors, metadata = stored.read(path, cls._format())
        return cls(**{**tensors, **metadata, "axes": dict(metadata["axes"])})

    # ---- at a glance -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        grid = " x ".join(in_summary(name, labels) for name, labels in self.axes.items()) or "one cell"
        prompts = f"{self.n_prompts} {self._counted}{'s' * (self.n_prompts != 1)}"
        if self.groups is not None:
            prompts += f" in {(n := len({*self.groups}))} group{'s' * (n != 1)}"
        if METRIC in self.axes:
            return f"{type(self).__name__}({grid}, {prompts}; metrics {', '.join(map(str, self.axes[METRIC]))})"
        with in_words() as skewed:
            parts = [*self._range(), *self._summary()]
        return f"{type(self).__name__}({grid}, {prompts}; {', '.join([*parts, *skewed])})"

    @property
    def _counted(self) -> str:
        """What the last axis of the values counts."""
        return "prompt"

    def _range(self) -> list[str]:
        """The smallest and the largest mean, in the summary."""
        found = self.mean[~self.mean.isnan()]
        return [f"means {found.min():.4g} to {found.max():.4g}"] if len(found) else ["no value"]

    def _summary(self) -> list[str]:
        """Further parts of the summary."""
        return []

    def _repr_parts(self) -> list[str]:
        """The cells with the largest numbers, as a table."""
        with in_words() as skewed:
            table = table_of_largest(self.axes, [part._largest(SHOWN) for part in self._by_metric()])
        words = ", ".join([f"Means of {self.n_prompts} prompts, {self._about_intervals}", *skewed])
        about = f"<p>{words}.</p>" if self.n_prompts > 1 else ""
        how = "<p><code>.plot()</code> draws them, <code>.to_dataframe()</code> has all, <code>.top(n)</code> the largest.</p>"
        return [table, about, how]


def provenance(model: object, **settings: object) -> dict[str, Any]:
    """The origin of results: the model's name, versions, and settings such as a seed."""
    name = str(getattr(getattr(model, "cfg", None), "model_name", None) or type(model).__name__)
    return {"model": name, "hooked_lm": version("hooked-lm"), "torch": str(torch.__version__), **settings}
