"""Heat maps of matrices with labelled rows and columns, alone or in panels."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz import bands
from hooked_lm.viz.cells import Cells
from hooked_lm.viz.figure import (
    WIDEST,
    Interval,
    Values,
    and_missing,
    as_numbers,
    room_above,
    said_of,
    style,
    widen,
)
from hooked_lm.viz.labels import MOST, Axis, Who, cut
from hooked_lm.viz.numbers import rounded
from hooked_lm.viz.scales import ColourScale, colour_bar, scale_of
from hooked_lm.viz.theme import FAINT, INK, MISSING, PAPER

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = lazy_import("plotly.graph_objects", "viz")
    subplots = lazy_import("plotly.subplots", "viz")

Centre = float | Sequence[float] | None
Limit = float | Sequence[float] | None
Marks = Mapping[str, float] | Sequence[Mapping[str, float]] | None

MOST_PANELS = 32
"""The largest number of small multiples in one figure."""
BETWEEN = 44  # pixels from a panel to the one below, for its title
NARROW = 16  # columns of a panel that has others beside it, at most
TITLE_LETTER, BESIDE = 7.5, 130  # pixels of a letter in the title of a panel, and of what is beside the panels
MAP, BAR = 150, 72  # pixels of a feature map; of a colour bar


def heatmap(
    values: Values,  # [row, column] or [panel, row, column], checked in words
    x_labels: Sequence[Any] | None = None,
    y_labels: Sequence[Any] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    value_name: str = "",
    show_values: bool = False,
    limit: Limit = None,
    interval: Interval | None = None,
    upwards: bool = False,
    centre: Centre = None,
    marks: Marks = None,
    subtitle: str = "",
    note: str = "",
    panels: Sequence[Any] | None = None,
    columns: int | None = None,
    every_cell: bool = False,
    x_turns: Sequence[Who | None] | None = None,
) -> "go.Figure":
    """A heat map of a matrix, or a panel for each of several; row 0 is at the top.

    Colours diverge from white at the centre: blue above, orange below. If all values are on one side, they go from white to one
    end. Cells without a value (NaN) and infinite ones are hatched, say so on hover, and are counted below the title. Long labels
    are cut, and of many every second, third, ... is written; hover shows all. First columns that are equal in every row are drawn
    as one, "10 equal columns", and of more cells than pixels the largest of each block.

    Args:
        values: [row, column] or [panel, row, column], as a tensor, an array or lists.
        x_labels, y_labels: one for each column and row; may contain duplicates. Indices if None.
        value_name: the title of the colour bar.
        show_values: write the values into the cells, except for those that are exactly zero.
        limit: the distance from the centre at the end of the colour scale; the largest one if None. With one for each panel, each
            has its own scale, which has a bar if panels are below each other.
        interval: the lower and upper bounds of each value, shown on hover.
        upwards: put row 0 at the bottom, as for layers.
        centre: the value that is white, such as that of an unchanged run; zero if None, unless all values are far from it. With
            one for each panel, each has its own scale.
        marks: values that are named on the colour bar; one mapping for each panel with its own scale.
        subtitle: a line below the title.
        note: the last line on hover, such as the number of prompts.
        panels: the title of each panel; numbers if None.
        columns: the number of panels beside each other; None: few enough for their labels, as many in each row as possible.
        every_cell: draw each column and row, even if they are equal or many.
        x_turns: of each column the turn, the role and the part of its token, as for `conversation`; None for one without. They
            are drawn as bands above the columns.

    Raises ValueError for values with other axes or none at all, the wrong number of labels, titles or centres, an interval of
    another shape, and more than 32 panels.

    >>> import torch
    >>> figure = heatmap(
    ...     torch.tensor([[0.0, 0.5], [-1.0, 0.0]]), x_labels=[" a", " a"], title="Effect"
    ... )
    >>> figure.data[0].zmin, figure.data[0].zmax, figure.layout.xaxis.ticktext
    (-1.0, 1.0, ('·a', '·a'))
    >>> figure = heatmap(torch.randn(2, 3, 4), panels=["layer 0", "layer 1"])
    >>> len(figure.data), figure.layout.annotations[1].text
    (2, 'layer 1')
    """
    table = as_numbers(values)
    _check_axes(table)
    matrices = table if table.ndim > 2 else table[None]
    n = len(matrices)
    titles = panel_titles(panels, n) if table.ndim > 2 or panels is not None else []
    scales = _scales(matrices, centre, limit)
    below = and_missing(subtitle, matrices, marks if isinstance(marks, Mapping) else None)
    x_axis = Axis.of(x_labels, matrices.shape[2], "columns", x_title, turns=x_turns)
    y_axis = Axis.of(y_labels, matrices.shape[1], "rows", y_title)
    cells = Cells.of(table, interval, x_axis, y_axis, every_cell)
    across = _across(n, len(cells.x_axis.names), len(scales) > 1, columns)
    cells = cells if every_cell else cells.in_blocks([scale.white for scale in scales], across)
    x_axis, y_axis = replace(cells.x_axis, most=MOST // across), cells.y_axis
    n_rows, n_columns = cells.numbers.shape[2:]
    below = "; ".join(filter(None, [below, cells.said]))
    figure, drawn = panel_grid(n, across, _panel_height(n, n_rows))
    traces = _traces(cells.numbers, titles, x_axis, y_axis, show_values, note)
    for i, (shown, holes) in enumerate(traces):
        shown.update({**scales[i % len(scales)].settings(), "showscale": i == 0 if len(scales) == 1 else across == 1})
        figure.add_traces([shown, *holes], i // across + 1, i % across + 1)
    figure.update_traces(xgap=int(n_columns <= 128), ygap=int(n_rows <= 64), selector={"type": "heatmap"})
    _set_axes(figure, n, across, x_axis, y_axis, upwards)
    top, bottom = room_above(title, below) + 24 * bool(titles) + bands.ROOM * bool(x_axis.turns), x_axis.height
    style(figure, title, drawn + top + bottom, {"t": top, "b": bottom, "l": x_axis.left}, below)
    _colour_bars(figure, scales, marks, value_name, drawn)
    cell = 30 if show_values else 18 if n == 1 else 14
    beside, wide = BAR + max(x_axis.left, y_axis.width + 16), cell * min(n_columns, MOST)
    name_panels(figure, titles, across, beside + across * max(wide, 90 * bool(titles)))
    bands.draw_bands(figure, n, x_axis, wide / n_columns, len(titles))
    return figure


def feature_maps(
    maps: Values,  # [channel, height, width], checked in words
    labels: Sequence[str] | None = None,
    title: str = "",
    columns: int = 4,
    value_name: str = "",
) -> "go.Figure":
    """One panel for each channel, with row 0 at the top; all panels share a colour scale, which is that of `heatmap`.

    Raises ValueError for maps with other axes or none at all, and for the wrong number of labels.

    >>> import torch
    >>> figure = feature_maps(torch.eye(3).expand(2, 3, 3), ["edges", "corners"])
    >>> len(figure.data), figure.layout.annotations[1].text
    (2, 'corners')
    """
    matrices = as_numbers(maps)
    if matrices.ndim != 3 or not matrices.numel():
        raise ValueError(f"maps are [channel, height, width], got {list(matrices.shape)}")
    n, n_rows, n_columns = matrices.shape
    titles = panel_titles([f"channel {i}" for i in range(n)] if labels is None else labels, n)
    scale, across = scale_of(matrices), max(1, min(columns, n))
    figure, drawn = panel_grid(n, across, MAP)
    where = "row %{y}, column %{x}"
    for i, matrix in enumerate(matrices):
        hover = f"{html.escape(titles[i], quote=False)}<br>{where}"
        cells = go.Heatmap(
            z=matrix.numpy(),
            hoverongaps=False,
            hovertemplate=f"{hover}<br><b>%{{z:.3f}}</b><extra></extra>",
            showscale=i == 0,
        )
        cells.update(scale.settings())
        figure.add_traces([cells, *missing(matrix, None, hover)], i // across + 1, i % across + 1)
    figure.update_xaxes(visible=False, constrain="domain", range=[-0.5, n_columns - 0.5])
    figure.update_yaxes(visible=False, constrain="domain", range=[n_rows - 0.5, -0.5])
    for axis in figure.select_yaxes():
        axis.scaleanchor = axis.anchor
    below = and_missing("", matrices)
    top = room_above(title, below) + 24
    style(figure, title, drawn + top + 16, {"t": top, "b": 16, "l": 16}, below)
    figure.update_layout(plot_bgcolor=PAPER)
    _colour_bars(figure, [scale], None, value_name, drawn)
    name_panels(figure, titles, across, BESIDE + 100 * across)
    return figure


# ---- the cells -----------------------------------------------------------------------------------------------------------


def _traces(
    numbers: Float[Tensor, "which panel row column"],
    titles: Sequence[str],
    x_axis: Axis,
    y_axis: Axis,
    show_values: bool,
    note: str,
) -> "Iterator[tuple[go.Heatmap, list[go.Heatmap | go.Scatter]]]":
    """The cells of each panel, and those without a value."""
    names, where = _cell_names(x_axis, y_axis)
    said = said_of(note, has_interval=len(numbers) > 1)
    bounds = numbers[1:].movedim(0, -1).numpy() if len(numbers) > 1 else None
    for i, matrix in enumerate(numbers[0]):
        hover = f"{html.escape(titles[i], quote=False)}<br>{where}" if titles else where
        texts = [[_number(value) for value in row] for row in matrix.tolist()] if show_values else None
        trace = go.Heatmap(
            z=matrix.numpy(),
            hoverongaps=False,
            text=texts,
            texttemplate="%{text}" if show_values else None,
            textfont={"size": 11},
            customdata=None if bounds is None else bounds[i],
            hovertext=names,
            hovertemplate=f"{hover}<br><b>%{{z:.3f}}</b>{said}<extra></extra>",
        )
        yield trace, missing(matrix, names, hover)


def _cell_names(x_axis: Axis, y_axis: Axis) -> tuple[list[list[str]] | None, str]:
    """The labels of every cell for the hover text, if those on the axes do not tell; and how the text refers to them."""
    row, column = (f"{html.escape(axis.title, quote=False)} ".lstrip() for axis in (y_axis, x_axis))
    if x_axis.is_whole and y_axis.is_whole:
        return None, f"{row}%{{y}}<br>{column}%{{x}}"
    across, down = ([html.escape(name, quote=False) for name in axis.names] for axis in (x_axis, y_axis))
    return [[f"{row}{y}<br>{column}{x}" for x in across] for y in down], "%{hovertext}"


def missing(
    matrix: Float[Tensor, "row column"], names: list[list[str]] | None, where: str
) -> "list[go.Heatmap | go.Scatter]":
    """Hatched cells where a matrix has no value or an infinite one, and what they say on hover; nothing if it has all."""
    kinds = {"no value": matrix.isnan(), "infinite": matrix.isinf()}
    return [part for said, holes in kinds.items() if holes.any() for part in _hatched(holes, said, names, where)]


def _hatched(
    holes: Bool[Tensor, "row column"], said: str, names: list[list[str]] | None, where: str
) -> "list[go.Heatmap | go.Scatter]":
    """Hatched cells, which say the same on hover."""
    scale = {
        "colorscale": [(0.0, MISSING), (1.0, MISSING)],
        "showscale": False,
        "zmin": 0,
        "zmax": 1,
        "hoverongaps": False,
    }
    cells = torch.where(holes, 1.0, torch.nan).numpy()
    hatch = {"shape": "/", "size": 7, "solidity": 0.25, "fgcolor": FAINT, "bgcolor": MISSING}
    x, y = _outlines(holes)
    return [
        go.Heatmap(z=cells, hovertext=names, hovertemplate=f"{where}<br>{said}<extra></extra>", **scale),
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillpattern=hatch,
            hoverinfo="skip",
            showlegend=False,
        ),
    ]


def _outlines(holes: Bool[Tensor, "row column"]) -> tuple[list[float | None], list[float | None]]:
    """The outlines of all runs of cells in rows, one after the other with gaps in between."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, cells in enumerate(holes.tolist()):
        starts = [i for i, hole in enumerate(cells) if hole and not (i and cells[i - 1])]
        stops = [i for i, hole in enumerate(cells) if hole and not (i + 1 < len(cells) and cells[i + 1])]
        for start, stop in zip(starts, stops, strict=True):
            left, right = start - 0.48, stop + 0.48
            x += [left, right, right, left, left, None]
            y += [row - 0.47, row - 0.47, row + 0.47, row + 0.47, row - 0.47, None]
    return x, y


