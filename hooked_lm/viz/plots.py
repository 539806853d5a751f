"""Figures of tensors with labelled rows and columns."""

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.theme import DIVERGING, DOWN, FAINT, FONT, GRID, INK, PAPER, SEQUENTIAL, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = later("plotly.graph_objects", "viz")
    subplots = later("plotly.subplots", "viz")

MINUS = "\N{MINUS SIGN}"
VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"})
Interval = tuple[Tensor, Tensor]  # lower and upper bounds, each of the shape of the values
SPACES = re.compile("^ +| +$| {2,}")
FROM_TO = "<br>%{customdata[0]:.3f} to %{customdata[1]:.3f}"


def visible(token: str, longest: int = 16) -> str:
    """A token with visible outer spaces and line breaks; long tokens are shortened.

    >>> visible(" Mary"), visible("a\\n"), visible("layer 0"), visible("")
    ('·Mary', 'a↵', 'layer 0', '∅')
    """
    shown = SPACES.sub(lambda run: "·" * len(run[0]), token).translate(VISIBLE) or "∅"
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def token_label(token: str, longest: int = 16) -> str:
    """A visible token for figures and pages, with markup escaped.

    >>> token_label(" <b>")
    '·&lt;b&gt;'
    """
    return html.escape(visible(token, longest), quote=False)


def heatmap(
    values: Float[Tensor, "row column"],
    x_labels: Sequence[Any] | None = None,
    y_labels: Sequence[Any] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    value_name: str = "",
    show_values: bool = False,
    limit: float | None = None,
    interval: Interval | None = None,
) -> "go.Figure":
    """A heat map of a matrix; colours diverge from white at zero, row 0 is at the top, NaN is empty.

    Args:
        x_labels, y_labels: one for each column and row, e.g. tokens; may contain duplicates. Indices if None.
        value_name: the title of the colour bar.
        show_values: write each number into its cell, with two decimals and unless it rounds to zero.
        limit: the absolute value at the end of the colour scale; the largest one if None.
        interval: the lower and upper bounds of each cell, shown on hover.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = heatmap(torch.tensor([[0.0, 0.5], [-1.0, 0.0]]), x_labels=[" a", " a"], title="Effect")
    >>> figure.data[0].zmin, figure.data[0].zmax, figure.layout.xaxis.ticktext
    (-1.0, 1.0, ('·a', '·a'))
    """
    n_rows, n_columns = values.shape
    matrix = values.detach().float().cpu()
    if limit is None:
        limit = matrix.abs().nan_to_num().max().item() if matrix.numel() else 0.0
    trace = go.Heatmap(
        z=matrix.numpy(),
        zmin=-(limit or 1.0),
        zmax=limit or 1.0,
        colorscale=DIVERGING,
        text=[[_number(value) for value in row] for row in matrix.tolist()] if show_values else None,
        texttemplate="%{text}" if show_values else None,
        textfont={"size": 11},
        colorbar=colour_bar(value_name),
        customdata=_ends(matrix, interval),
        hovertemplate=f"%{{y}}<br>%{{x}}<br><b>%{{z:.3f}}</b>{FROM_TO if interval else ''}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    figure = go.Figure(trace)
    x_axis, y_axis = _axis(x_labels, n_columns, "columns", x_title), _axis(y_labels, n_rows, "rows", y_title)
    _turn_long_labels(x_axis)
    top, bottom = 56 if title else 12, _room_below(x_axis)
    style(figure, title, height=max(140, 34 * n_rows) + top + bottom, margin={"t": top, "b": bottom})
    figure.update_xaxes(x_axis)
    figure.update_yaxes(y_axis, autorange="reversed")
    return figure


def bars(
    values: Float[Tensor, " bar"],
    labels: Sequence[Any] | None = None,
    interval: Interval | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
) -> "go.Figure":
    """A bar chart, with optional confidence intervals.

    Args:
        labels: one for each bar; may contain duplicates. Indices if None.
        interval: the lower and upper bounds of each bar.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = bars(torch.tensor([0.5, -0.25]), ["L1H7", "L2H1"], (torch.tensor([0.25, -0.5]), torch.tensor([1.0, 0.0])))
    >>> figure.data[0].error_y.array, figure.data[0].error_y.arrayminus
    (array([0.5 , 0.25], dtype=float32), array([0.25, 0.25], dtype=float32))
    """
    numbers = values.detach().float().cpu()
    ends = _ends(numbers, interval)
    trace = go.Bar(
        x=list(range(len(numbers))),
        y=numbers.numpy(),
        marker={"color": [DOWN if number < 0 else UP for number in numbers.tolist()]},
        customdata=ends,
        hovertemplate=f"%{{x}}<br><b>%{{y:.3f}}</b>{FROM_TO if interval else ''}<extra></extra>",
        width=0.6,
    )
    if ends is not None:
        low, high = ends[..., 0], ends[..., 1]
        below, above = numbers.numpy() - low, high - numbers.numpy()
        line = {"color": INK, "thickness": 1.2, "width": 5}
        trace.error_y = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **line}
    x_axis = _turn_long_labels(_axis(labels, len(numbers), "bars", x_title))
    top, bottom = 56 if title else 12, _room_below(x_axis)
    figure = go.Figure(trace)
    style(figure, title, height=200 + top + bottom, margin={"t": top, "b": bottom})
    y_axis_title = {"text": html.escape(y_title, quote=False), "font": {"size": 12, "color": FAINT}}
    figure.update_layout(plot_bgcolor=PAPER)
    figure.update_xaxes(x_axis)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=FAINT, tickfont={"size": 11}, title=y_axis_title)
    return figure


