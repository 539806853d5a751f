"""Figures of feature maps of convolutions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.theme import DIVERGING, FONT, INK, PAPER

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = later("plotly.graph_objects", "viz")
    subplots = later("plotly.subplots", "viz")

PANEL = 150  # pixels


def feature_maps(
    maps: Float[Tensor, "channel height width"],
    labels: Sequence[str] | None = None,
    title: str = "",
    columns: int = 4,
) -> "go.Figure":
    """One panel for each channel, with row 0 at the top; the colour scale is white at zero and shared by all panels.

    Raises ValueError for the wrong number of labels.

    >>> import torch
    >>> figure = feature_maps(torch.eye(3).expand(2, 3, 3), ["edges", "corners"])
    >>> len(figure.data), figure.layout.annotations[1].text
    (2, 'corners')
    """
    n = len(maps)
    names = [f"channel {i}" for i in range(n)] if labels is None else list(labels)
    if len(names) != n:
        raise ValueError(f"{len(names)} labels for {n} channels")
    columns = max(1, min(columns, n))
    rows = max(1, -(-n // columns))
    figure = subplots.make_subplots(rows, columns, subplot_titles=names, horizontal_spacing=0.03)
    values = maps.detach().float().cpu().numpy()
    for i, value in enumerate(values):
        hover = "row %{y}, column %{x}<br><b>%{z:.3f}</b><extra></extra>"
        trace = go.Heatmap(z=value, coloraxis="coloraxis", hovertemplate=hover)
        figure.add_trace(trace, row=i // columns + 1, col=i % columns + 1)
    largest = float(abs(values).max()) if values.size else 0.0
    figure.update_xaxes(visible=False, constrain="domain")
    figure.update_yaxes(visible=False, autorange="reversed", constrain="domain")
    for axis in figure.select_yaxes():
        axis.scaleanchor = axis.anchor
    scale = {"colorscale": DIVERGING, "cmin": -(largest or 1.0), "cmax": largest or 1.0}
    font = {"family": FONT, "color": INK}
    figure.update_layout(
        title=title,
        coloraxis=scale,
        font=font,
        height=rows * (PANEL + 40) + 60,
        plot_bgcolor=PAPER,
        paper_bgcolor=PAPER,
    )
    return figure
