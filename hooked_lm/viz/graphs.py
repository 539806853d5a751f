"""Layered graphs: views whose nodes are chosen with a click or a key, and show what they read and write."""

import html
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from jaxtyping import Float
from torch import Tensor

from hooked_lm.files import replacing
from hooked_lm.viz.numbers import short
from hooked_lm.viz.theme import COLOURS, FONT
from hooked_lm.viz.view import View, as_json

WIDE, NARROW, BREAK = 760, 340, 780  # pixels of both drawings, and of the view from which on the wide one is shown
BOX, PORT, HEAD = 24, 13, 7  # heights of a node's box, of the row of its inputs, and of an arrow head
LETTER, PADDING, GAP, BESIDE = (
    7.4,
    18,
    16,
    9,
)  # the width of a letter, the space beside a label, between boxes, beside edges
LEVEL, ROW = 78, 64  # from a level to the next, and from a row of nodes of one level to the next
THIN, THICK, PALE = 1.2, 7.0, 0.45  # pixels of the weakest and the strongest edge, and the opacity of the weakest
MEANINGS = ("positive", "negative")
STYLE, SCRIPT = (Path(__file__).with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))
HINT = "Click a node, or move with the arrow keys and press Enter, to see what it reads and writes."

Edge = tuple[str, str, str]  # source, target, text
Point = tuple[float, float]


@dataclass(frozen=True, repr=False)
class GraphView(View):
    """A view of a graph, which can also be saved as one SVG picture, as for a paper."""

    svg: str = ""

    def write_svg(self, path: str | os.PathLike[str]) -> Path:
        """Writes the graph, in light colours, with its title and legend, and returns the path. Raises OSError if it cannot."""
        with replacing(path) as unfinished:
            unfinished.write_text(self.svg, encoding="utf-8")
        return Path(path)


def layered_graph(
    levels: Mapping[str, float],
    edges: Sequence[Edge],
    scores: Float[Tensor, " edge"] | None = None,
    title: str = "",
    value_name: str = "score",
    subtitle: str = "",
    meanings: tuple[str, str] = MEANINGS,
    *,
    blue: int = 1,
    ports: Sequence[str] | None = None,
    n_drawn: int | None = None,
) -> GraphView:
    """A view of a graph with nodes on levels, the lowest at the bottom; arrow heads show where edges end.

    The width of an edge grows with the square root of its score, its colour shows the sign: one is blue, the other orange and
    dashed. A click on a node, or Enter after moving there with the arrow keys, shows its edges alone, and lists what it reads and
    writes. `write_svg(path)` of the view saves a picture.

    Args:
        levels: the level of each node; nodes of one level are side by side, in the given order.
        edges: the source, the target and the text of each edge.
        scores: one for each edge; all edges look the same if None.
        value_name: what the scores are, in the legend.
        meanings: what a positive and a negative score mean, in the legend.
        blue: the sign of the scores whose edges are blue, 1 or -1.
        ports: the input of its target at which each edge ends, such as "q"; "" for a target with one input. None: all have one.
        n_drawn: how many edges are drawn, the first of them; the others are listed with their nodes, and drawn grey when one of
            these is chosen. None: all.

    Raises ValueError for a drawn edge to or from a node without a level, for another number of scores or ports than of edges, and
    for scores that are NaN or infinite.

    >>> import torch
    >>> edges = [("in", "h0", "in to h0"), ("h0", "out", "h0 to out")]
    >>> layered_graph(
    ...     {"in": 0, "h0": 1, "out": 2},
    ...     edges,
    ...     torch.tensor([1.0, -2.0]),
    ...     title="A graph",
    ...     ports=["q", ""],
    ... )
    View('A graph', 3 nodes, 2 edges; .show() opens it in a browser, .write_html(path) saves it)
    """
    n_drawn = len(edges) if n_drawn is None else n_drawn
    for name, values in (("scores", scores), ("ports", ports)):
        if values is not None and len(values) != len(edges):
            raise ValueError(f"{len(values)} {name} for {len(edges)} edges")
    if missing := [end for edge in edges[:n_drawn] for end in edge[:2] if end not in levels]:
        raise ValueError(f"an edge ends at {missing[0]!r}, which has no level")
    if scores is not None and not bool(scores.isfinite().all()):
        raise ValueError(
            f"{int((~scores.isfinite()).sum())} of {len(edges)} scores are NaN or infinite: leave these edges out"
        )
    numbers = None if scores is None else scores.detach().float().tolist()
    graph = _Graph(levels, edges, ports or [""] * len(edges), numbers, n_drawn, blue, (value_name, meanings))
    name, about = title or "Graph", f"{len(levels)} nodes, {n_drawn} edges"
    drawings = [_Drawing(graph, width) for width in (WIDE, NARROW)]
    svgs = "".join(drawing.svg(kind, name) for drawing, kind in zip(drawings, ("wide", "narrow"), strict=True))
    body = BODY.format(
        head=f"<h2>{_text(title)}</h2>" * bool(title) + f'<p class="below">{_text(subtitle)}</p>' * bool(subtitle),
        svgs=svgs,
        legend=graph.legend(),
        hint=HINT if edges else "",
        data=as_json({"edges": list(graph.listed()), "value": value_name}),
    )
    picture = drawings[0].picture(title, subtitle)
    return GraphView(name, body, STYLE + SIZES, SCRIPT, int(drawings[0].height) + 140, about, picture)


