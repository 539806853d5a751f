"""What all figures share: title, fonts and size, what is missing, and the bounds of values."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.theme import FAINT, FONT, GRID, INK, PAPER

if TYPE_CHECKING:
    import plotly.graph_objects as go

Values: TypeAlias = Tensor | np.ndarray | Sequence[Any]  # numbers: a tensor, an array or lists
Interval: TypeAlias = tuple[Values, Values]  # lower and upper bounds, each of the shape of the values
WIDEST = 900  # pixels of a figure that readers need not widen
FROM_TO = "<br>%{customdata[0]:.3f} to %{customdata[1]:.3f}"


def style(figure: "go.Figure", title: str, height: int, margin: dict[str, int], subtitle: str = "") -> None:
    """Gives a figure its title, fonts and size, in place of those that it has: plotly takes long to merge settings."""
    below = {"text": html.escape(subtitle, quote=False), "font": {"size": 12, "color": FAINT}}
    figure.update_layout(
        overwrite=True,
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
    figure.update_layout(meta={"min_width": min(WIDEST, max(least, width))}, overwrite=True)


def room_above(title: str, subtitle: str) -> int:
    """Pixels of the title and the line below it."""
    return (56 if title else 24 if subtitle else 12) + (18 if subtitle else 0)


def as_numbers(values: Values) -> Float[Tensor, "*shape"]:
    """Values in fp32 on the CPU. Raises TypeError for what is not made of real numbers.

    >>> as_numbers([0, True]), as_numbers(np.ones(1))
    (tensor([0., 1.]), tensor([1.]))
    """
    try:
        found = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"values are a tensor, an array or lists of numbers, got {type(values).__name__}: {error}"
        ) from None
    if found.is_complex():
        raise TypeError(
            f"values are complex ({found.dtype}), and a figure shows real numbers: draw values.abs() or values.real"
        )
    return found.float().cpu()


def and_missing(subtitle: str, values: Tensor, levels: Mapping[str, float] | None = None) -> str:
    """A subtitle, and which values and named levels there are not, or are infinite; all of them are missing in a figure."""
    counts = {"without a value": int(values.isnan().sum()), "infinite": int(values.isinf().sum())}
    said = [f"{n} of {values.numel()} {what}" for what, n in counts.items() if n]
    said += ["no values"] if not values.numel() else []
    said += [f"{name} without a value" for name in levels or {} if name not in finite(levels)]
    return "; ".join([*([subtitle] if subtitle else []), *said])


def finite(levels: Mapping[str, float] | None) -> dict[str, float]:
    """The named levels that can be drawn."""
    return {name: level for name, level in (levels or {}).items() if math.isfinite(level)}


def ends_of(values: Float[Tensor, "*shape"], interval: Interval | None) -> Float[np.ndarray, "*shape 2"] | None:
    """Both ends of the interval of each value, for hover texts; raises ValueError for those of other values."""
    if interval is None:
        return None
    both = [as_numbers(end) for end in interval]
    for end in both:
        if end.shape != values.shape:
            raise ValueError(f"an interval of {list(end.shape)} for values {list(values.shape)}")
    ends: np.ndarray = torch.stack(both, -1).numpy()
    return ends


def said_of(note: str, has_interval: bool) -> str:
    """The last lines of a hover text: the interval, and a note."""
    return (FROM_TO if has_interval else "") + (f"<br>{html.escape(note, quote=False)}" if note else "")
