"""Tokens with numbers: in the cells of a grid, or as text with coloured backgrounds."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import later
from hooked_lm.viz.plots import heatmap, token_label
from hooked_lm.viz.theme import SEQUENTIAL

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = later("plotly.graph_objects", "viz")

WARM, COLD = (200, 105, 76), (91, 143, 194)  # background colours of positive and negative numbers


def token_grid(
    values: Float[Tensor, "row column"],
    tokens: Sequence[Sequence[str]],
    x_labels: Sequence[Any] | None = None,
    y_labels: Sequence[Any] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    value_name: str = "",
    limit: float | None = None,
) -> "go.Figure":
    """A grid of tokens, coloured by their numbers; row 0 is at the top, NaN is empty.

    Colours are those of `heatmap`, or without negative numbers they go from white at zero to dark at `limit` (the largest
    number if None). Raises ValueError for tokens or labels that do not fit.

    >>> import torch
    >>> figure = token_grid(torch.tensor([[0.1, 0.9]]), [[" the", " Paris"]], y_labels=["layer 3"])
    >>> [list(row) for row in figure.data[0].text]
    [['·the', '·Paris']]
    """
    sizes = [len(row) for row in tokens]
    if sizes != [values.shape[1]] * values.shape[0]:
        raise ValueError(f"tokens in rows of {sizes} do not fit values {list(values.shape)}")
    figure = heatmap(values, x_labels, y_labels, title, x_title, y_title, value_name, limit=limit)
    texts = [[token_label(token, 12) if token else "" for token in row] for row in tokens]
    figure.data[0].update(
        text=texts,
        texttemplate="%{text}",
        textfont={"size": 11},
        hovertemplate="%{y}<br>%{x}<br>%{text}<br><b>%{z:.3f}</b><extra></extra>",
    )
    if not bool((values < 0).any()):
        figure.data[0].update(zmin=0.0, colorscale=SEQUENTIAL)
    return figure


def coloured_tokens(
    tokens: Sequence[str], values: Sequence[float], limit: float | None = None, marked: int | None = None
) -> str:
    """The HTML of a text whose tokens have background colours by their numbers: warm above zero, cold below.

    `limit` is the absolute value of the full colour (the largest if None); the token at `marked` is underlined.
    Raises ValueError if tokens and values differ in number.

    >>> "rgba(200,105,76,0.35)" in coloured_tokens([" a", " b"], [0.0, 1.0])
    True
    """
    if len(tokens) != len(values):
        raise ValueError(f"{len(tokens)} tokens for {len(values)} values")
    finite = [abs(value) for value in values if math.isfinite(value)]
    limit = limit or max(finite, default=0.0) or 1.0
    return "".join(
        _span(token, value, limit, place == marked)
        for place, (token, value) in enumerate(zip(tokens, values, strict=True))
    )


def _span(token: str, value: float, limit: float, marked: bool) -> str:
    strength = min(1.0, abs(value) / limit) if math.isfinite(value) else 0.0
    red, green, blue = WARM if value > 0 else COLD
    line = "border-bottom:2px solid #1c2330;" if marked else ""
    style = f"background:rgba({red},{green},{blue},{0.35 * strength:.2f});{line}white-space:pre"
    return f'<span style="{style}" title="{value:.4g}">{token_label(token, 40)}</span>'
