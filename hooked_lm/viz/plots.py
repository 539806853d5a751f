"""Figures of tensors with labelled rows and columns."""

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.theme import DIVERGING, DOWN, FAINT, FONT, GRID, INK, MISSING, PAPER, SEQUENTIAL, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = later("plotly.graph_objects", "viz")
    subplots = later("plotly.subplots", "viz")

MINUS = "\N{MINUS SIGN}"
VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"})
Interval = tuple[Tensor, Tensor]  # lower and upper bounds, each of the shape of the values
POSITION = re.compile(r"(\d+) (.*)", re.DOTALL)  # "10  Mary": a position and its token
GAPS = {"xgap": 1, "ygap": 1}  # pixels between cells
WIDEST, HIGHEST = 48, 48  # labels that are written along an axis, at most
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
    upwards: bool = False,
    centre: float = 0.0,
    marks: Mapping[str, float] | None = None,
    subtitle: str = "",
    note: str = "",
) -> "go.Figure":
    """A heat map of a matrix; colours diverge from white at zero, row 0 is at the top.

    NaN is grey, "no value" on hover, and counted below the title. Of many labels every second, third, ... is written; hover shows
    all.

    Args:
        x_labels, y_labels: one for each column and row, e.g. tokens; may contain duplicates. Indices if None.
        value_name: the title of the colour bar.
        show_values: write each number into its cell, with two decimals and unless it rounds to zero.
        limit: the distance from the centre to the ends of the colour scale; the largest one if None.
        interval: the lower and upper bounds of each cell, shown on hover.
        upwards: row 0 is at the bottom, as for layers.
        centre: the value that is white, such as that of an unchanged run.
        marks: values that are named on the colour bar.
        subtitle: a line below the title.
        note: the last line on hover, such as the number of prompts.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = heatmap(torch.tensor([[0.0, 0.5], [-1.0, 0.0]]), x_labels=[" a", " a"], title="Effect")
    >>> figure.data[0].zmin, figure.data[0].zmax, figure.layout.xaxis.ticktext
    (-1.0, 1.0, ('·a', '·a'))
    """
    n_rows, n_columns = values.shape
    matrix = values.detach().float().cpu()
    limit = limit or reach(matrix, centre)
    x_axis, y_axis = (
        labelled_axis(x_labels, n_columns, "columns", x_title),
        labelled_axis(y_labels, n_rows, "rows", y_title),
    )
    names, where = cell_names(x_axis, y_axis)
    trace = go.Heatmap(
        z=matrix.numpy(),
        zmin=centre - limit,
        zmax=centre + limit,
        colorscale=DIVERGING,
        text=[[_number(value) for value in row] for row in matrix.tolist()] if show_values else None,
        texttemplate="%{text}" if show_values else None,
        textfont={"size": 11},
        colorbar=colour_bar(value_name) | bar_ticks(centre, limit, marks),
        customdata=_ends(matrix, interval),
        hovertext=names,
        hovertemplate=f"{where}<br><b>%{{z:.3f}}</b>{FROM_TO if interval else ''}{_line(note)}<extra></extra>",
        **GAPS,
    )
    figure = go.Figure([trace, *missing(matrix, names, where)])
    figure.update_traces(xgap=int(n_columns <= 128), ygap=int(n_rows <= 64))
    turn_long_labels(x_axis)
    top, bottom = room_above(title, below := and_missing(subtitle, matrix)), room_below(x_axis)
    style(figure, title, max(140, row_height(n_rows) * n_rows) + top + bottom, {"t": top, "b": bottom}, below)
    figure.update_layout(meta={"min_width": min(900, 170 + (36 if show_values else 18) * n_columns)})
    figure.update_xaxes(thinned(x_axis, WIDEST))
    figure.update_yaxes(thinned(y_axis, HIGHEST), autorange=True if upwards else "reversed")
    return figure


