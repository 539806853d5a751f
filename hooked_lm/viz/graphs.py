"""Figures of layered graphs."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz.figure import style
from hooked_lm.viz.theme import BOX as GROUND
from hooked_lm.viz.theme import BOX_INK, DOWN, FAINT, INK, PAPER, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

THIN, THICK, STEPS = 0.8, 7.0, 12  # pixels of the weakest and strongest edge, and how many widths lie between
STOPS = 24  # points of a curve
PALE = 0.35  # opacity of the weakest edge
LEVEL, ROW = 64, 30  # pixels from a level to the next, and from a row of nodes of one level to the next
BESIDE = 6  # nodes of a level that are side by side; more of them are in several rows
LETTER, PADDING, BOX = 7.2, 14, 22  # pixels: the width of a letter, the space beside a label, the height of its box
HEAD = 8  # pixels of an arrow head
MEANINGS = ("positive", "negative")


def layered_graph(
    levels: Mapping[str, float],
    edges: Sequence[tuple[str, str, str]],
    scores: Float[Tensor, " edge"] | None = None,
    title: str = "",
    value_name: str = "score",
    subtitle: str = "",
    meanings: tuple[str, str] = MEANINGS,
) -> "go.Figure":
    """A graph with nodes on levels, the lowest at the bottom; arrow heads show where edges end.

    The width of an edge grows with the square root of its score, the colour shows its sign: blue is positive, orange negative,
    and both are named in the legend.

    Args:
        levels: the level of each node; nodes of one level are side by side, in the given order.
        edges: the source, the target and the hover text of each edge.
        scores: one for each edge; all edges look the same if None.
        value_name: what the scores are, in the legend.
        meanings: what a positive and a negative score mean, in the legend.

    Raises ValueError for an edge to or from a node without a level, for a wrong number of scores, and for scores that are
    NaN or infinite.

    >>> import torch
    >>> figure = layered_graph({"in": 0, "h0": 1, "out": 2}, [("in", "h0", "a"), ("h0", "out", "b")], torch.tensor([1.0, -2.0]))
    >>> figure.data[-1].text
    ('in', 'h0', 'out')
    """
    if scores is not None and len(scores) != len(edges):
        raise ValueError(f"{len(scores)} scores for {len(edges)} edges")
    if missing := [end for edge in edges for end in edge[:2] if end not in levels]:
        raise ValueError(f"an edge ends at {missing[0]!r}, which has no level")
    if scores is not None and not bool(scores.isfinite().all()):
        raise ValueError(
            f"{int((~scores.isfinite()).sum())} of {len(edges)} scores are NaN or infinite: leave these edges out"
        )
    at, height = _placed(levels)
    numbers = torch.ones(len(edges)) if scores is None else scores.detach().float().cpu()
    limit = float(numbers.abs().max()) if len(edges) and float(numbers.abs().max()) > 0 else 1.0
    curves = [_curve(at[start], at[stop]) for start, stop, _ in edges]
    sizes = numbers.sign() * (numbers / limit).abs().sqrt()  # so that one strong edge leaves others apart
    figure = go.Figure(_lines(curves, sizes.tolist(), scores is None))
    if scores is not None:
        figure.add_traces(_legend(numbers, limit, value_name, meanings))
    values = [""] * len(edges) if scores is None else [f"{value:.4g}" for value in numbers.tolist()]
    figure.add_trace(_heads([(at[start], at[stop]) for start, stop, _ in edges]))
    figure.add_trace(_points(curves, [text for _, _, text in edges], values))
    figure.add_trace(_nodes(at))
    _style(figure, title, subtitle, height)
    figure.update_layout(shapes=[_box(name, place) for name, place in at.items()])
    return figure


def _placed(levels: Mapping[str, float]) -> tuple[dict[str, tuple[float, float]], float]:
    """The coordinates of each node, y in pixels, and the height of all: levels in ascending order, the nodes of a level spread
    around the middle, in several rows if there are many."""
    at, base = {}, 0.0
    for level in sorted(set(levels.values())):
        names = [name for name in levels if levels[name] == level]
        n_rows = -(-len(names) // BESIDE)
        for i, name in enumerate(names):
            at[name] = (i + 0.5) / len(names) - 0.5, base + ROW * (i % n_rows)
        base += LEVEL + ROW * (n_rows - 1)
    return at, base - LEVEL if levels else 0.0


def _curve(start: tuple[float, float], stop: tuple[float, float]) -> Float[np.ndarray, "2 stop"]:
    """A curve from the top of one box to the arrow head below another, or down in the same way; vertical at both ends. One that
    passes levels in between bends to the side."""
    t = np.linspace(0, 1, STOPS)
    smooth = t * t * (3 - 2 * t)
    beside = BOX / 2 if stop[1] >= start[1] else -BOX / 2
    first, last = start[1] + beside, stop[1] - beside * (1 + HEAD / BOX)
    passed = max(0.0, (stop[1] - start[1]) / LEVEL - 1)
    side = 1.0 if start[0] + stop[0] >= 0 else -1.0
    aside = side * 0.035 * min(passed, 6) * np.sin(np.pi * t)
    points: np.ndarray = np.stack([start[0] + (stop[0] - start[0]) * smooth + aside, first + (last - first) * t])
    return points


def _heads(edges: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> "go.Scatter":
    """An arrow head below each box where edges end, above it for those from above."""
    places = sorted({(*stop, 1 if stop[1] >= start[1] else -1) for start, stop in edges})
    symbols = ["triangle-up" if up > 0 else "triangle-down" for _, _, up in places]
    return go.Scatter(
        x=[x for x, _, _ in places],
        y=[y - up * (BOX + HEAD) / 2 for _, y, up in places],
        mode="markers",
        marker={"symbol": symbols, "size": HEAD + 2, "color": INK, "opacity": 1},
        hoverinfo="skip",
        cliponaxis=False,
        showlegend=False,
    )


def _lines(curves: Sequence[np.ndarray], sizes: Sequence[float], alike: bool) -> "list[go.Scatter]":
    """A trace for all edges of about one size, the weakest first, so that the strongest are drawn on top."""
    steps = [0 if size == 0 else int(np.sign(size)) * max(1, round(abs(size) * STEPS)) for size in sizes]
    traces = []
    for step in sorted(set(steps), key=abs):
        some = [curve for curve, own in zip(curves, steps, strict=True) if own == step]
        xs, ys = (np.concatenate([np.append(curve[axis], np.nan) for curve in some]) for axis in (0, 1))
        share = abs(step) / STEPS
        line, opacity = {"color": FAINT, "width": 1.5}, 1.0
        if not alike:
            line = {"color": UP if step > 0 else DOWN, "width": THIN + share * (THICK - THIN)}
            opacity = PALE + share * (1 - PALE)
        traces.append(
            go.Scatter(x=xs, y=ys, mode="lines", line=line, opacity=opacity, hoverinfo="skip", showlegend=False)
        )
    return traces


def _legend(numbers: Tensor, limit: float, value_name: str, meanings: tuple[str, str]) -> "list[go.Scatter]":
    """Entries of the legend for the colours that occur, and for the width."""
    found = [
        (colour, 4.0, meaning)
        for colour, meaning, there in (
            (UP, meanings[0], bool((numbers > 0).any())),
            (DOWN, meanings[1], bool((numbers < 0).any())),
        )
        if there
    ]
    found.append((FAINT, THICK, f"width: square root of {value_name}, up to {limit:.3g}"))
    return [
        go.Scatter(
            x=[None],
            y=[None],
            mode="lines",
            line={"color": colour, "width": width},
            name=html.escape(name, quote=False),
            hoverinfo="skip",
        )
        for colour, width, name in found
    ]


def _points(curves: Sequence[np.ndarray], texts: Sequence[str], values: Sequence[str]) -> "go.Scatter":
    """Invisible points with the hover texts in the middle of the edges."""
    middle = [curve[:, STOPS // 2] for curve in curves]
    return go.Scatter(
        x=[float(point[0]) for point in middle],
        y=[float(point[1]) for point in middle],
        mode="markers",
        marker={"size": 11, "opacity": 0},
        text=[html.escape(text, quote=False) for text in texts],
        customdata=list(values),
        hovertemplate="%{text}<br><b>%{customdata}</b><extra></extra>",
        showlegend=False,
    )


def _nodes(at: Mapping[str, tuple[float, float]]) -> "go.Scatter":
    """Invisible points at the nodes, with their names."""
    return go.Scatter(
        x=[x for x, _ in at.values()],
        y=[y for _, y in at.values()],
        mode="markers",
        marker={"size": BOX, "opacity": 0, "color": FAINT},  # the colour of the box on hover
        text=[html.escape(name, quote=False) for name in at],
        hovertemplate="<b>%{text}</b><extra></extra>",
        cliponaxis=False,
        showlegend=False,
    )


def _box(name: str, place: tuple[float, float]) -> dict[str, Any]:
    """A box as wide as its label, above the edges; its own light colour suits light and dark pages."""
    half = (LETTER * len(name) + PADDING) / 2
    return {
        "type": "rect",
        "xsizemode": "pixel",
        "ysizemode": "pixel",
        "xanchor": place[0],
        "yanchor": place[1],
        "x0": -half,
        "x1": half,
        "y0": -BOX / 2,
        "y1": BOX / 2,
        "fillcolor": GROUND,
        "line": {"color": FAINT, "width": 1},
        "label": {"text": html.escape(name, quote=False), "font": {"size": 11, "color": BOX_INK}},
        "layer": "above",
    }


def _style(figure: "go.Figure", title: str, subtitle: str, height: float) -> None:
    top, bottom = 16 + 32 * bool(title) + 22 * bool(subtitle), 64
    margin = {"l": 8, "r": 8, "t": top, "b": bottom}
    style(figure, title, int(height) + 2 * BOX + top + bottom, margin, subtitle)
    figure.update_layout(plot_bgcolor=PAPER)
    if subtitle:
        figure.update_layout(title={"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}})
    figure.update_xaxes(visible=False, range=[-0.56, 0.56], fixedrange=True)
    figure.update_yaxes(visible=False, range=[-BOX, height + BOX], fixedrange=True)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"})
