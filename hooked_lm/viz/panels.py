"""Heat maps side by side: one for each entry of a third axis."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.plots import (
    GAPS,
    HIGHEST,
    WIDEST,
    and_missing,
    bar_ticks,
    cell_names,
    colour_bar,
    labelled_axis,
    missing,
    reach,
    room_above,
    room_below,
    row_height,
    style,
    thinned,
    turn_long_labels,
)
from hooked_lm.viz.theme import DIVERGING, INK

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = later("plotly.graph_objects", "viz")
    subplots = later("plotly.subplots", "viz")

MOST_PANELS = 32
"""The largest number of small multiples in one figure."""
BETWEEN = 44  # pixels from a panel to the one below, for its title
NARROW = 16  # columns of a panel that has others beside it, at most


def heatmap_panels(
    values: Float[Tensor, "panel row column"],
    panels: Sequence[Any],
    x_labels: Sequence[Any] | None = None,
    y_labels: Sequence[Any] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    value_name: str = "",
    upwards: bool = False,
    centre: float | Sequence[float] = 0.0,
    marks: Sequence[Mapping[str, float]] = (),
    subtitle: str = "",
    note: str = "",
) -> "go.Figure":
    """A heat map for each panel, all with the same rows and columns; arguments as those of `heatmap`.

    Args:
        panels: the title of each panel.
        centre: the white value of the colour scale that all panels share; or one for each panel, which then has its own scale.
        marks: values that are named on the colour bars, of all panels or of each.

    Raises ValueError for the wrong number of titles or labels, and for more than 32 panels.

    >>> import torch
    >>> figure = heatmap_panels(torch.randn(2, 3, 4), ["layer 0", "layer 1"])
    >>> len(figure.data), figure.layout.annotations[1].text
    (2, 'layer 1')
    """
    n, n_rows, n_columns = values.shape
    if len(panels) != n:
        raise ValueError(f"{len(panels)} titles for {n} panels")
    if n > MOST_PANELS:
        raise ValueError(f"{n} panels are more than {MOST_PANELS}: select fewer")
    centres = [float(centre)] if isinstance(centre, float | int) else list(centre)
    own = not isinstance(centre, float | int)  # a colour scale for each panel
    across = 1 if own or n_columns > NARROW else min(n, 4 if n_columns <= 8 else 2)
    down = -(-n // across)
    matrix = values.detach().float().cpu()
    x_axis = turn_long_labels(labelled_axis(x_labels, n_columns, "columns", x_title))
    y_axis = labelled_axis(y_labels, n_rows, "rows", y_title)
    below = and_missing(subtitle, matrix)
    top, bottom = room_above(title, below) + 24, room_below(x_axis)
    drawn = down * max(90, min(22, row_height(n_rows)) * n_rows) + (down - 1) * BETWEEN
    titles = [html.escape(str(name), quote=False) for name in panels]
    spacing = {"horizontal_spacing": 0.03, "vertical_spacing": BETWEEN / drawn if down > 1 else 0}
    figure = subplots.make_subplots(down, across, subplot_titles=titles, **spacing)
    names, where = cell_names(x_axis, y_axis)
    after = f"<br>{html.escape(note, quote=False)}" if note else ""
    for i in range(n):
        place, hover = {"row": i // across + 1, "col": i % across + 1}, f"{titles[i]}<br>{where}"
        texts = {"hovertext": names, "hovertemplate": f"{hover}<br><b>%{{z:.3f}}</b>{after}<extra></extra>"}
        figure.add_trace(
            go.Heatmap(z=matrix[i].numpy(), coloraxis=_nth("coloraxis", i * own), **texts, **GAPS), **place
        )
        for hole in missing(matrix[i], names, hover):
            figure.add_trace(hole, **place)
        lowest, first = i + across >= n, i % across == 0
        figure.update_xaxes(thinned(_untitled(x_axis, lowest), WIDEST), showticklabels=lowest, **place)
        figure.update_yaxes(thinned(_untitled(y_axis, first), HIGHEST), showticklabels=first, **place)
    figure.update_yaxes(autorange=True if upwards else "reversed")
    style(figure, title, drawn + top + bottom, {"t": top, "b": bottom}, below)
    figure.update_annotations(font={"size": 13, "color": INK})
    for i, middle in enumerate(centres):
        limit = reach(matrix[i] if own else matrix, middle)
        bar = colour_bar("" if own else value_name) | bar_ticks(middle, limit, marks[i] if marks else None)
        low, high = figure.layout[_nth("yaxis", i)].domain if own else (1 - min(1.0, 320 / drawn), 1.0)
        bar |= {"y": high, "yanchor": "top", "len": high - low}
        scale = {"colorscale": DIVERGING, "cmin": middle - limit, "cmax": middle + limit, "colorbar": bar}
        figure.update_layout({_nth("coloraxis", i): scale})
    figure.update_layout(meta={"min_width": 160 + 14 * across * min(n_columns, WIDEST)})
    return figure


def _nth(name: str, i: int) -> str:
    """The name of an axis in plotly, which numbers them from 1 and leaves out that one."""
    return f"{name}{i + 1}" if i else name


def _untitled(axis: dict[str, Any], keep: bool) -> dict[str, Any]:
    return axis if keep else {**axis, "title": None}