def bars(
    values: Float[Tensor, " bar"],
    labels: Sequence[Any] | None = None,
    interval: Interval | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    baselines: Mapping[str, float] | None = None,
    subtitle: str = "",
    note: str = "",
) -> "go.Figure":
    """A bar chart, with optional confidence intervals. Bars without a value are left out, and counted below the title.

    Args:
        labels: one for each bar; may contain duplicates. Indices if None.
        interval: the lower and upper bounds of each bar.
        baselines: values with a name, drawn as lines; bars start from the first one instead of zero.
        subtitle: a line below the title.
        note: the last line on hover, such as the number of prompts.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = bars(torch.tensor([0.5, -0.25]), ["L1H7", "L2H1"], (torch.tensor([0.25, -0.5]), torch.tensor([1.0, 0.0])))
    >>> figure.data[0].error_y.array, figure.data[0].error_y.arrayminus
    (array([0.5 , 0.25], dtype=float32), array([0.25, 0.25], dtype=float32))
    """
    numbers = values.detach().float().cpu()
    ends, start = _ends(numbers, interval), next(iter((baselines or {}).values()), 0.0)
    x_axis = turn_long_labels(labelled_axis(labels, len(numbers), "bars", x_title))
    trace = go.Bar(
        x=list(range(len(numbers))),
        y=(numbers - start).numpy(),
        base=start or None,
        marker={"color": [DOWN if number < start else UP for number in numbers.tolist()]},
        customdata=ends,
        text=[f"{number:.3f}".replace("-", MINUS) for number in numbers.tolist()],
        textposition="none",
        hovertext=x_axis["ticktext"],
        hovertemplate=f"%{{hovertext}}<br><b>%{{text}}</b>{FROM_TO if interval else ''}{_line(note)}<extra></extra>",
        width=0.6,
    )
    if ends is not None:
        low, high = ends[..., 0], ends[..., 1]
        below, above = numbers.numpy() - low, high - numbers.numpy()
        line = {"color": INK, "thickness": 1.2, "width": 5}
        trace.error_y = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **line}
    top, bottom = room_above(title, said := and_missing(subtitle, numbers)), room_below(x_axis)
    figure = go.Figure(trace)
    style(figure, title, height=200 + top + bottom, margin={"t": top, "b": bottom}, subtitle=said)
    y_axis_title = {"text": html.escape(y_title, quote=False), "font": {"size": 12, "color": FAINT}}
    figure.update_layout(plot_bgcolor=PAPER, meta={"min_width": 100 + 12 * min(len(numbers), WIDEST)})
    figure.update_xaxes(thinned(x_axis, WIDEST))
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=FAINT, tickfont={"size": 11}, title=y_axis_title)
    mark_levels(figure, baselines)
    return figure


def mark_levels(figure: "go.Figure", levels: Mapping[str, float] | None) -> None:
    """Adds a dashed line for each named value of the vertical axis."""
    for name, level in (levels or {}).items():
        text = {"text": html.escape(f"{name} {_short(level)}", quote=False), "font": {"size": 11, "color": FAINT}}
        figure.add_hline(level, line={"color": FAINT, "width": 1, "dash": "dash"}, annotation=text)


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
    axis = labelled_axis(tokens, n_pos, "positions", "")
    x_axis = turn_long_labels(dict(axis))
    panel, top, bottom = max(120, 22 * n_pos), 72 if title else 36, room_below(x_axis)
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


def reach(values: Tensor, centre: float = 0.0) -> float:
    """The largest distance of a finite value from the centre; 1 if there is none."""
    distances = (values - centre)[values.isfinite()].abs()
    return float(distances.max()) if len(distances) and float(distances.max()) > 0 else 1.0


def missing(matrix: Float[Tensor, "row column"], names: list[list[str]] | None, where: str) -> "list[go.Heatmap]":
    """A trace of grey cells where a matrix has no value; none if it has all."""
    holes = matrix.isnan()
    if not bool(holes.any()):
        return []
    grey = torch.where(holes, 1.0, torch.nan).numpy()
    scale = {"colorscale": [(0.0, MISSING), (1.0, MISSING)], "showscale": False, "zmin": 0, "zmax": 1}
    return [go.Heatmap(z=grey, hovertext=names, hovertemplate=f"{where}<br>no value<extra></extra>", **scale, **GAPS)]


