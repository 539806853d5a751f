"""Figures of values over the places of an image."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz.figure import (
    WIDEST,
    Interval,
    Values,
    and_missing,
    as_numbers,
    ends_of,
    finite,
    said_of,
    style,
)
from hooked_lm.viz.heatmaps import evenly, missing
from hooked_lm.viz.scales import ColourScale, colour_bar, scale_of
from hooked_lm.viz.theme import ALPHAS, CONTRAST, DOWN, FAINT, PALEST, UP, WHITE, translucent

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import plotly.subplots as subplots
else:
    go = lazy_import("plotly.graph_objects", "viz")
    subplots = lazy_import("plotly.subplots", "viz")

WHERE = "row %{y}, column %{x}"
PANEL, LOWEST, GAP = 190, 90, 24  # pixels: the height of a panel, and the room between panels
ABOVE, BESIDE = 30, 110  # pixels of the title of a panel in a lower row, and of the colour bar
MOST_BESIDE = 5  # panels in a row


@runtime_checkable
class Pillow(Protocol):
    """A picture of pillow."""

    def convert(self, mode: str) -> Any: ...


Picture = Tensor | np.ndarray | Pillow


def image_heat_map(
    values: Values,  # [row, column] or [panel, row, column], checked in words
    image: Picture | None = None,
    panels: Sequence[Any] | None = None,
    title: str = "",
    value_name: str = "",
    limit: float | None = None,
    subtitle: str = "",
    interval: Interval | None = None,
    marks: Mapping[str, float] | None = None,
    note: str = "",
) -> "go.Figure":
    """Values over the places of an image, on top of a pale grey image, which shows through small values. Cells without a value
    (NaN) and infinite ones are hatched, and counted below the title.

    Args:
        values: a number for each place [row, column], or for each place in several panels, such as layers.
        image: the picture, [channel, height, width] with one channel or three, or a picture of pillow. Its smallest value is
            shown black, the largest white. The first panel shows it alone, in its colours. None: no picture.
        panels: titles of the panels; numbers if None.
        value_name: the title of the colour bar.
        limit: the absolute value at the end of the colour scale; the largest one if None.
        subtitle: a line below the title.
        interval: the lower and upper bounds of each value, shown on hover.
        marks: values that are named on the colour bar; the first is the middle of the colours, which is zero if None.
        note: the last line on hover, such as the number of prompts.

    Raises ValueError for values without rows and columns or none at all, for an image with another number of channels or pixels
    that are NaN or infinite, and for the wrong number of titles; TypeError for values and images of other types.

    >>> import torch
    >>> figure = image_heat_map(
    ...     torch.rand(2, 3, 4), image=torch.rand(3, 30, 40), panels=["layer 0", "layer 1"]
    ... )
    >>> [type(trace).__name__ for trace in figure.data]
    ['Image', 'Image', 'Heatmap', 'Image', 'Heatmap']
    """
    maps, picture = _maps(values), None if image is None else _channels(image)
    names = [str(name) for name in (range(len(maps)) if panels is None else panels)]
    if len(names) != len(maps):
        raise ValueError(f"{len(names)} titles for {len(maps)} panels")
    scale = scale_of(maps, next(iter(finite(marks).values()), 0.0), limit)
    ends = None if interval is None else (_maps(interval[0]), _maps(interval[1]))
    bounds, bar = ends_of(maps, ends), colour_bar(value_name) | scale.ticks(finite(marks))
    n_rows, n_columns = maps.shape[1:]
    ratio = n_columns / n_rows
    shown = [*([] if image is None else ["image"]), *(names if len(names) > 1 or panels is not None else [""])]
    across = evenly(len(shown), MOST_BESIDE)
    down = -(-len(shown) // across)
    height = int(max(LOWEST, min(PANEL, ((WIDEST - BESIDE) / across - GAP) / ratio)))
    drawn = down * height + (down - 1) * ABOVE
    spacing = {"horizontal_spacing": GAP / (across * (height * ratio + GAP)), "vertical_spacing": ABOVE / drawn}
    figure = subplots.make_subplots(down, across, subplot_titles=shown, **spacing)
    places = list(product(range(1, 1 + down), range(1, 1 + across)))
    if picture is not None:
        figure.add_trace(_picture(picture, n_rows, n_columns), 1, 1)
    for i, (place, cells) in enumerate(zip(places[len(shown) - len(maps) :], maps, strict=False)):
        if picture is not None:
            figure.add_trace(_picture(picture, n_rows, n_columns, pale=True), *place)
        overlay = _overlay(cells.numpy(), scale, opaque=picture is None)
        overlay.hovertemplate = f"{WHERE}<br><b>%{{z:.3f}}</b>{said_of(note, bounds is not None)}<extra></extra>"
        overlay.update(customdata=None if bounds is None else bounds[i], showscale=i == 0, colorbar=bar)
        for part in (overlay, *missing(cells, None, WHERE)):
            figure.add_trace(part, *place)
    said = and_missing(subtitle, maps)
    top = (84 if title else 44) + 18 * bool(said)
    style(figure, title, height=drawn + top + 16, margin={"t": top, "b": 16, "l": 16}, subtitle=said)
    figure.update_layout(width=int(across * (height * ratio + GAP)) + BESIDE)
    figure.update_annotations(font={"size": 12, "color": FAINT})
    figure.update_xaxes(visible=False, range=[-0.5, n_columns - 0.5], constrain="domain")
    figure.update_yaxes(visible=False, range=[n_rows - 0.5, -0.5], constrain="domain")
    for axis in figure.select_yaxes():
        axis.scaleanchor = axis.anchor
    return figure


def _maps(values: Values) -> Float[Tensor, "panel row column"]:
    """The values of all panels."""
    maps = as_numbers(values)
    if maps.ndim < 2:
        raise ValueError(
            f"values are [row, column], in several panels [panel, row, column], got {tuple(maps.shape)}: "
            "values[model.patch_grid(inputs)[0]] folds values over positions, .reshape those over patches"
        )
    if not maps.numel():
        raise ValueError(f"there are no values to draw: they are {tuple(maps.shape)}")
    return maps.reshape(-1, *maps.shape[-2:])


def _channels(image: object) -> Float[Tensor, "*channel_height_width"]:
    """The picture as a tensor of channels, rows and columns."""
    if isinstance(image, (Tensor, np.ndarray)):
        return torch.as_tensor(image).detach().float().cpu()
    if not isinstance(image, Pillow):
        raise TypeError(f"image must be a tensor, an array or a picture of pillow, got {type(image).__name__}")
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()


def _picture(image: Float[Tensor, "..."], n_rows: int, n_columns: int, pale: bool = False) -> "go.Image":
    """The image, stretched over the cells of a grid; `pale` makes it a light grey."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"an image is [channel, height, width] with 1 or 3 channels, got {tuple(image.shape)}")
    if not image.numel() or not bool(image.isfinite().all()):
        raise ValueError(
            f"the image {tuple(image.shape)} needs pixels that are all finite: image.nan_to_num(0) has no others"
        )
    low, high = image.min(), image.max()
    if pale and (many := -(-max(image.shape[1:]) // PANEL)) > 1:  # there is one in each panel
        image = torch.nn.functional.avg_pool2d(image, many, ceil_mode=True)
    pixels = 255 * (image - low) / (high - low).clamp(min=1e-12)
    if pale:
        pixels = PALEST - CONTRAST * (255 - pixels.mean(0, keepdim=True))
    rgb = pixels.expand(3, -1, -1).permute(1, 2, 0).round().numpy().astype(np.uint8)
    dx, dy = n_columns / rgb.shape[1], n_rows / rgb.shape[0]
    return go.Image(z=rgb, x0=dx / 2 - 0.5, dx=dx, y0=dy / 2 - 0.5, dy=dy, hoverinfo="skip", meta={"pale": pale})


def _overlay(cells: np.ndarray, scale: ColourScale, opaque: bool) -> "go.Heatmap":
    """The values of a panel; without a picture, small ones are white."""
    middle = WHITE if opaque else translucent(WHITE, ALPHAS[0])
    down, up = (DOWN, UP) if opaque else (translucent(DOWN, ALPHAS[1]), translucent(UP, ALPHAS[1]))
    stops = {scale.low: down, scale.white: middle, scale.high: up}
    if scale.white in (scale.low, scale.high):
        stops = {
            scale.low: middle if scale.low == scale.white else down,
            scale.high: up if scale.low == scale.white else middle,
        }
    colours = [((at - scale.low) / (scale.high - scale.low), colour) for at, colour in stops.items()]
    return go.Heatmap(
        z=cells,
        zmin=scale.low,
        zmax=scale.high,
        colorscale=colours,
        hoverongaps=False,
    )
