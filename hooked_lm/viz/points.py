"""Figures of named points on two axes, such as what methods find and what they cost."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hooked_lm.extras import lazy_import
from hooked_lm.viz.figure import FROM_TO, Interval, Values, and_missing, as_numbers, ends_of, room_above, style
from hooked_lm.viz.theme import FAINT, GRID, INK, PAPER, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")


def points(
    x: Values,  # [point]
    y: Values,  # [point]
    labels: Sequence[str],
    interval: Interval | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    subtitle: str = "",
    logarithmic: bool = False,
) -> "go.Figure":
    """Named points on two axes, with optional confidence intervals of the vertical one. Points without a value are left out, and
    counted below the title.

    Args:
        x, y: the coordinates of the points.
        labels: the name of each point, written above it.
        interval: the lower and upper bounds of `y`.
        subtitle: a line below the title.
        logarithmic: whether the horizontal axis is logarithmic; then all of `x` must be positive.

    Raises ValueError for another number of coordinates or labels, and for points that a logarithmic axis lacks.

    >>> figure = points([3, 200], [0.02, 0.01], ["estimated", "exact"], logarithmic=True)
    >>> figure.data[0].text, figure.layout.xaxis.type
    (('estimated', 'exact'), 'log')
    """
    across, up = as_numbers(x), as_numbers(y)
    if across.ndim != 1 or across.shape != up.shape or len(labels) != len(up):
        raise ValueError(
            f"each point has two coordinates and a label, got x {list(across.shape)}, y {list(up.shape)} and {len(labels)} labels"
        )
    if logarithmic and not bool((across > 0).all()):
        raise ValueError(f"a logarithmic axis has positive numbers alone, and a point is at {float(across.min()):g}")
    ends = ends_of(up, interval)
    whiskers: dict[str, Any] | None = None
    if ends is not None:
        below, above = up.numpy() - ends[:, 0], ends[:, 1] - up.numpy()
        whiskers = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        whiskers |= {"color": INK, "thickness": 1.2, "width": 5}
    figure = go.Figure(
        go.Scatter(
            x=across.tolist(),
            y=up.tolist(),
            error_y=whiskers,
            customdata=ends,
            text=[html.escape(label, quote=False) for label in labels],
            mode="markers+text",
            textposition="top center",
            textfont={"size": 12, "color": INK},
            marker={"color": UP, "size": 9},
            cliponaxis=False,
            hovertemplate="%{text}<br>%{x:,.4g}<br><b>%{y:.4g}</b>"
            + (FROM_TO if ends is not None else "")
            + "<extra></extra>",
            showlegend=False,
        )
    )
    said = and_missing(subtitle, up)
    top = room_above(title, said)
    style(figure, title, height=320 + top, margin={"t": top, "b": 50}, subtitle=said)
    axis = {"gridcolor": GRID, "zerolinecolor": FAINT, "tickfont": {"size": 11}}
    names = [
        {"text": html.escape(name, quote=False), "font": {"size": 12, "color": FAINT}} for name in (x_title, y_title)
    ]
    figure.update_layout(plot_bgcolor=PAPER)
    figure.update_xaxes(axis, title=names[0], **({"type": "log", "dtick": 1} if logarithmic else {}))
    figure.update_yaxes(axis, title=names[1])
    return figure