def _number(value: float) -> str:
    return rounded(value) if math.isfinite(value) and value else ""


# ---- the panels ----------------------------------------------------------------------------------------------------------


def panel_titles(panels: Sequence[Any] | None, n: int) -> list[str]:
    """The titles of panels, as numbers if None. Raises ValueError for a wrong number of titles, and for too many panels."""
    titles = [str(name) for name in (range(n) if panels is None else panels)]
    if len(titles) != n:
        raise ValueError(f"{len(titles)} titles for {n} panels")
    if n > MOST_PANELS:
        raise ValueError(f"{n} panels are more than {MOST_PANELS}: select fewer")
    return titles


def panel_grid(n: int, across: int, height: int) -> "tuple[go.Figure, int]":
    """An empty figure of panels of some pixels, and the height of all."""
    down = -(-n // across)
    drawn = down * height + (down - 1) * BETWEEN
    spacing = {"horizontal_spacing": 0.03 if across > 1 else 0, "vertical_spacing": BETWEEN / drawn if down > 1 else 0}
    return subplots.make_subplots(down, across, subplot_titles=[" "] * n if n > 1 else None, **spacing), drawn


def _set_axes(figure: "go.Figure", n: int, across: int, x_axis: Axis, y_axis: Axis, upwards: bool) -> None:
    """The axes of all panels, in one change of the figure: plotly takes long over each. Only the outer ones have labels."""
    x_range, y_range = [-0.5, len(x_axis.names) - 0.5], [-0.5, len(y_axis.names) - 0.5]
    axes = {}
    for i in range(-(-n // across) * across):
        lowest, first, number = i + across >= n, i % across == 0, i + 1 if i else ""
        in_the_middle = i % across == (min(n, across) - 1) // 2  # one title for all panels, which would overlap
        x, y = (figure.layout[f"{letter}axis{number}"].to_plotly_json() for letter in "xy")
        if i < n:
            x |= {**x_axis.settings(True, lowest and in_the_middle), "showticklabels": lowest}
            y |= {**y_axis.settings(False, first), "showticklabels": first}
        axes[f"xaxis{number}"] = {**x, "range": x_range}
        axes[f"yaxis{number}"] = {**y, "range": y_range if upwards else y_range[::-1]}
    figure.update_layout(axes, overwrite=True)


def name_panels(figure: "go.Figure", titles: Sequence[str], across: int, width: int) -> None:
    """Writes the titles above their panels, and gives the figure the least width: a larger one for long titles, up to a limit
    beyond which they are cut."""
    if len(titles) == 1:
        figure.add_annotation(x=0.5, y=1, xref="paper", yref="paper", yanchor="bottom", showarrow=False)
    longest = max(map(len, titles), default=0)
    widen(figure, max(width, BESIDE + round(across * (TITLE_LETTER * longest + 12))))
    room = max(8, int(((WIDEST - BESIDE) / across - 12) / TITLE_LETTER))
    named = [annotation.to_plotly_json() for annotation in figure.layout.annotations]
    for title, annotation in zip(titles, named, strict=False):
        annotation["text"] = html.escape(cut(title, room), quote=False)
        annotation["hovertext"] = html.escape(title, quote=False) if len(title) > room else None
        annotation["font"] = {"size": 13, "color": INK}
    figure.update_layout(annotations=named, overwrite=True)


def _check_axes(values: Tensor) -> None:
    """Raises ValueError for values that are neither a matrix nor one for each panel, and for none at all."""
    shape = list(values.shape)
    if values.ndim in (2, 3):
        if not values.numel():
            raise ValueError(f"there are no values to draw: they are {shape}")
        return
    if values.ndim < 2:
        raise ValueError(
            f"values are [row, column], or [panel, row, column], got {shape}: bars and lines draw one axis"
        )
    part = f"values[{', '.join(['0'] * (values.ndim - 3))}]"
    raise ValueError(f"values are [row, column], or [panel, row, column], got {shape}: draw a part, such as {part}")


def _across(n: int, n_columns: int, have_own_scales: bool, columns: int | None) -> int:
    """The number of panels beside each other."""
    if columns is not None:
        return max(1, min(columns, n))
    most = 4 if n_columns <= 8 else 2 if n != 3 else 1  # three long ones are below each other
    return 1 if have_own_scales or n_columns > NARROW else evenly(n, most)


def evenly(n: int, most: int) -> int:
    """How many of `n` panels stand in a row, at most `most`, so that no row has many fewer than another.

    >>> [evenly(n, 4) for n in (3, 5, 6, 8, 9)]
    [3, 3, 3, 4, 3]
    """
    return -(-n // -(-n // most)) if n else 1


def _panel_height(n: int, n_rows: int) -> int:
    """Pixels of a panel: fewer for each row if there are many."""
    least, row, most = (140, 34, 760) if n == 1 else (90, 22, 600)
    return round(max(least, n_rows * max(2, min(row, most / n_rows))))


# ---- the colours ---------------------------------------------------------------------------------------------------------


def _scales(matrices: Float[Tensor, "panel row column"], centre: Centre, limit: Limit) -> list[ColourScale]:
    """The scale that all panels share, or one for each."""
    n, each = len(matrices), dict[str, list[float | None]]()
    for name, given in (("centres", centre), ("limits", limit)):
        each[name] = [*given] if isinstance(given, Sequence) else [given] * n
        if len(each[name]) != n:
            raise ValueError(f"{len(each[name])} {name} for {n} panels: give one number for all, or one for each")
    if not isinstance(centre, Sequence) and not isinstance(limit, Sequence):
        return [scale_of(matrices, centre, limit)]
    return [scale_of(*panel) for panel in zip(matrices, each["centres"], each["limits"], strict=True)]


def _colour_bars(figure: "go.Figure", scales: Sequence[ColourScale], marks: Marks, name: str, drawn: int) -> None:
    """A bar for the scale of all panels, or one beside each panel."""
    every = [marks] if marks is None or isinstance(marks, Mapping) else [*marks, None]
    shown = [trace for trace in figure.data if trace.type == "heatmap" and trace.showscale]
    for i, (trace, scale) in enumerate(zip(shown, scales, strict=bool(shown))):
        own = len(scales) > 1
        axis = figure.layout[trace.yaxis.replace("y", "yaxis")] if own else None
        low, high = axis.domain if axis else (1 - min(1.0, 320 / drawn), 1.0)
        bar = colour_bar("" if own else name) | {"y": high, "yanchor": "top", "len": high - low}
        trace.colorbar = bar | scale.ticks(every[min(i, len(every) - 1)])
