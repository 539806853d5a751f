"""Figures of lines: training, layers, curves of faithfulness."""

import html
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz.figure import Interval, Values, and_missing, as_numbers, ends_of, style
from hooked_lm.viz.labels import LETTER
from hooked_lm.viz.numbers import rounded
from hooked_lm.viz.plots import mark_levels
from hooked_lm.viz.theme import DOWN, FAINT, GRID, PAPER, THIRD, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

COLOURS = [UP, DOWN, THIRD]  # of the lines, in turn
DASHES = [
    "solid",
    "dot",
    "dash",
    "dashdot",
]  # when the colours start again; lines to compare with start with the second
GAP = 0.13  # of the width: where an axis is broken
MARK, NARROW = 48, 420  # pixels: the sample of a line in the legend, and a narrow figure
MARKED = 64  # points that have a marker, at most


def lines(
    x: Float[Tensor, " point"] | Sequence[float | int],
    lines: Mapping[str, Values],
    intervals: Mapping[str, Interval] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    show_values: bool = False,
    baselines: Mapping[str, float] | None = None,
    subtitle: str = "",
    logarithmic: bool = False,
    references: Collection[str] = (),
) -> "go.Figure":
    """Lines over the same points, with optional confidence intervals. Points without a value and infinite ones are gaps.

    Args:
        x: the coordinates of the points, ascending.
        lines: the values of each line [point], by its name.
        intervals: the lower and upper bounds at each point, by the name of a line.
        show_values: write each value above its point.
        baselines: values with a name, drawn as dashed lines.
        subtitle: a line below the title.
        logarithmic: place the points at log(x), for numbers of very different sizes. A point at 0 is to the left of a break in
            the axis, and no line leads to it.
        references: the names of lines to compare with, such as random directions, which are grey and not solid.

    Raises ValueError for points below zero on such an axis, for a line or an interval with a different number of points, and for
    an interval of no line.

    >>> figure = lines([0, 10], {"faithfulness": torch.tensor([0.0, 1.0])})
    >>> [trace.name for trace in figure.data]
    ['faithfulness']
    """
    points = x.tolist() if isinstance(x, Tensor) else list(x)
    drawn = {name: as_numbers(line) for name, line in lines.items()}
    if odd := [name for name, line in drawn.items() if line.shape != (len(points),)]:
        raise ValueError(
            f"the line {odd[0]!r} has values of shape {list(drawn[odd[0]].shape)}, and there are {len(points)} points"
        )
    if odd := [name for name in intervals or {} if name not in lines]:
        raise ValueError(
            f"there is an interval of {odd[0]!r}, but no such line: there are {', '.join(map(repr, lines))}"
        )
    places = _logarithms(points) if logarithmic else points
    n_left = points.count(0) if logarithmic else 0  # of the break
    figure = go.Figure()
    looks = _looks(list(lines), references)
    for name, line in drawn.items():
        if (ends := ends_of(line, (intervals or {}).get(name))) is not None:
            figure.add_trace(_ribbon(places[n_left:], ends[n_left:], looks[name]["color"]))
        mode = "lines+markers" if len(points) <= MARKED else "lines"
        label = html.escape(name, quote=False)
        figure.add_trace(
            go.Scatter(
                x=_broken(places, n_left),
                customdata=_broken(points, n_left),
                y=_broken(line.tolist(), n_left),
                name=label,
                mode=f"{mode}+text" if show_values else mode,
                text=_broken([rounded(value) for value in line.tolist()], n_left) if show_values else None,
                textposition="top center",
                line={"width": 2, **looks[name]},
                hovertemplate=f"{label + '<br>' if label else ''}%{{customdata}}<br><b>%{{y:.4g}}</b><extra></extra>",
                showlegend=len(lines) > 1,
            )
        )
    values = torch.stack(list(drawn.values())) if drawn else torch.zeros(0)
    said = and_missing(subtitle, values, baselines)
    top = (56 if title or said else 16) + (18 if said else 0)
    legend = _legend_height(list(lines)) if len(lines) > 1 else 0
    style(figure, title, height=320 + top + legend, margin={"t": top, "b": 50 + legend}, subtitle=said)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"})
    axis = {"gridcolor": GRID, "zerolinecolor": FAINT, "tickfont": {"size": 11}}
    figure.update_layout(plot_bgcolor=PAPER)
    whole = len(points) <= 32 and all(float(point).is_integer() for point in points)
    figure.update_xaxes(axis, title={"text": html.escape(x_title, quote=False), "font": {"size": 12, "color": FAINT}})
    figure.update_xaxes({"zeroline": False, **(_ticks(points, places) if whole or logarithmic else {})})
    figure.update_yaxes(axis, title={"text": html.escape(y_title, quote=False), "font": {"size": 12, "color": FAINT}})
    mark_levels(figure, baselines)
    if 0 < n_left < len(points):
        _mark_break(figure, (places[n_left - 1] + places[n_left]) / 2)
    return figure