def attention_patterns(
    pattern: Float[Tensor, "head query_pos key_pos"],
    tokens: Sequence[str],
    head_labels: Sequence[str] | None = None,
    title: str = "",
    columns: int = 2,
) -> "go.Figure":
    """Attention patterns, one panel for each head; rows are query tokens, columns key tokens.

    Args:
        tokens: one for each position.
        head_labels: a title for each panel; "head 0", "head 1", ... if None.
        columns: the number of panels in a row.

    Raises ValueError for the wrong number of tokens or labels.

    >>> import torch
    >>> figure = attention_patterns(torch.eye(3).expand(2, 3, 3), ["When", " Mary", " and"], ["L1H4", "L2H0"])
    >>> len(figure.data), figure.layout.annotations[1].text
    (2, 'L2H0')
    """
    n_heads, n_pos, _ = pattern.shape
    labels = [f"head {head}" for head in range(n_heads)] if head_labels is None else list(head_labels)
    if len(labels) != n_heads:
        raise ValueError(f"{len(labels)} head labels for {n_heads} heads")
    columns = max(1, min(columns, n_heads))
    rows = max(1, -(-n_heads // columns))
    axis = _axis(tokens, n_pos, "positions", "")
    x_axis = _turn_long_labels(dict(axis))
    panel, top, bottom = max(120, 22 * n_pos), 72 if title else 36, _room_below(x_axis)
    height = rows * panel + (rows - 1) * 50 + top + bottom
    figure = subplots.make_subplots(
        rows,
        columns,
        subplot_titles=[html.escape(label, quote=False) for label in labels],
        horizontal_spacing=0.03,
        vertical_spacing=50 / (height - top - bottom) if rows > 1 else 0,
    )
    weights = pattern.detach().float().cpu().numpy()
    for head in range(n_heads):
        row, column = divmod(head, columns)
        cell = {"row": row + 1, "col": column + 1}
        hover = "from %{y}<br>to %{x}<br><b>%{z:.3f}</b><extra></extra>"
        figure.add_trace(
            go.Heatmap(z=weights[head], coloraxis="coloraxis", hovertemplate=hover, xgap=1, ygap=1), **cell
        )
        figure.update_xaxes(x_axis, showticklabels=head + columns >= n_heads, **cell)
        figure.update_yaxes(axis, showticklabels=column == 0, autorange="reversed", **cell)
    bar = {**colour_bar("weight"), "len": min(1.0, 300 / height), "y": 1, "yanchor": "top"}
    style(figure, title, height=height, margin={"t": top, "b": bottom})
    figure.update_annotations(font={"size": 13, "color": INK})
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar})
    return figure


def _ends(values: Float[Tensor, "*shape"], interval: Interval | None) -> Float[np.ndarray, "*shape 2"] | None:
    """Both ends of the interval of each value, for hover texts; raises ValueError for those of other values."""
    if interval is None:
        return None
    for end in interval:
        if end.shape != values.shape:
            raise ValueError(f"an interval of {list(end.shape)} for values {list(values.shape)}")
    ends: np.ndarray = torch.stack([end.detach().float().cpu() for end in interval], -1).numpy()
    return ends


def _axis(labels: Sequence[Any] | None, length: int, what: str, title: str) -> dict[str, Any]:
    """An axis over integers with labels, so that equal labels stay separate."""
    labels = list(range(length)) if labels is None else labels
    if len(labels) != length:
        raise ValueError(f"{len(labels)} labels for {length} {what}")
    return {
        "tickmode": "array",
        "tickvals": list(range(length)),
        "ticktext": [token_label(str(label)) for label in labels],
        "tickfont": {"size": 11},
        "tickangle": 0,
        "ticklabelstandoff": 4,
        "title": {"text": html.escape(title, quote=False), "font": {"size": 12, "color": FAINT}, "standoff": 10},
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "automargin": True,
    }


def _longest(axis: dict[str, Any]) -> int:
    return max((len(html.unescape(label)) for label in axis["ticktext"]), default=0)


def _turn_long_labels(axis: dict[str, Any]) -> dict[str, Any]:
    axis["tickangle"] = -45 if _longest(axis) > 3 else 0
    return axis


def _room_below(axis: dict[str, Any]) -> int:
    """Pixels that the labels of an axis, and its title, need below the figure."""
    labels = 14 + 5 * _longest(axis) if axis["tickangle"] else 22
    return labels + (32 if axis["title"]["text"] else 4)


def _number(value: float) -> str:
    shown = f"{value:.2f}"
    return "" if shown in ("0.00", "-0.00", "nan") else shown.replace("-", MINUS)


def colour_bar(title: str) -> dict[str, Any]:
    """The colour bar of a figure."""
    return {
        "title": {"text": html.escape(title, quote=False), "side": "top", "font": {"size": 12, "color": FAINT}},
        "thickness": 10,
        "outlinewidth": 0,
        "tickfont": {"size": 11},
        "nticks": 4,
        "x": 1.01,
    }


def style(figure: "go.Figure", title: str, height: int, margin: dict[str, int]) -> None:
    """Gives a figure its title, fonts and size."""
    figure.update_layout(
        title={"text": html.escape(title, quote=False), "x": 0, "xref": "paper", "font": {"size": 15, "color": INK}},
        font={"family": FONT, "size": 12, "color": INK},
        height=height,
        margin={"l": 60, "r": 20, **margin},
        paper_bgcolor=PAPER,
        plot_bgcolor=GRID,
        hoverlabel={"font": {"family": FONT}},
    )
