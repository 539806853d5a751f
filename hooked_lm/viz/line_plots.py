"""Figures of lines: training, layers, curves of faithfulness."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.figure import and_missing, style
from hooked_lm.viz.numbers import rounded
from hooked_lm.viz.plots import mark_levels
from hooked_lm.viz.theme import DOWN, FAINT, GRID, PAPER, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = later("plotly.graph_objects", "viz")

COLOURS = [UP, DOWN, FAINT]  # of the lines, in turn
DASHES = ["solid", "dot", "dash", "dashdot"]  # when the colours start again
MARKED = 64  # points that have a marker, at most


def lines(
    x: Float[Tensor, " point"] | Sequence[float | int],
    lines: Mapping[str, Tensor],
    intervals: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    show_values: bool = False,
    baselines: Mapping[str, float] | None = None,
    subtitle: str = "",
) -> "go.Figure":
    """Lines over the same points, with optional confidence intervals. Points without a value are gaps.

    Args:
        x: the coordinates of the points, ascending.
        lines: the values of each line [point], by its name.
        intervals: the lower and upper bounds at each point, by the name of a line.
        show_values: write each value above its point.
        baselines: values with a name, drawn as dashed lines.
        subtitle: a line below the title.

    Raises ValueError for a line with a different number of points.

    >>> figure = lines([0, 10], {"faithfulness": torch.tensor([0.0, 1.0])})
    >>> [trace.name for trace in figure.data]
    ['faithfulness']
    """
    points = x.tolist() if isinstance(x, Tensor) else list(x)
    if odd := [name for name, line in lines.items() if len(line) != len(points)]:
        raise ValueError(f"the line {odd[0]!r} has {len(lines[odd[0]])} points, and there are {len(points)}")
    figure = go.Figure()
    for i, (name, line) in enumerate(lines.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        if intervals and name in intervals:
            figure.add_trace(_ribbon(points, *intervals[name], colour))
        mode = "lines+markers" if len(points) <= MARKED else "lines"
        label = html.escape(name, quote=False)
        figure.add_trace(
            go.Scatter(
                x=points,
                y=line.tolist(),
                name=label,
                mode=f"{mode}+text" if show_values else mode,
                text=[rounded(value) for value in line.tolist()] if show_values else None,
                textposition="top center",
                line={"color": colour, "width": 2, "dash": dash},
                hovertemplate=f"{label + '<br>' if label else ''}%{{x}}<br><b>%{{y:.4g}}</b><extra></extra>",
                showlegend=len(lines) > 1,
            )
        )
    values = torch.stack(list(lines.values())) if lines else torch.zeros(0)
    said = and_missing(subtitle, values)
    top = (56 if title or said else 16) + (18 if said else 0)
    style(figure, title, height=320 + top, margin={"t": top, "b": 50}, subtitle=said)
    axis = {"gridcolor": GRID, "zerolinecolor": FAINT, "tickfont": {"size": 11}}
    figure.update_layout(plot_bgcolor=PAPER)
    whole = len(points) <= 32 and all(float(point).is_integer() for point in points)
    figure.update_xaxes(axis, title={"text": html.escape(x_title, quote=False), "font": {"size": 12, "color": FAINT}})
    figure.update_xaxes({"zeroline": False, **({"tickvals": _apart(points)} if whole else {})})
    figure.update_yaxes(axis, title={"text": html.escape(y_title, quote=False), "font": {"size": 12, "color": FAINT}})
    mark_levels(figure, baselines)
    return figure


def _apart(points: Sequence[float | int]) -> list[float | int]:
    """The points that have a label on the axis: the ends, and those in between whose labels do not overlap."""
    if len(points) < 3:
        return list(points)
    kept, least = [points[0]], (points[-1] - points[0]) / 24
    for point in points[1:-1]:
        if point - kept[-1] >= least and points[-1] - point >= least:
            kept.append(point)
    return [*kept, points[-1]]


def _ribbon(points: Sequence[float | int], low: Tensor, high: Tensor, colour: str) -> "go.Scatter":
    """The area of a confidence interval."""
    return go.Scatter(
        x=[*points, *reversed(points)],
        y=high.tolist() + low.flip(0).tolist(),
        mode="lines",
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
