"""What all figures share: title, fonts and size, what is missing, and the bounds of values."""

import html
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.theme import FAINT, FONT, GRID, INK, PAPER

if TYPE_CHECKING:
    import plotly.graph_objects as go

Interval: TypeAlias = tuple[Tensor, Tensor]  # lower and upper bounds, each of the shape of the values
WIDEST = 900  # pixels of a figure that readers need not widen
FROM_TO = "<br>%{customdata[0]:.3f} to %{customdata[1]:.3f}"


def style(figure: "go.Figure", title: str, height: int, margin: dict[str, int], subtitle: str = "") -> None:
    """Gives a figure its title, fonts and size."""
    below = {"text": html.escape(subtitle, quote=False), "font": {"size": 12, "color": FAINT}}
    figure.update_layout(
        title={
            "text": html.escape(title, quote=False),
            "subtitle": below if subtitle else None,
            "x": 0,
            "xref": "container",
            "pad": {"l": 8},
            "font": {"size": 15, "color": INK},
        },
        font={"family": FONT, "size": 12, "color": INK},
        height=height,
        margin={"l": 60, "r": 20, **margin},
        paper_bgcolor=PAPER,
        plot_bgcolor=GRID,
        modebar={"bgcolor": PAPER, "color": FAINT, "activecolor": INK},
        hoverlabel={"font": {"family": FONT}},
    )


def widen(figure: "go.Figure", width: int) -> None:
    """Makes a page give the figure at least this width in pixels, up to a limit; on a narrow screen it is moved sideways."""
    least = (figure.layout.meta or {}).get("min_width", 0)
    figure.update_layout(meta={"min_width": min(WIDEST, max(least, width))})


def room_above(title: str, subtitle: str) -> int:
    """Pixels of the title and the line below it."""
    return (56 if title else 24 if subtitle else 12) + (18 if subtitle else 0)


def and_missing(subtitle: str, values: Tensor) -> str:
    """A subtitle, and how many values there are not."""
    n = int(values.isnan().sum())
    said = [f"{n} of {values.numel()} without a value"] if n else []
    return "; ".join([*([subtitle] if subtitle else []), *said])


def ends_of(values: Float[Tensor, "*shape"], interval: Interval | None) -> Float[np.ndarray, "*shape 2"] | None:
    """Both ends of the interval of each value, for hover texts; raises ValueError for those of other values."""
    if interval is None:
        return None
    for end in interval:
        if end.shape != values.shape:
            raise ValueError(f"an interval of {list(end.shape)} for values {list(values.shape)}")
    ends: np.ndarray = torch.stack([end.detach().float().cpu() for end in interval], -1).numpy()
    return ends


def said_of(note: str, has_interval: bool) -> str:
    """The last lines of a hover text: the interval, and a note."""
    return (FROM_TO if has_interval else "") + (f"<br>{html.escape(note, quote=False)}" if note else "")
