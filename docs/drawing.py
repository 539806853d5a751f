"""The drawing of a block and its sites, made from the hook points of a model."""

from html import escape
from itertools import groupby

from hooked_lm.models.base import BaseModel

ROW, WIDTH, STREAM, LEFT, RIGHT = 24, 760, 40, 96, 744
STYLE = """
  text { font: 13px ui-monospace, monospace; fill: currentColor }
  .axes { opacity: 0.7; text-anchor: end }
  .part { font-weight: bold }
  .stream { stroke: #3f7fbf; stroke-width: 5; fill: none }
  .point { fill: #3f7fbf; stroke: #3f7fbf; stroke-width: 1.5 }
  .on-demand { fill: none; stroke-dasharray: 2.5 2 }
  .box { fill: currentColor; fill-opacity: 0.05; stroke: currentColor; stroke-opacity: 0.4; rx: 6px }
  .plus { fill: var(--md-default-bg-color, #fff); stroke: currentColor }
  .arrow { stroke: currentColor; stroke-width: 1.4; fill: none }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text whose middle is at height y."""
    return f'<text x="{x}" y="{y + 4.5}" class="{kind}">{escape(words)}</text>'


def site_row(name: str, dims: tuple[str, ...], on_demand: bool, x: float, y: float) -> str:
    """A site: its point, its name and its axes."""
    point = f'<circle cx="{x}" cy="{y}" r="5" class="point{" on-demand" if on_demand else ""}"/>'
    return point + text(x + 14, y, name) + text(RIGHT - 12, y, f"[{', '.join(dims)}]", "axes")


def branch(rows: list[tuple[str, str, tuple[str, ...], bool]], y: float) -> tuple[list[str], float]:
    """A sublayer that begins at height y, from rows (part, leaf, axes, on demand), and the height at which it ends."""
    out, top = [], y
    y += ROW / 2
    for part, sites in groupby(rows, key=lambda row: row[0]):
        if part:
            y += ROW * 0.2
            out.append(text(LEFT + 10, y + ROW * 0.4, part, "part"))
            y += ROW
        for _, leaf, dims, on_demand in sites:
            out.append(site_row(leaf, dims, on_demand, LEFT + (38 if part else 20), y + ROW * 0.4))
            y += ROW
    bottom = y + ROW * 0.2
    box = f'<rect x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{bottom - top}" class="box"/>'
    into = f'<path d="M{STREAM} {top + 14} H{LEFT - 6} m-6 -4 l6 4 l-6 4" class="arrow"/>'
    back = f'<path d="M{LEFT} {bottom - 12} H{STREAM + 16} m6 -4 l-6 4 l6 4" class="arrow"/>'
    plus = f'<circle cx="{STREAM}" cy="{bottom - 12}" r="9" class="plus"/>'
    plus += f'<path d="M{STREAM - 5} {bottom - 12} h10 m-5 -5 v10" class="arrow"/>'
    return [box, into, back, plus, *out], bottom


def block_drawing(model: BaseModel, layer: int = 0) -> str:
    """An SVG of a block of a decoder: the residual stream on the left, downwards, and beside it what the sublayers compute."""
    prefix = f"blocks.{layer}."
    rows = []
    for name, point in model.all_points().items():
        if name.startswith(prefix):
            part, _, leaf = name.removeprefix(prefix).rpartition(".")
            rows.append((part, leaf, point.dims, point.on_demand))
    y, out = 20.0, []
    for of_stream, found in groupby(rows, key=lambda row: not row[0] and row[1].startswith("hook_resid_")):
        if of_stream:
            for _, leaf, dims, on_demand in found:
                out.append(site_row(leaf, dims, on_demand, STREAM, y))
                y += ROW
        else:
            drawn, y = branch(list(found), y)
            out += drawn
            y += ROW
    stream = f'<path d="M{STREAM} 6 V{y - 4} m-7 -9 l7 9 l7 -9" class="stream"/>'
    legend = site_row("a site: its name and its axes", (), False, STREAM, y + ROW)
    legend += site_row("a site on demand: computed only if something listens to it", (), True, STREAM, y + 2 * ROW)
    title = f"The residual stream of block {layer}, its sublayers and their sites"
    box = f"0 0 {WIDTH} {y + 3 * ROW:.0f}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{title}">'
    body = "\n".join([stream, *out, legend.replace("[]", "")])
    return f"{svg}\n<style>{STYLE}</style>\n{body}\n</svg>\n"