def _looks(names: Sequence[str], references: Collection[str]) -> dict[str, dict[str, str]]:
    """The colour and the dash of each line; those to compare with are grey."""
    own = [name for name in names if name not in references]
    looks = {name: (COLOURS[i % len(COLOURS)], i // len(COLOURS)) for i, name in enumerate(own)}
    looks |= {name: (FAINT, 1 + i) for i, name in enumerate(name for name in names if name in references)}
    return {name: {"color": colour, "dash": DASHES[i % len(DASHES)]} for name, (colour, i) in looks.items()}


def _logarithms(points: Sequence[float | int]) -> list[float]:
    """The places of points on a logarithmic axis; those at 0 are left of all others."""
    if points and min(points) < 0:
        raise ValueError(f"the logarithmic axis begins at 0, and a point is at {min(points)}")
    found = [math.log(point) for point in points if point]
    first, last = (found[0], found[-1]) if found else (0.0, 0.0)
    return [first - GAP * ((last - first) or 1.0)] * (len(points) - len(found)) + found


def _mark_break(figure: "go.Figure", place: float) -> None:
    """Two slashes on the horizontal axis."""
    slashes = {"text": "//", "showarrow": False, "font": {"size": 14, "color": FAINT}}
    figure.add_annotation(x=place, y=0, yref="paper", yanchor="middle", **slashes)


def _broken(values: Sequence[Any], n_left: int) -> list[Any]:
    """The values with a gap at the break of the axis, if there is one."""
    return [*values[:n_left], None, *values[n_left:]] if n_left else list(values)


def _ticks(points: Sequence[float | int], places: Sequence[float | int]) -> dict[str, list[str] | list[float | int]]:
    """The ticks at the ends, and at those points in between whose labels do not overlap."""
    last = len(points) - 1
    kept, least = [0] if points else [], (places[-1] - places[0]) / 24 if points else 0.0
    for i in range(1, last):
        if places[i] - places[kept[-1]] >= least and places[last] - places[i] >= least:
            kept.append(i)
    kept += [last] if last > 0 else []
    return {"tickvals": [places[i] for i in kept], "ticktext": [f"{points[i]:.12g}" for i in kept]}


def _legend_height(names: Sequence[str]) -> int:
    """Pixels of a legend below the figure, in as many rows as a narrow one needs."""
    across = max(1, int(NARROW / (MARK + LETTER * max(map(len, names)))))
    return 12 + 20 * -(-len(names) // across)


def _ribbon(points: Sequence[float | int], ends: Float[np.ndarray, "point 2"], colour: str) -> "go.Scatter":
    """The area of a confidence interval."""
    return go.Scatter(
        x=[*points, *reversed(points)],
        y=[*ends[:, 1].tolist(), *ends[::-1, 0].tolist()],
        mode="lines",
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
