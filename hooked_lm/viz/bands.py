"""Bands above the columns of a heat map: whose the tokens are, turn by turn."""

import html
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hooked_lm.viz.labels import LETTER, Axis, Who, cut, who
from hooked_lm.viz.theme import COLOURS, DOWN, INK, THIRD, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROOM = 24  # pixels above a panel
STRIP = (2, 6)  # pixels above the cells where a band begins and ends
FEWEST = 3  # letters of a name that is written
MARKER, TEMPLATE = COLOURS["marker"][0], COLOURS["strong"][0]
OF_ROLES = {"user": UP, "assistant": THIRD, "system": MARKER, "developer": MARKER, "tool": DOWN}  # as in `conversation`


def draw_bands(figure: "go.Figure", n: int, x_axis: Axis, width: float, n_titles: int) -> None:
    """Draws the turns of the columns, which have `width` pixels, above each of `n` panels.

    A band has the name of its turn where there is room, and says it on hover. The titles of panels, the first `n_titles`
    annotations, are moved above it.
    """
    if not x_axis.turns:
        return
    bands, start = list[tuple[int, int, Who]](), 0
    for label, several in groupby(x_axis.turns):
        stop = start + len(list(several))
        bands += [(start, stop, label)] if label is not None else []
        start = stop
    annotations = [annotation.to_plotly_json() for annotation in figure.layout.annotations]
    for title in annotations[:n_titles]:
        title["yshift"] = ROOM - STRIP[0]
    shapes = list[dict[str, Any]]()
    for i in range(n):
        at = {"xref": f"x{i + 1 if i else ''}", "yref": f"y{i + 1 if i else ''} domain"}  # outside of it, unclipped
        for start, stop, label in bands:
            shapes.append(_strip(start, stop, label) | at)
            annotations.append(_name(start, stop, label, width) | at)
    figure.update_layout(shapes=shapes, annotations=annotations, overwrite=True)


def _strip(start: int, stop: int, label: Who) -> dict[str, Any]:
    low, high = STRIP
    return {
        "type": "rect",
        "x0": start - 0.45,
        "x1": stop - 0.55,
        "ysizemode": "pixel",
        "yanchor": 1,
        "y0": low,
        "y1": high,
        "line": {"width": 0},
        "fillcolor": OF_ROLES.get(label[1], TEMPLATE),
    }


def _name(start: int, stop: int, label: Who, width: float) -> dict[str, Any]:
    """The name of a turn, cut where its columns are narrow; of what a template adds on hover alone."""
    name, room = who(label), int((stop - start) * width / LETTER)
    written = cut(name, room) if room >= FEWEST and label[0] >= 0 else "&nbsp;"
    return {
        "x": (start + stop - 1) / 2,
        "y": 1,
        "yanchor": "bottom",
        "yshift": STRIP[1],
        "text": written if written == "&nbsp;" else html.escape(written, quote=False),
        "hovertext": html.escape(name, quote=False),
        "font": {"size": 11, "color": INK},
        "showarrow": False,
    }
