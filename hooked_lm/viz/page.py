"""Reports: self-contained HTML files that need no network."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hooked_lm.extras import require_extra
from hooked_lm.files import replacing
from hooked_lm.viz.parts import Part, part_html, text_html
from hooked_lm.viz.theme import dark_colours, light_colours
from hooked_lm.viz.view import FRAMES, UNPACK, View, as_json, document, packed


@dataclass(frozen=True)
class Section:
    """A heading and the parts below it, in order."""

    title: str
    parts: tuple[Part, ...]

    def __init__(self, title: str, *parts: Part) -> None:
        object.__setattr__(self, "title", title)
        object.__setattr__(self, "parts", parts)


def report(title: str, sections: Iterable[Section], path: str | os.PathLike[str], lead: str = "") -> Path:
    """Writes a page of sections to `path` and returns the path. `lead` is the text below the title.

    Text is escaped, with `code` between backticks. The page loads nothing; its content security policy forbids it. It is light or
    dark, as its reader prefers. Arrow keys move among the values of a figure that has the focus. The page holds plotly.js
    compressed (about 2 MB) if it has figures.
    Raises OSError if the file cannot be written, TypeError for sections or parts of an unknown type.

    >>> import tempfile, torch
    >>> from hooked_lm.viz import Section, heatmap, report
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     section = Section("A matrix", "Ten by ten.", heatmap(torch.randn(10, 10)))
    ...     "Ten by ten." in report("Noise", [section], f"{folder}/noise.html").read_text(
    ...         encoding="utf-8"
    ...     )
    True
    """
    sections = list(sections)
    if wrong := [type(section).__name__ for section in sections if not isinstance(section, Section)]:
        raise TypeError(f"sections are Section(title, *parts), got {wrong[0]}")
    parts = "".join(_section(number, section) for number, section in enumerate(sections, 1))
    below = f'<p class="lead">{text_html(lead)}</p>' if lead else ""
    body = f"<main>\n<header><h1>{text_html(title)}</h1>{below}</header>\n{parts}{FOOTER}</main>"
    return _written(title, body, STYLE, path)


def write_html(picture: Part, path: str | os.PathLike[str], title: str = "") -> Path:
    """Writes a page with one figure, view or table and returns its path.

    The page is like those of `report`: it loads nothing, is light or dark, and has half the size of `figure.write_html(path)` of
    plotly. `title` is that of the browser's window. Raises OSError if the file cannot be written, TypeError for an unknown part.

    >>> import tempfile, torch
    >>> from hooked_lm.viz import heatmap, write_html
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html(
    ...         heatmap(torch.randn(10, 10), title="Noise"), f"{folder}/noise.html"
    ...     ).name
    'noise.html'
    """
    if isinstance(picture, View):
        return picture.write_html(path)
    body = f"<main>{part_html(picture, 'figure-1')}</main>"
    return _written(title or "hooked_lm", body, STYLE + ALONE, path)


def _written(title: str, body: str, style: str, path: str | os.PathLike[str]) -> Path:
    """Writes a page with figures."""
    script = UNPACK + FRAMES + Path(__file__).with_name("figures.js").read_text(encoding="utf-8")
    colours = as_json({"light": light_colours(), "dark": dark_colours()})
    page = document(title, body + _plotly(body), style, f"{script}drawAll({colours});")
    with replacing(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return Path(path)


def _section(number: int, section: Section) -> str:
    parts = (part_html(part, f"figure-{number}-{i}") for i, part in enumerate(section.parts, 1))
    return f"<section><h2>{text_html(section.title)}</h2>{''.join(parts)}</section>\n"


def _plotly(parts: str) -> str:
    """The library that draws the figures, compressed; nothing if there are none."""
    if "data-figure=" not in parts:
        return ""
    return f'<script type="text/plain" id="plotly">{_packed_plotly()}</script>'


@cache
def _packed_plotly() -> str:
    return packed(require_extra("plotly.offline", "viz").get_plotlyjs())


FOOTER = "<footer>Written by hooked_lm. This file is complete: it needs no network.</footer>\n"

STYLE = """
body { font: 18px/1.6 var(--serif); text-rendering: optimizeLegibility; }
main { max-width: 1040px; margin: 0 auto; padding: 64px 32px 40px; }
h1 { font: 700 38px/1.2 var(--serif); letter-spacing: -.01em; margin: 0 0 16px; max-width: 24em; text-wrap: balance; }
h2 { font: 600 22px/1.3 var(--sans); letter-spacing: -.01em; margin: 60px 0 12px; padding-top: 20px;
  border-top: 1px solid var(--line); }
p { margin: 0 0 16px; max-width: 43em; }
p.lead { font-size: 20px; color: var(--soft); margin-bottom: 0; }
code { font: .84em var(--mono); background: var(--panel); border-radius: 4px; padding: .12em .35em; }
figure { margin: 24px 0 32px; overflow-x: auto; }
.drawing { font: 14px/1.5 var(--sans); color: var(--faint); }
.said { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
figcaption { font: 14px/1.5 var(--sans); color: var(--faint); max-width: 56em; margin-top: 4px; }
.facts { display: flex; flex-wrap: wrap; gap: 20px 56px; margin: 28px 0; }
.facts dt { font: 13px/1.4 var(--sans); color: var(--faint); }
.facts dd { margin: 0; font: 600 28px/1.3 var(--sans); font-variant-numeric: tabular-nums; letter-spacing: -.02em; }
.facts dd.note { font: 13px/1.4 var(--sans); color: var(--faint); letter-spacing: 0; }
.strip { display: flex; align-items: baseline; margin: 0 0 8px; font: 14px/1.5 var(--sans); }
.strip b { flex: 0 0 88px; font-weight: 400; color: var(--faint); }
.tokens { display: flex; flex-wrap: wrap; gap: 4px; }
.strip .turn { display: block; margin: 6px 0 2px; font-size: 12px; color: var(--faint); }
.token { font: 13px/1.4 var(--mono); background: var(--panel); border-radius: 4px; padding: 2px 6px; white-space: pre; }
.token.marked { background: var(--marked); box-shadow: inset 0 -2px var(--marker); }
.strip + p, .strip + figure, .strip + .table { margin-top: 20px; }
.table { overflow-x: auto; margin: 20px 0 28px; }
table { border-collapse: collapse; font: 14px/1.5 var(--sans); font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--faint); border-bottom: 1px solid var(--strong); }
th, td { padding: 6px 28px 6px 0; white-space: nowrap; }
td { border-bottom: 1px solid var(--line); }
.number { text-align: right; }
footer { margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--line);
  font: 13px/1.5 var(--sans); color: var(--faint); }
@media (max-width: 640px) { main { padding: 32px 16px; } h1 { font-size: 30px; } .strip { display: block; } }
@media print { main { padding: 0; } section { break-inside: avoid-page; } }
"""
ALONE = "main { padding: 16px; } figure { margin: 0; }\n"  # a page of one part