@dataclass(frozen=True)
class _Graph:
    levels: Mapping[str, float]
    edges: Sequence[Edge]
    ports: Sequence[str]
    scores: Sequence[float] | None
    n_drawn: int
    blue: int
    words: tuple[str, tuple[str, str]]  # the name of the values, what positive and negative ones mean

    @cached_property
    def limit(self) -> float:
        """The largest absolute score of a drawn edge."""
        return max(map(abs, self.scores[: self.n_drawn]), default=0.0) if self.scores else 0.0

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """The names of the inputs of each node at which edges end, in alphabetical order, without nodes of one input."""
        found: dict[str, set[str]] = {}
        for (source, target, _), port in zip(self.edges, self.ports, strict=True):
            if port and source in self.levels and target in self.levels:
                found.setdefault(target, set()).add(port)
        return {name: sorted(ports) for name, ports in found.items()}

    def kind(self, i: int) -> str:
        """The class of an edge: the colour of its score, or "weak" if it is not drawn at first."""
        if i >= self.n_drawn:
            return "weak"
        return "alike" if self.scores is None else "up" if self.scores[i] * self.blue >= 0 else "down"

    def look(self, i: int) -> str:
        """The width and the opacity of an edge, as CSS."""
        if self.scores is None or i >= self.n_drawn:
            return ""
        share = (abs(self.scores[i]) / self.limit) ** 0.5 if self.limit else 0.0
        return f"stroke-width:{THIN + share * (THICK - THIN):.1f};stroke-opacity:{PALE + share * (1 - PALE):.2f}"

    def said(self, i: int) -> str:
        """The score of an edge in words."""
        return "" if self.scores is None else short(self.scores[i], sign=True)

    def listed(self) -> Iterator[list[object]]:
        """What the script knows of each edge."""
        for i, ((source, target, _), port) in enumerate(zip(self.edges, self.ports, strict=True)):
            yield [source, target, port, self.said(i), i < self.n_drawn]

    def meanings(self) -> list[tuple[str, str]]:
        """The classes of edges that occur, and what they mean."""
        if self.scores is None:
            return []
        positive, negative = self.words[1]
        found = [("up", positive), ("down", negative)] if self.blue > 0 else [("up", negative), ("down", positive)]
        there = {self.kind(i) for i in range(self.n_drawn)}
        return [(kind, meaning) for kind, meaning in found if kind in there]

    @property
    def width_means(self) -> str:
        return f"width: square root of {self.words[0]}, up to {short(self.limit)}" if self.scores and self.limit else ""

    def legend(self) -> str:
        rows = [(f'<line class="line {kind}" x1="0" x2="28" y1="5" y2="5"/>', said) for kind, said in self.meanings()]
        wedge = f'<path class="wedge" d="M0 5 L28 {5 - THICK / 2} V{5 + THICK / 2} Z"/>'
        rows += [(wedge, self.width_means)] if self.width_means else []
        return "".join(f'<span><svg width="28" height="10">{key}</svg>{_text(said)}</span>' for key, said in rows)


