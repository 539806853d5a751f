"""Colour scales of numbers: which colours, from where to where, and the bar beside the figure."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.numbers import short
from hooked_lm.viz.theme import DIVERGING, FAINT, FALLING, SEQUENTIAL

QUANTILE = 0.75  # of the largest value of each row
TINY = 0.05  # the share of the larger side up to which the smaller one has no colours


@dataclass(frozen=True)
class ColourScale:
    """Colours from `low` to `high`; `white` is the number that is white (on dark paper, black)."""

    colours: list[tuple[float, str]]
    low: float
    white: float
    high: float

    def settings(self) -> dict[str, Any]:
        """The scale for a heat map of plotly."""
        return {"colorscale": self.colours, "zmin": self.low, "zmax": self.high}

    def strength(self, value: float) -> float:
        """How far a value is from white: 1 at the upper end, -1 at the lower one; none is farther.

        >>> import torch
        >>> [scale_of(torch.tensor([-4.0, 2.0])).strength(value) for value in (-9.0, 0.0, 2.0)]
        [-1.0, 0.0, 0.5]
        """
        reach = self.high - self.white if value > self.white else self.white - self.low
        return max(-1.0, min(1.0, (value - self.white) / reach)) if reach else 0.0

    def ticks(self, marks: Mapping[str, float] | None) -> dict[str, Any]:
        """The ticks of a colour bar: named values and the ends, or round numbers if none is named and zero is among them."""
        if not marks and 0.0 in (self.low, self.white, self.high):
            is_diverging = self.low < self.white < self.high
            return {"nticks": 5} if is_diverging else {}  # with 4, plotly writes nothing but 0 if the ends are 4 to 5
        reach = self.high - self.low
        named = {
            value: f"{short(value)} {html.escape(name, quote=False)}"
            for name, value in reversed(list((marks or {}).items()))
        }
        there = {at: text for at, text in named.items() if self.low - reach / 100 <= at <= self.high + reach / 100}
        ends = [self.low, *([self.white] if self.low < self.white < self.high else []), self.high]
        ticks = there | {end: short(end) for end in ends if all(abs(end - at) > reach / 16 for at in there)}
        return {"tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values())}


def scale_of(values: Tensor, centre: float | None = None, limit: float | None = None) -> ColourScale:
    """The colours of values: diverging from white at the centre; if all are on one side of it, from white to one end.

    A side that is at most a twentieth of the other is white: colours for it would take half of them from the other.

    Without a centre it is zero; values that are all far from zero, such as 5 to 6, then take the whole scale. `limit` is the
    distance from the centre to the ends, the largest of a finite value if None or zero. A centre that is not finite is as none.
    Raises ValueError for other limits.

    >>> import torch
    >>> rows = torch.tensor([[-1.0, 2.0], [-0.05, 2.0], [-2.0, 0.05], [5.0, 6.0]])
    >>> [(scale.low, scale.high) for scale in map(scale_of, rows)]
    [(-2.0, 2.0), (0.0, 2.0), (-2.0, 0.0), (5.0, 6.0)]
    """
    found = values[values.isfinite()]
    low, high = (float(found.min()), float(found.max())) if len(found) else (0.0, 0.0)
    centre = None if centre is None or not math.isfinite(centre) else centre
    middle = centre or 0.0
    reach = checked(limit) or max(high - middle, middle - low, 0.0) or 1.0
    above, below = high - middle, middle - low
    if min(above, below) > TINY * max(above, below):
        return ColourScale(DIVERGING, middle - reach, middle, middle + reach)
    free = centre is None and limit is None and low < high
    if above >= below:
        start = low if free and low > high / 2 else middle
        return ColourScale(SEQUENTIAL, start, start, middle + reach)
    stop = high if free and high < low / 2 else middle
    return ColourScale(FALLING, middle - reach, stop, stop)


def checked(limit: float | None) -> float | None:
    """The end of a colour scale. Raises ValueError for one below zero, or without a finite value."""
    if limit is not None and not 0 <= limit < math.inf:
        raise ValueError(
            f"limit is the distance from the centre to the end of the colours, a finite number above 0, got {limit}"
        )
    return limit


def usual_limit(patterns: Float[Tensor, "*panel row column"]) -> float:
    """The end of the colours of patterns of attention: the quantile of what their rows have at most, without the first column,
    to which most heads look where they look nowhere else, and which would leave all others white.

    >>> import torch
    >>> usual_limit(
    ...     torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.97, 0.01, 0.02]]).expand(
    ...         2, 3, 3
    ...     )
    ... ) < 0.6
    True
    """
    found = patterns.abs().nan_to_num(0.0, 0.0, 0.0)
    most = (found[..., 1:] if found.shape[-1] > 1 else found).amax(-1).flatten()
    least = float(found.max()) / 1000  # what is below it everywhere is no look
    return max(float(most.quantile(QUANTILE)), least)


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
