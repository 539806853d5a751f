"""The figure of scores: bars, lines, a heat map or panels, by the number and the kind of the axes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm import viz
from hooked_lm.results.labels import APART, Label, over_image
from hooked_lm.viz.labels import Who
from hooked_lm.viz.numbers import short

if TYPE_CHECKING:
    import plotly.graph_objects as go

METRIC, POSITION, LAYER, STEP, COEFFICIENT, PATCH = "metric", "position", "layer", "step", "coefficient", "patch"
MOST_LINES = 12
IN_LAYER = re.compile(r"L(\d+)(H\d+)|(\d+)_(\w+)")  # "L1H7", "1_mlp_out"
MOST_BESIDE, MOST_OVER_IMAGE = 6, 14  # labels of no layer; panels
NAMES = (
    "head",
    "neuron",
    "feature",
    "prompt",
    "token",
    "channel",
    "image",
    "text",
)  # numbers of these are names, not amounts


@dataclass(frozen=True)
class ScoreFigure:
    """What a figure of scores shows.

    `values` [which, *grid] are the means, and the lower and upper ends of their intervals if there are any. `baselines` are the
    values of unchanged runs by name, the first of which is the middle of the colours; one mapping, or one for each metric.
    `image` is that of the patches, `turns` says whose the token of each position is.
    `note` is what the values and their intervals are: below the title where intervals are drawn, else the last line on hover.
    """

    values: Float[Tensor, "..."]
    axes: Mapping[str, Sequence[Label]]
    title: str
    subtitle: str
    value_name: str
    baselines: Sequence[Mapping[str, float]]
    note: str
    show_values: bool
    image: Float[Tensor, "channel height width"] | None = None
    turns: Sequence[Who | None] | None = None

    def draw(self) -> "go.Figure":
        """The figure. Raises ValueError if more than three axes have several labels, with each layer and its heads as one."""
        long = [name for name, labels in self.axes.items() if len(labels) != 1]
        if PATCH in long and (figure := self._over_image([name for name in long if name != PATCH])):
            return figure
        if len(long) > 3 and (pairs := _layers_and_heads(long)):
            return self._with_heads_of_all_layers(pairs).draw()
        if len(long) > 3:
            fix = ", ".join(f"{name}={self.axes[name][0]!r}" for name in long[:-3])
            raise ValueError(f"a figure has three axes, and {', '.join(long)} are left: plot select({fix})")
        fixed = ", ".join(f"{name} {shown(name, self.axes[name])[0]}" for name in self.axes if name not in long)
        values = self.values.reshape(len(self.values), *(len(self.axes[name]) for name in long))
        common = {"title": self.title, "subtitle": "; ".join(filter(None, [self.subtitle, fixed]))}
        if not long:
            return self._bars(values.reshape(-1, 1), "", [fixed or "mean"], common)
        if len(long) == 1 and (by_layer := self._by_layer(long[0])):
            return by_layer.draw()
        if len(long) == 1 and not _is_ordered(long[0], self.axes[long[0]]):
            return self._bars(values, long[0], shown(long[0], self.axes[long[0]]), common)
        if len(long) == 1 or (len(long) == 2 and self._across(long)):
            across = self._across(long) or long[0]
            return self._lines(
                values.movedim(1 + long.index(across), -1), across, [n for n in long if n != across], common
            )
        *panel, rows, columns = long
        if rows == POSITION:
            rows, columns, values = columns, rows, values.transpose(-1, -2)
        return self._maps(values, panel, rows, columns, common)

    def _with_heads_of_all_layers(self, pairs: Mapping[str, str]) -> "ScoreFigure":
        """The same values with one axis of heads, such as L1H7, for each pair of neighbouring axes."""
        axes, values = dict(self.axes), self.values
        for layer, head in pairs.items():
            before = list(axes).index(layer)
            axes[head] = [f"L{at}H{label}" for at in axes.pop(layer) for label in axes[head]]
            values = values.flatten(1 + before, 2 + before)
        return replace(self, axes=axes, values=values)

    def _over_image(self, panels: Sequence[str]) -> "go.Figure | None":
        """The values of patches over their image, in a panel for each label of the other axes. None if patches have no places or
        metrics need scales of their own, and if panels are too many; over a picture these are those with the largest effects."""
        sizes = [len(self.axes[name]) for name in panels]
        grid = self.values.reshape(len(self.values), *(len(labels) for labels in self.axes.values() if len(labels) > 1))
        at = [name for name, labels in self.axes.items() if len(labels) > 1].index(PATCH)
        maps = over_image(grid.movedim(1 + at, -1), self.axes[PATCH])
        if maps is None or {*APART} & {*panels} or (prod(sizes) > MOST_OVER_IMAGE and self.image is None):
            return None
        maps, centre = maps.reshape(len(maps), prod(sizes), *maps.shape[-2:]), _first(self._baselines()) or 0.0
        effects = (maps[0] - centre).abs().nan_to_num().sum((1, 2))
        kept = effects.argsort(descending=True, stable=True)[:MOST_OVER_IMAGE].sort().values
        titles = [
            _panel(dict(zip(panels, labels, strict=True))) for labels in product(*(self.axes[name] for name in panels))
        ]
        some = f"the {len(kept)} largest of {len(effects)}" if len(kept) < len(effects) else ""
        fixed = [f"{name} {shown(name, labels)[0]}" for name, labels in self.axes.items() if len(labels) == 1]
        return viz.image_heat_map(
            maps[0, kept],
            self.image,
            [titles[i] for i in kept.tolist()] if panels else None,
            self.title,
            self.value_name,
            subtitle="; ".join(filter(None, [self.subtitle, *fixed, some])),
            interval=(maps[1, kept], maps[2, kept]) if len(maps) > 1 else None,
            marks=self._baselines(),
            note=self.note,
        )

    def _by_layer(self, name: str) -> "ScoreFigure | None":
        """The same values with an axis of layers, where the labels are heads and other parts of several layers, each layer with
        the same ones; None otherwise. Parts of no layer are said below the title."""
        parts = {i: IN_LAYER.fullmatch(str(label)) for i, label in enumerate(self.axes[name])}
        cells = {(int(m[1] or m[3]), (m[2] or m[4]).replace("_", " ")): i for i, m in parts.items() if m}
        layers, columns = (list(dict.fromkeys(labels)) for labels in zip(*cells, strict=True)) if cells else ([], [])
        others = [i for i, match in parts.items() if not match]
        is_whole = len(cells) == len(layers) * len(columns) and len(layers) > 1 and len(others) <= MOST_BESIDE
        if LAYER in self.axes or not is_whole or not any(column.startswith("H") for column in columns):
            return None
        at, axes = 1 + list(self.axes).index(name), dict[str, Sequence[Label]]()
        layers.sort()
        for axis, labels in self.axes.items():
            axes |= {LAYER: layers, name: columns} if axis == name else {axis: labels}
        order = torch.tensor([cells[layer, column] for layer in layers for column in columns])
        values = self.values.index_select(at, order).unflatten(at, (len(layers), len(columns)))
        rest = self.values[0].movedim(at - 1, 0).flatten()
        beside = ", ".join(f"{self.axes[name][i]} {short(rest[i])}" for i in others)
        said = "; ".join(filter(None, [self.subtitle, beside and f"not in a layer: {beside}"]))
        return replace(self, axes=axes, values=values, subtitle=said)

    def _across(self, long: list[str]) -> str:
        """The axis of two that lines run along: steps, or coefficients if the lines are few; "" if there is none."""
        if COEFFICIENT in long and _is_ordered(COEFFICIENT, self.axes[COEFFICIENT]):
            n_lines = max([len(self.axes[name]) for name in long if name != COEFFICIENT], default=1)
            return COEFFICIENT if n_lines <= MOST_LINES else ""
        return STEP if STEP in long else ""

    def _bars(self, values: Tensor, name: str, labels: list[str], common: dict[str, str]) -> "go.Figure":
        interval = (values[1], values[2]) if len(values) > 1 else None
        title = axis_title(name, self.axes[name]) if name else ""
        titles = {"x_title": title, "y_title": self.value_name, **self._with_note(common)}
        return viz.bars(values[0], labels, interval, baselines=self._baselines(), **titles)

    def _with_note(self, common: dict[str, str]) -> dict[str, str]:
        """The titles of a figure that draws intervals, and says what they are."""
        return {**common, "subtitle": "; ".join(filter(None, [common["subtitle"], self.note]))}

    def _lines(self, values: Tensor, across: str, others: list[str], common: dict[str, str]) -> "go.Figure":
        """A line, or one for each label of another axis."""
        labels = self.axes[others[0]] if others else [""]
        names = [
            text if isinstance(label, str) else f"{others[0]} {text}"
            for label, text in zip(labels, shown(others[0] if others else "", labels), strict=True)
        ]
        if len(names) > MOST_LINES:
            raise ValueError(f"{len(names)} lines are more than {MOST_LINES}: plot select({others[0]}=[...])")
        means, *ends = values.reshape(len(values), len(names), -1)
        intervals = {name: (low, high) for name, low, high in zip(names, *ends, strict=True)} if ends else None
        return viz.lines(
            [float(label) for label in self.axes[across]],
            dict(zip(names, means, strict=True)),
            intervals,
            common["title"],
            across,
            self.value_name,
            self.show_values,
            self._baselines(),
            self._with_note(common)["subtitle"],
        )

    def _maps(self, values: Tensor, panel: list[str], rows: str, columns: str, common: dict[str, str]) -> "go.Figure":
        settings: dict[str, Any] = {
            **common,
            "x_labels": shown(columns, self.axes[columns]),
            "x_turns": self.turns if columns == POSITION else None,
            "y_labels": shown(rows, self.axes[rows]),
            "x_title": axis_title(columns, self.axes[columns]),
            "y_title": axis_title(rows, self.axes[rows]),
            "value_name": self.value_name,
            "upwards": rows.endswith(LAYER),
            "note": self.note,
        }
        if not panel:
            ends = (values[1], values[2]) if len(values) > 1 else None
            return viz.heatmap(values[0], interval=ends, **self._centred(), show_values=self.show_values, **settings)
        [name] = panel
        labels = shown(name, self.axes[name])
        if len(labels) > viz.MOST_PANELS:
            some = f"{name}={list(self.axes[name][:2])!r}"
            raise ValueError(
                f"{len(labels)} panels are more than {viz.MOST_PANELS}: plot select({some}), or some others"
            )
        if name not in APART:
            return viz.heatmap(values[0], panels=[f"{name} {label}" for label in labels], **self._centred(), **settings)
        every = self.baselines if len(self.baselines) == len(labels) else [{}] * len(labels)
        centres = [_first(marks) or 0.0 for marks in every]
        return viz.heatmap(values[0], panels=labels, centre=centres, marks=every, **settings)

    def _centred(self) -> dict[str, Any]:
        """The white value of the colours, and the values that the colour bar names."""
        return {"centre": _first(self._baselines()), "marks": self._baselines()}

    def _baselines(self) -> Mapping[str, float]:
        """Those of the only metric."""
        return self.baselines[0] if len(self.baselines) == 1 else {}


def _panel(labels: Mapping[str, Label]) -> str:
    """The title of a panel.

    >>> _panel({"layer": 1, "head": 7}), _panel({"layer": 1})
    ('L1H7', 'layer 1')
    """
    if [*labels] == [LAYER, "head"]:
        return f"L{labels[LAYER]}H{labels['head']}"
    return ", ".join(f"{name} {label}" for name, label in labels.items())


def _first(baselines: Mapping[str, float]) -> float | None:
    return next(iter(baselines.values()), None)


def shown(name: str, labels: Sequence[Label]) -> list[str]:
    """The labels of an axis as a figure shows them: positions as their tokens, and in parentheses where the prompts' tokens
    differ; heads as H0 beside names such as "mlp".

    >>> (
    ...     shown("position", ["0 When", "1  Mary", 2, "3  Mary"]),
    ...     shown("layer", [0, 1]),
    ...     shown("head", [0, "mlp"]),
    ... )
    (['When', ' Mary (1)', '(2)', ' Mary (3)'], ['0', '1'], ['H0', 'mlp'])
    """
    tokens = iter(viz.position_labels([label for label in labels if isinstance(label, str)]))
    number = "{}"
    if _is_mixed(labels):
        number = "({})" if name == POSITION else "H{}" if name.endswith("head") else number
    return [next(tokens) if isinstance(label, str) else number.format(label) for label in labels]


def selected(labels: Mapping[str, Label]) -> str:
    """The labels that were selected, for the line below a title.

    >>> selected({"layer": 1, "position": "1  Mary"})
    'layer 1, position  Mary'
    """
    return ", ".join(f"{axis} {shown(axis, [label])[0]}" for axis, label in labels.items())


def axis_title(name: str, labels: Sequence[Label]) -> str:
    """The title of an axis, in words; that of positions says what a number among tokens means.

    >>> axis_title("position", ["0 When", 1])
    'position (a number where the tokens of the prompts differ)'
    """
    return (
        f"{name} (a number where the tokens of the prompts differ)"
        if name == POSITION and _is_mixed(labels)
        else name.replace("_", " ")
    )


def _layers_and_heads(names: list[str]) -> dict[str, str]:
    """The neighbouring axes that are layers and their heads, such as later_layer and later_head."""
    return {
        one: other
        for one, other in pairwise(names)
        if one.endswith(LAYER) and other == one.removesuffix(LAYER) + "head"
    }


def _is_mixed(labels: Sequence[Label]) -> bool:
    """Whether there are both strings and numbers."""
    return len({isinstance(label, str) for label in labels}) > 1


def _is_ordered(name: str, labels: Sequence[Label]) -> bool:
    """Whether the labels are amounts, such as layers and steps, rather than names."""
    if name == COEFFICIENT:
        numbers = [float(label) for label in labels]
        return numbers == sorted(numbers)
    return name not in NAMES and not name.endswith("head") and all(isinstance(label, int) for label in labels)
