"""Results of evaluations of dictionaries: each number beside those of a random and of a PCA dictionary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.extras import lazy_import
from hooked_lm.notebook_repr import html_table
from hooked_lm.results import stored
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import Scores
from hooked_lm.results.tabular import Tabular, as_text

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FLOORS = {"random": "random", "pca": "PCA"}  # the fields, and their names in tables
FIGURE = "figure"
ABOVE_FLOORS = (
    "above floors"  # in `about`: the intervals of the differences by the headline figure, by the names of floors
)
WHOLE = "all"  # the label of all layers together
MOST_ROWS = 80  # in a notebook
UNBOUNDED = ("L0", "true L0", "frequency")  # figures that are no shares, besides cross entropies


@dataclass(frozen=True, eq=False, repr=False)
class DictionaryScores(Scores):
    """The figures of a dictionary, beside those of a random and of a PCA dictionary of the same size and L0 (the floors).

    Args:
        values: [*grid, 1], the figures of the dictionary; the first axis is "figure".
        random, pca: the figures of the floors, of the same shape; None if they were not measured.
        headline: the figure by which the dictionary is compared with its floors; larger is better.

    Tables and figures show all three. A dictionary that is no better than its random floor is named in the summary.

    >>> import torch
    >>> DictionaryScores(
    ...     torch.tensor([[0.4], [8.0]]),
    ...     {"figure": ["explained variance", "L0"]},
    ...     random=torch.tensor([[0.5], [8.0]]),
    ...     pca=torch.tensor([[0.3], [8.0]]),
    ... )
    DictionaryScores(figure 2, 1 dictionary; explained variance 0.4, random 0.5, PCA 0.3: no better than a random dictionary)
    """

    random: Float[Tensor, "..."] | None = None
    pca: Float[Tensor, "..."] | None = None
    headline: str = "explained variance"
    GRID: ClassVar[tuple[str, ...]] = ("values", "random", "pca")

    def _check(self) -> None:
        for name in FLOORS:
            floor = getattr(self, name)
            if floor is not None and floor.shape != self.values.shape:
                raise ValueError(
                    f"{name} has the shape of the values, {list(self.values.shape)}, got {list(floor.shape)}"
                )

    @property
    def floors(self) -> dict[str, Float[Tensor, "*grid"]]:
        """The means of the floors that were measured, by name: "random" and "PCA"."""
        found = {shown: getattr(self, name) for name, shown in FLOORS.items()}
        return {shown: floor.mean(-1) for shown, floor in found.items() if floor is not None}

    def compared(self) -> dict[str, float]:
        """The headline figure of the dictionary ("dictionary") and of its floors, means over the rest of the grid, or that of all
        layers together; empty if the headline was not selected."""
        if self.headline not in self.axes.get(FIGURE, ()):
            return {}
        if WHOLE in (layers := list(self.axes.get("layer", ()))) and len(layers) > 1:
            return self.select(layer=WHOLE).compared()
        at = list(self.axes).index(FIGURE), list(self.axes[FIGURE]).index(self.headline)
        means = {"dictionary": self.mean, **self.floors}
        return {name: float(values.select(*at).nanmean()) for name, values in means.items()}

    @property
    def above_floors(self) -> dict[str, tuple[float, float]]:
        """The interval of how far the dictionary is above each floor by its headline figure, where there is one."""
        found = self.about.get(ABOVE_FLOORS, {}) if self.compared() else {}
        return {name: (low, high) for name, (low, high) in found.items()}

    @property
    def no_better_than(self) -> list[str]:
        """The floors that the dictionary does not exceed by its headline figure: "random", "PCA", both or none. With an interval
        of the difference, it exceeds a floor if all of it is above 0. None where it has no value, as the explained variance of
        equal vectors."""
        found, above = self.compared(), self.above_floors
        differ = {name: above.get(name, (found["dictionary"] - value, 0))[0] for name, value in found.items()}
        return [name for name, least in differ.items() if name != "dictionary" and least <= 0]

    def warn_if_no_better(self) -> None:
        """Warns of a dictionary that is no better than its random floor."""
        if "random" in self.no_better_than:
            found = self.compared()
            warn_caller(
                f"the dictionary is no better than a random one of the same size and L0: {self.headline} "
                f"{found['dictionary']:.3g}, random {found['random']:.3g}{self._difference('random')}. By this figure it "
                "has found nothing that random directions lack"
            )

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def _more_columns(self) -> dict[str, Tensor]:
        return self.floors

    def _own_figure(self, title: str, show_values: bool) -> "go.Figure | None":
        """Bars of the figures that are shares, with those of the floors in grey; of a grid with more axes, of its headline."""
        from hooked_lm import viz

        shown = self if list(self.axes) == [FIGURE] or FIGURE not in self.axes else self.select(figure=self.headline)
        if len(shown.axes) != 1 or (shown.random is None and shown.pca is None):
            return None
        [(axis, labels)] = shown.axes.items()
        bars: list[tuple[str, float]] = []
        means = {"": shown.mean, **shown.floors}
        for i, label in enumerate(labels):
            if axis != FIGURE or not (
                label in UNBOUNDED or (str(label).startswith("CE") and "recovered" not in str(label))
            ):
                bars += [(f"{label} ({name})" if name else str(label), float(of[i])) for name, of in means.items()]
        names, values = zip(*bars, strict=True)
        grey = [name for name in names if name.endswith(tuple(f" ({floor})" for floor in shown.floors))]
        title = title or ("A dictionary and its floors" if axis == FIGURE else f"{self.headline} by {axis}")
        return viz.bars(torch.tensor(values), names, title=title, references=grey)

    def _repr_parts(self) -> list[str]:
        """All figures in order, as they differ in their units, up to a number of rows."""
        means = {"dictionary": self.mean, **self.floors}
        numbers = zip(*(values.flatten().tolist() for values in means.values()), strict=True)
        rows = [[*at, *map(as_text, of)] for at, of in zip(product(*self.axes.values()), numbers, strict=True)]
        return [html_table([*self.axes, *means], rows[:MOST_ROWS])]

    def _difference(self, floor: str) -> str:
        """The interval of the difference from a floor, in words; "" for none."""
        low, high = self.above_floors.get(floor, (None, None))
        return "" if low is None else f" (difference {low:.2g} to {high:.2g})"

    @property
    def _counted(self) -> str:
        return "dictionary"

    def _range(self) -> list[str]:
        return super()._range() if not self.compared() else []

    def _summary(self) -> list[str]:
        found = self.compared()
        if not found:
            return []
        parts = [f"{name} {value:.3g}{self._difference(name)}" for name, value in found.items()]
        parts[0] = parts[0].replace("dictionary", self.headline, 1)
        if worse := self.no_better_than:
            parts[-1] += f": no better than a {' or a '.join(worse)} dictionary"
        return parts if self.floors else [*parts, f"floors: {self.about.get('control', 'none')}"]


@dataclass(frozen=True, repr=False)
class DictionaryEvaluation(Tabular):
    """What a dictionary makes of known features or labels: figures of the whole, and of each feature or label.

    Args:
        figures: the figures of the whole, beside the floors.
        each: the figures of each feature ("figure" and "feature") or label ("figure" and "label").
    """

    figures: DictionaryScores
    each: DictionaryScores

    @property
    def _unit(self) -> str:
        return list(self.each.axes)[1]

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each feature or label, with its figures and, in columns such as "F1 (random)", those of the floors."""
        means = {"": self.each.mean, **{f" ({name})": values for name, values in self.each.floors.items()}}
        names = self.each.axes[FIGURE]
        columns = {f"{figure}{of}": values[i].numpy() for i, figure in enumerate(names) for of, values in means.items()}
        return pd.DataFrame({self._unit: list(self.each.axes[self._unit]), **columns})

    def _shown(self) -> DictionaryScores:
        return self.figures

    def plot(self, title: str = "") -> "go.Figure":
        """The figures of the whole that are shares, beside those of the floors."""
        return self.figures.plot(title)

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file, atomically; `load` restores it bit for bit."""
        stored.write(path, "hooked_lm.DictionaryEvaluation", *packed({"figures": self.figures, "each": self.each}))

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "DictionaryEvaluation":
        """What `save` wrote. Raises ValueError for any other file."""
        found = unpacked(*stored.read(path, "hooked_lm.DictionaryEvaluation"))
        figures, each = found["figures"], found["each"]
        if not isinstance(figures, DictionaryScores) or not isinstance(each, DictionaryScores):
            raise ValueError("the scores have no headline, by which a dictionary is compared with its floors")
        return cls(figures, each)

    def __repr__(self) -> str:
        number = len(self.each.axes[self._unit])
        return f"DictionaryEvaluation({number} {self._unit}s; {', '.join(self.figures._summary())})"


def beside_floors(
    columns: Mapping[str, Tensor], axes: Mapping[str, Sequence[Label]], about: Mapping[str, object], headline: str
) -> DictionaryScores:
    """The scores of columns "values" and, if there are floors, "random" and "pca", [*grid]."""
    values, random, pca = (None if (of := columns.get(name)) is None else of[..., None] for name in ("values", *FLOORS))
    assert values is not None
    return DictionaryScores(values, axes, about=about, random=random, pca=pca, headline=headline)


def packed(parts: Mapping[str, Scores]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of several scores, for one file."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {}
    for name, scores in parts.items():
        tensors[name] = scores.values
        header[name] = {"axes": list(scores.axes.items()), "about": scores.about}
        if isinstance(scores, DictionaryScores):
            header[name]["headline"] = scores.headline
            floors = {floor: getattr(scores, floor) for floor in FLOORS}
            tensors |= {f"{name}.{floor}": values for floor, values in floors.items() if values is not None}
    return tensors, header


def unpacked(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Scores]:
    """The scores of a file, by name, from what `packed` made; other entries are left out."""
    found: dict[str, Scores] = {}
    for name, of in header.items():
        if not isinstance(of, dict) or "axes" not in of:
            continue
        axes: dict[str, list[Label]] = dict(of["axes"])
        if "headline" not in of:
            found[name] = Scores(tensors[name], axes, about=of["about"])
            continue
        random, pca = (tensors.get(f"{name}.{floor}") for floor in FLOORS)
        found[name] = DictionaryScores(
            tensors[name], axes, about=of["about"], random=random, pca=pca, headline=of["headline"]
        )
    return found