class _Drawing:
    """A graph in a width: the places of its nodes, and its edges around the boxes of others."""

    def __init__(self, graph: _Graph, width: int) -> None:
        self.graph, self.width = graph, width
        self.at: dict[str, Point] = {}
        self.rows: list[tuple[float, list[str]]] = []  # from the bottom: the place of each row, and its nodes
        up = 0.0
        for level in sorted(set(graph.levels.values())):
            names = [name for name in graph.levels if graph.levels[name] == level]
            widest = max(map(_width, names))
            between = (width - widest) / (widest + GAP)
            n_rows = 1 if len(names) - 1 <= between else -(-len(names) // max(1, int(between)))
            self.rows += [(up + ROW * row, names[row::n_rows]) for row in range(n_rows)]
            for i, name in enumerate(names):
                x = (i + 0.5) / len(names) * width
                if n_rows > 1:
                    x = widest / 2 + i / (len(names) - 1) * (width - widest)
                self.at[name] = x, up + ROW * (i % n_rows)
            up += LEVEL + ROW * (n_rows - 1)
        self.height = (max(up - LEVEL, 0.0) + BOX + PORT + 12) if self.rows else 40.0
        top = self.height - BOX / 2 - PORT - 6
        self.at = {name: (x, top - y) for name, (x, y) in self.at.items()}
        self.rows = [(top - y, names) for y, names in self.rows]

    def end(self, target: str, port: str, upwards: bool) -> Point:
        """Where an edge ends: below its port, or below or above the box."""
        x, y = self.at[target]
        if not upwards:
            return x, y - BOX / 2
        names = self.graph.inputs.get(target, [])
        if port in names:
            return x + self.beside(names, port), y + BOX / 2 + PORT
        return x, y + BOX / 2

    @staticmethod
    def beside(names: Sequence[str], port: str) -> float:
        """How far a port is to the right of the middle of its node."""
        return (names.index(port) - (len(names) - 1) / 2) * 15

    def path(self, i: int) -> str:
        """The curve of an edge, vertical at both ends and through the gaps between the boxes of rows in between."""
        source, target, _ = self.graph.edges[i]
        (x, y), upwards = self.at[source], self.at[source][1] >= self.at[target][1]
        sign = 1 if upwards else -1
        stop, last = self.end(target, self.graph.ports[i], upwards)
        places = [(x, y - sign * BOX / 2)]
        between = [row for row in self.rows if min(y, self.at[target][1]) < row[0] < max(y, self.at[target][1])]
        for n_left, (middle, names) in zip(range(len(between), 0, -1), between[::sign], strict=True):
            step = (stop - places[-1][0]) / (n_left + 1)
            there = self.free(names, places[-1][0] + step)
            near = 2 * BESIDE + abs(step) / 3  # a curve that runs sideways meets boxes further away
            is_near = any(abs(there - self.at[name][0]) < _width(name) / 2 + near for name in names)
            half = (BOX + PORT) / 2 if is_near else 0.0  # beside a box it is upright
            places += [(there, middle + PORT / 2 + side * sign * half) for side in ((1, -1) if is_near else (1,))]
        return _smooth([*places, (stop, last + sign * HEAD)])

    def free(self, names: Sequence[str], x: float) -> float:
        """The place nearest to x that is not on a box of a row."""
        sides = [(self.at[name][0], _width(name) / 2 + BESIDE) for name in names]
        bounds = [
            4.0,
            *(end for middle, half in sorted(sides) for end in (middle - half, middle + half)),
            self.width - 4.0,
        ]
        gaps = [(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if low <= high]
        return min((min(max(x, low), high) for low, high in gaps), key=lambda place: abs(place - x), default=x)

    def edge(self, i: int) -> str:
        text = self.graph.edges[i][2]
        said, path = self.graph.said(i), self.path(i)
        about = f"<title>{_text(f'{text}  {said}'.strip())}</title>"
        return (
            f'<g class="edge {self.graph.kind(i)}" data-edge="{i}">{about}<path class="near" d="{path}"/>'
            f'<path class="line {self.graph.kind(i)}" d="{path}" style="{self.graph.look(i)}"/></g>'
        )

    def heads(self) -> str:
        """An arrow head wherever drawn edges end."""
        found: dict[tuple[float, float, int], None] = {}
        for (source, target, _), port in list(zip(self.graph.edges, self.graph.ports, strict=True))[
            : self.graph.n_drawn
        ]:
            upwards = self.at[source][1] >= self.at[target][1]
            found[(*self.end(target, port, upwards), 1 if upwards else -1)] = None
        half = HEAD * 0.75
        return "".join(
            f'<path class="head" d="M{x:.1f} {y:.1f}l{-half} {sign * HEAD}h{2 * half}z"/>' for x, y, sign in found
        )

    def node(self, name: str) -> str:
        x, y = self.at[name]
        half, names = _width(name) / 2, self.graph.inputs.get(name, [])
        ports = "".join(
            f'<rect class="port" x="{self.beside(names, port) - 7}" y="{BOX / 2}" width="14" height="{PORT}"/>'
            f'<text class="port" x="{self.beside(names, port)}" y="{BOX / 2 + PORT / 2}">{_text(port)}</text>'
            for port in names
        )
        return (
            f'<g class="node" data-node="{html.escape(name)}" transform="translate({x:.1f} {y:.1f})">{ports}'
            f'<rect class="box" x="{-half:.1f}" y="{-BOX / 2}" width="{2 * half:.1f}" height="{BOX}" rx="5"/>'
            f'<text class="name">{_text(name)}</text></g>'
        )

    def content(self) -> str:
        """The edges, the weakest first, so that the strongest are on top, and the nodes."""
        graph = self.graph
        there = [i for i, (source, target, _) in enumerate(graph.edges) if source in self.at and target in self.at]
        sizes = [0.0] * len(graph.edges) if graph.scores is None else list(map(abs, graph.scores))
        order = sorted(there, key=lambda i: (i < graph.n_drawn, sizes[i]))
        return "".join(map(self.edge, order)) + self.heads() + "".join(map(self.node, self.at))

    def svg(self, kind: str, name: str) -> str:
        """The drawing for a page."""
        return (
            f'<svg class="{kind}" width="{self.width}" height="{self.height:.0f}" viewBox="0 0 {self.width} {self.height:.0f}" '
            f'role="group" aria-label="{html.escape(name)}">{self.content()}</svg>'
        )

    def picture(self, title: str, subtitle: str) -> str:
        """A document of its own, with title and legend, in light colours."""
        light = {name: pair[0] for name, pair in COLOURS.items()} | {"sans": FONT}
        style = re.sub(r"var\(--(\w+)\)", lambda match: light[match[1]], STYLE)
        lines = [("title", line) for line in wrap(title, int(self.width / 8))]
        lines += [("below", line) for line in wrap(subtitle, int(self.width / 6.6))]
        head = "".join(
            f'<text class="{kind}" x="4" y="{18 + 20 * i}">{_text(t)}</text>' for i, (kind, t) in enumerate(lines)
        )
        top = 20 * len(lines) + 14
        keys = [*self.graph.meanings(), *([("", self.graph.width_means)] if self.graph.width_means else [])]
        rows = "".join(
            f'<g transform="translate(4 {top + self.height + 18 + 20 * i:.0f})">'
            + f'<line class="line {kind}" x2="28" style="stroke-width:4"/>' * bool(kind)
            + f'<text class="below" x="36" y="4">{_text(said)}</text></g>'
            for i, (kind, said) in enumerate(keys)
        )
        height = top + self.height + 20 * len(keys) + 16
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" width="{self.width}" height="{height:.0f}" '
            f'viewBox="0 0 {self.width} {height:.0f}"><style>{style}</style>{head}'
            f'<g transform="translate(0 {top})">{self.content()}</g>{rows}</svg>\n'
        )


def _smooth(points: Sequence[Point]) -> str:
    """A curve through points of ascending or descending height, vertical at both ends, that goes to neither side of them."""
    slopes = [0.0]
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before, after = (x1 - x0) / (y1 - y0), (x2 - x1) / (y2 - y1)
        slopes.append(2 * before * after / (before + after) if before * after > 0 else 0.0)  # Fritsch and Butland 1984
    curve = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for ((x0, y0), m0), ((x1, y1), m1) in pairwise(zip(points, [*slopes, 0.0], strict=True)):
        third = (y1 - y0) / 3
        curve += f"C{x0 + m0 * third:.1f} {y0 + third:.1f} {x1 - m1 * third:.1f} {y1 - third:.1f} {x1:.1f} {y1:.1f}"
    return curve


def _width(name: str) -> float:
    return LETTER * len(name) + PADDING


def _text(text: str) -> str:
    return html.escape(text, quote=False)


SIZES = f"""
@media (max-width: {BREAK - 1}px) {{ .graph svg.wide {{ display: none; }} }}
@media (min-width: {BREAK}px) {{ .graph svg.narrow {{ display: none; }} }}
"""
BODY = """<div class="graph">{head}
<div class="both"><div class="drawn">{svgs}<p class="legend">{legend}</p></div>
<div class="chosen" role="status"><p class="hint">{hint}</p></div></div>
<script type="application/json" class="data">{data}</script>
</div>"""
