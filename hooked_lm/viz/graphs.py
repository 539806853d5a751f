"""Figures of layered graphs, and of curves."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.theme import DIVERGING, DOWN, FAINT, FONT, GRID, INK, UP

if TYPE_CHECKING:
    import plotly.colors as colors
    import plotly.graph_objects as go
else:
    go = later("plotly.graph_objects", "viz")
    colors = later("plotly.colors", "viz")

THIN, THICK, STEPS = 0.7, 6.0, 12  # pixels of the weakest and strongest edge, and how many widths lie between
STOPS = 24  # points of a curve
PALE = 0.3  # how far from white the colour of the weakest edge is, of 1
LEVEL = 74  # pixels from a level to the next
LINES = [UP, DOWN, FAINT, INK]  # colours of curves, in turn


def layered_graph(
    levels: Mapping[str, int],
    edges: Sequence[tuple[str, str, str]],
    scores: Float[Tensor, " edge"] | None = None,
    title: str = "",
    value_name: str = "score",
) -> "go.Figure":
    """A graph with nodes on levels, the lowest at the bottom. Width and colour of edges show their scores: blue is positive,
    red negative.

    Args:
        levels: the level of each node; nodes of one level are side by side, in the given order.
        edges: the source, the target and the hover text of each edge.
        scores: one for each edge; all edges look the same if None.

    Raises ValueError for an edge to or from a node without a level, and for a wrong number of scores.

    >>> import torch
    >>> figure = layered_graph({"in": 0, "h0": 1, "out": 2}, [("in", "h0", "a"), ("h0", "out", "b")], torch.tensor([1.0, -2.0]))
    >>> figure.data[-1].text
    ('in', 'h0', 'out')
    """
    if scores is not None and len(scores) != len(edges):
        raise ValueError(f"{len(scores)} scores for {len(edges)} edges")
    if missing := [end for edge in edges for end in edge[:2] if end not in levels]:
        raise ValueError(f"an edge ends at {missing[0]!r}, which has no level")
    at = _placed(levels)
    numbers = torch.ones(len(edges)) if scores is None else scores.detach().float().cpu()
    limit = float(numbers.abs().max()) if len(edges) and float(numbers.abs().max()) > 0 else 1.0
    curves = [_curve(at[start], at[stop]) for start, stop, _ in edges]
    figure = go.Figure(_lines(curves, (numbers / limit).tolist(), scores is None))
    figure.add_trace(_points(curves, [text for _, _, text in edges], numbers, limit, value_name, scores is None))
    figure.add_trace(_nodes(at))
    _style(figure, title, len(set(levels.values())))
    return figure


def _placed(levels: Mapping[str, int]) -> dict[str, tuple[float, float]]:
    """The coordinates of each node: levels in ascending order, the nodes of a level spread around the middle."""
    rows = {level: [name for name in levels if levels[name] == level] for level in sorted(set(levels.values()))}
    return {
        name: ((i + 0.5) / len(names) - 0.5, float(height))
        for height, names in enumerate(rows.values())
        for i, name in enumerate(names)
    }


def _curve(start: tuple[float, float], stop: tuple[float, float]) -> Float[np.ndarray, "2 stop"]:
    """A curve between two points, vertical at both ends; one that passes levels in between bends to the side."""
    t = np.linspace(0, 1, STOPS)
    smooth = t * t * (3 - 2 * t)
    passed = max(0.0, stop[1] - start[1] - 1)
    side = 1.0 if start[0] + stop[0] >= 0 else -1.0
    aside = side * 0.035 * min(passed, 6) * np.sin(np.pi * t)
    points: np.ndarray = np.stack(
        [start[0] + (stop[0] - start[0]) * smooth + aside, start[1] + (stop[1] - start[1]) * t]
    )
    return points


def _lines(curves: Sequence[np.ndarray], sizes: Sequence[float], alike: bool) -> "list[go.Scatter]":
    """A trace for all edges of about one size, the weakest first, so that the strongest are drawn on top."""
    steps = [0 if size == 0 else int(np.sign(size)) * max(1, round(abs(size) * STEPS)) for size in sizes]
    traces = []
    for step in sorted(set(steps), key=abs):
        some = [curve for curve, own in zip(curves, steps, strict=True) if own == step]
        xs, ys = (np.concatenate([np.append(curve[axis], np.nan) for curve in some]) for axis in (0, 1))
        share = abs(step) / STEPS
        line = (
            {"color": FAINT, "width": 1.5}
            if alike
            else {"color": _colour(step), "width": THIN + share * (THICK - THIN)}
        )
        traces.append(go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False))
    return traces


def _colour(step: int) -> str:
    share = step / STEPS
    place = 0.5 + 0.5 * (PALE + (1 - PALE) * abs(share)) * (1 if share >= 0 else -1)
    [colour] = colors.sample_colorscale([list(stop) for stop in DIVERGING], [place])
    return str(colour)


def _points(
    curves: Sequence[np.ndarray], texts: Sequence[str], numbers: Tensor, limit: float, value_name: str, alike: bool
) -> "go.Scatter":
    """Invisible points with the hover texts in the middle of the edges, and the colour bar."""
    middle = [curve[:, STOPS // 2] for curve in curves]
    marker: dict[str, Any] = {"size": 9, "opacity": 0, "color": numbers.tolist(), "cmin": -limit, "cmax": limit}
    bar = {"title": {"text": html.escape(value_name, quote=False)}, "thickness": 10, "outlinewidth": 0, "nticks": 4}
    marker |= {
        "colorscale": [list(stop) for stop in DIVERGING],
        "showscale": not alike and bool(curves),
        "colorbar": bar,
    }
    value = "" if alike else "<br><b>%{marker.color:.4g}</b>"
    return go.Scatter(
        x=[float(point[0]) for point in middle],
        y=[float(point[1]) for point in middle],
        mode="markers",
        marker=marker,
        text=[html.escape(text, quote=False) for text in texts],
        hovertemplate=f"%{{text}}{value}<extra></extra>",
        showlegend=False,
    )


def _nodes(at: Mapping[str, tuple[float, float]]) -> "go.Scatter":
    return go.Scatter(
        x=[x for x, _ in at.values()],
        y=[y for _, y in at.values()],
        mode="markers+text",
        text=[html.escape(name, quote=False) for name in at],
        textfont={"size": 11, "color": INK},
        marker={"symbol": "square", "size": 30, "color": "#ffffff", "line": {"color": FAINT, "width": 1}},
        hoverinfo="skip",
        cliponaxis=False,
        showlegend=False,
    )


def _look(figure: "go.Figure", title: str, height: int, margin: dict[str, int]) -> None:
    figure.update_layout(
        title={"text": html.escape(title, quote=False), "x": 0, "xref": "paper", "font": {"size": 15, "color": INK}},
        font={"family": FONT, "size": 12, "color": INK},
        height=height,
        margin=margin,
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        hoverlabel={"font": {"family": FONT}},
    )


def _style(figure: "go.Figure", title: str, n_levels: int) -> None:
    top = 56 if title else 16
    _look(figure, title, max(160, LEVEL * n_levels) + top, {"l": 40, "r": 20, "t": top, "b": 20})
    figure.update_xaxes(visible=False, range=[-0.58, 0.58])
    figure.update_yaxes(visible=False, range=[-0.6, n_levels - 0.4])
    figure.update_layout(shapes=[_band(level) for level in range(0, n_levels, 2)])


def _band(level: int) -> dict[str, Any]:
    """A faint stripe behind every other level."""
    ends = {"x0": 0, "x1": 1, "y0": level - 0.5, "y1": level + 0.5}
    return {
        "type": "rect",
        "xref": "paper",
        **ends,
        "fillcolor": GRID,
        "opacity": 0.35,
        "line_width": 0,
        "layer": "below",
    }


def curves(
    x: Float[Tensor, " point"],
    lines: Mapping[str, Tensor],
    intervals: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    show_values: bool = False,
) -> "go.Figure":
    """Curves over the same points, with optional confidence intervals.

    Args:
        x: the coordinates of the points, ascending.
        lines: the values of each curve [point], by its name.
        intervals: the lower and upper bounds at each point, by the name of a curve.

    Raises ValueError for a curve with a different number of points.

    >>> import torch
    >>> figure = curves(torch.tensor([0.0, 10.0]), {"faithfulness": torch.tensor([0.0, 1.0])})
    >>> [trace.name for trace in figure.data]
    ['faithfulness']
    """
    if odd := [name for name, line in lines.items() if len(line) != len(x)]:
        raise ValueError(f"the line {odd[0]!r} has {len(lines[odd[0]])} points, and there are {len(x)}")
    figure = go.Figure()
    for colour, (name, line) in zip(LINES * len(lines), lines.items(), strict=False):
        if intervals and name in intervals:
            low, high = intervals[name]
            figure.add_trace(_ribbon(x, low, high, colour))
        figure.add_trace(
            go.Scatter(
                x=x.tolist(),
                y=line.tolist(),
                name=html.escape(name, quote=False),
                mode="lines+markers+text" if show_values else "lines+markers",
                text=[f"{value:.2f}" for value in line.tolist()] if show_values else None,
                textposition="top center",
                line={"color": colour, "width": 2},
                hovertemplate=f"{html.escape(name, quote=False)}<br>%{{x}}<br><b>%{{y:.3f}}</b><extra></extra>",
            )
        )
    top = 56 if title else 16
    _look(figure, title, height=320 + top, margin={"l": 60, "r": 20, "t": top, "b": 50})
    axis = {"gridcolor": GRID, "zerolinecolor": FAINT, "tickfont": {"size": 11}}
    figure.update_xaxes(axis, title={"text": html.escape(x_title, quote=False), "font": {"size": 12, "color": FAINT}})
    figure.update_yaxes(axis, title={"text": html.escape(y_title, quote=False), "font": {"size": 12, "color": FAINT}})
    return figure


def _ribbon(x: Tensor, low: Tensor, high: Tensor, colour: str) -> "go.Scatter":
    """The area of a confidence interval."""
    there, back = x.tolist(), x.flip(0).tolist()
    return go.Scatter(
        x=there + back,
        y=high.tolist() + low.flip(0).tolist(),
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
    )