def and_missing(subtitle: str, values: Tensor) -> str:
    """A subtitle, and how many values there are not."""
    n = int(values.isnan().sum())
    said = [f"{n} of {values.numel()} without a value"] if n else []
    return "; ".join([*([subtitle] if subtitle else []), *said])


def cell_names(x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> tuple[list[list[str]] | None, str]:
    """The labels of every cell for the hover text, if ticks are left out and do not tell; and how the text refers to them."""
    x, y = x_axis["ticktext"], y_axis["ticktext"]
    if len(x) <= WIDEST and len(y) <= HIGHEST:
        return None, "%{y}<br>%{x}"
    return [[f"{row}<br>{column}" for column in x] for row in y], "%{hovertext}"


def thinned(axis: dict[str, Any], most: int) -> dict[str, Any]:
    """The axis with every second, third, ... of its labels, so that at most so many are written."""
    every = -(-len(axis["tickvals"]) // most)
    return {**axis, **{name: axis[name][::every] for name in ("tickvals", "ticktext")}} if every > 1 else axis


def row_height(n_rows: int) -> int:
    """Pixels of a row of a heat map: less for many."""
    return max(8, min(34, 760 // max(1, n_rows)))


def bar_ticks(centre: float, limit: float, marks: Mapping[str, float] | None) -> dict[str, Any]:
    """The ticks of a colour bar with named values; nothing without them."""
    if not marks:
        return {}
    named = {
        value: f"{_short(value)} {html.escape(name, quote=False)}" for name, value in reversed(list(marks.items()))
    }
    apart = [end for end in (centre - limit, centre, centre + limit) if all(abs(end - at) > limit / 8 for at in named)]
    ticks = {at: text for at, text in named.items() if abs(at - centre) <= 1.01 * limit} | {
        end: _short(end) for end in apart
    }
    return {"tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _short(value: float) -> str:
    shown = f"{value:.3g}"
    return "0" if shown in ("-0", "0") else shown.replace("-", MINUS)


def _line(text: str) -> str:
    return f"<br>{html.escape(text, quote=False)}" if text else ""


def position_labels(labels: Sequence[Any]) -> list[str]:
    """Labels of positions, such as "10  Mary", as tokens; equal tokens keep their positions. Other labels are unchanged.

    >>> position_labels(["0 When", "1  Mary", "2  and", "3  Mary"])
    ['When', ' Mary (1)', ' and', ' Mary (3)']
    >>> position_labels(["3 apples", "2 pears"])
    ['3 apples', '2 pears']
    """
    found = [POSITION.fullmatch(str(label)) for label in labels]
    parts = [(int(match[1]), match[2]) for match in found if match]
    if len(parts) < len(labels) or any(one[0] >= other[0] for one, other in pairwise(parts)):
        return [str(label) for label in labels]
    tokens = Counter(token for _, token in parts)
    return [f"{token} ({place})" if tokens[token] > 1 else token for place, token in parts]


def labelled_axis(labels: Sequence[Any] | None, length: int, what: str, title: str) -> dict[str, Any]:
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


def room_above(title: str, subtitle: str) -> int:
    return (56 if title else 24 if subtitle else 12) + (18 if subtitle else 0)


def turn_long_labels(axis: dict[str, Any]) -> dict[str, Any]:
    axis["tickangle"] = -45 if _longest(axis) > 3 else 0
    return axis


def room_below(axis: dict[str, Any]) -> int:
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


def style(figure: "go.Figure", title: str, height: int, margin: dict[str, int], subtitle: str = "") -> None:
    """Gives a figure its title, fonts and size."""
    below = {"text": html.escape(subtitle, quote=False), "font": {"size": 12, "color": FAINT}}
    figure.update_layout(
        title={
            "text": html.escape(title, quote=False),
            "subtitle": below if subtitle else None,
            "x": 0,
            "xref": "paper",
            "font": {"size": 15, "color": INK},
        },
        font={"family": FONT, "size": 12, "color": INK},
        height=height,
        margin={"l": 60, "r": 20, **margin},
        paper_bgcolor=PAPER,
        plot_bgcolor=GRID,
        hoverlabel={"font": {"family": FONT}},
    )
