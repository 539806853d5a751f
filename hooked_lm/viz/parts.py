"""The parts of a section, and their HTML."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

from hooked_lm.extras import lazy_import

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")
    go = lazy_import("plotly.graph_objects", "viz")


from hooked_lm.viz.labels import Who, token_label, who
from hooked_lm.viz.numbers import rounded
from hooked_lm.viz.view import View


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with a caption below it."""

    figure: "go.Figure"
    caption: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """Highlighted key figures with labels, `KeyFigures({"prompt pairs": "8"})`; `notes` are shown below them."""

    items: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRow:
    """A prompt, token by token, with some positions marked; of a conversation `turns` say whose each token is, turn by turn.

    Raises ValueError for another number of turns than of tokens.
    """

    label: str
    tokens: Sequence[str]
    marked: Iterable[int] = ()
    turns: Sequence[Who | None] | None = None

    def __post_init__(self) -> None:
        if self.turns is not None and len(self.turns) != len(self.tokens):
            raise ValueError(f"{len(self.turns)} turns for {len(self.tokens)} tokens")


Part: TypeAlias = "str | pd.DataFrame | go.Figure | CaptionedFigure | KeyFigures | TokenRow | View"


def part_html(part: object, figure_id: str) -> str:
    """The HTML of one part; `figure_id` names a figure on its page. Raises TypeError for an unknown part."""
    if isinstance(part, View):
        return f"<figure>{part.frame()}</figure>"
    if isinstance(part, str):
        return f"<p>{text_html(part)}</p>"
    if isinstance(part, pd.DataFrame):
        return _table(part)
    if isinstance(part, go.Figure):
        return _plate(CaptionedFigure(part), figure_id)
    if isinstance(part, CaptionedFigure):
        return _plate(part, figure_id)
    if isinstance(part, KeyFigures):
        return f'<dl class="facts">{"".join(_fact(name, part) for name in part.items)}</dl>'
    if isinstance(part, TokenRow):
        return _strip(part)
    raise TypeError(
        "a page is made of text, tables (pandas), figures (plotly), CaptionedFigure, KeyFigures, TokenRow and View; "
        f"got {type(part).__name__}"
    )


def text_html(text: str) -> str:
    """Escaped text, with code between backticks.

    >>> text_html("`a < b` & more")
    '<code>a &lt; b</code> &amp; more'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _fact(name: str, facts: KeyFigures) -> str:
    note = f'<dd class="note">{text_html(facts.notes[name])}</dd>' if name in facts.notes else ""
    return f"<div><dt>{text_html(name)}</dt><dd>{text_html(facts.items[name])}</dd>{note}</div>"


def _plate(plate: CaptionedFigure, figure_id: str) -> str:
    """A place for the figure, and what is drawn there by a script of the page."""
    drawn = str(plate.figure.to_json()).replace("<", "\\u003c")
    layout = plate.figure.layout
    size = f"min-height:{int(layout.height or 450)}px;min-width:{int((layout.meta or {}).get('min_width', 0))}px"
    about = html.escape(
        html.unescape(". ".join(filter(None, [layout.title.text, layout.title.subtitle.text])) or "figure")
    )
    place = (
        f'<div id="{figure_id}" class="drawing" role="figure" aria-label="{about}" '
        f'data-figure="{figure_id}-data" style="{size}"></div>'
    )
    data = f'<script type="application/json" id="{figure_id}-data">{drawn}</script>'
    caption = f"<figcaption>{text_html(plate.caption)}</figcaption>" if plate.caption else ""
    return f"<figure>{place}{data}{caption}</figure>"


def _table(table: "pd.DataFrame") -> str:
    head = "".join(f'<th class="{_kind(table[name])}">{text_html(str(name))}</th>' for name in table.columns)
    rows = []
    for row in table.itertuples(index=False):
        cells = (f'<td class="{_kind([value])}">{_cell(value)}</td>' for value in row)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _kind(values: Iterable[Any]) -> str:
    return "number" if all(isinstance(value, Real) for value in values) else "text"


def _cell(value: Any) -> str:
    return rounded(value, 3) if isinstance(value, float) else text_html(str(value))


def _strip(strip: TokenRow) -> str:
    marked = set(strip.marked)
    tokens = [
        f'<span class="token{" marked" if pos in marked else ""}">{token_label(token)}</span>'
        for pos, token in enumerate(strip.tokens)
    ]
    parts = []
    for label, several in groupby(range(len(tokens)), key=lambda pos: strip.turns[pos] if strip.turns else None):
        name = "" if label is None else f'<span class="turn {html.escape(label[1])}">{html.escape(who(label))}</span>'
        parts.append(f'{name}<span class="tokens">{"".join(tokens[pos] for pos in several)}</span>')
    return f'<div class="strip"><b>{text_html(strip.label)}</b><div>{"".join(parts)}</div></div>'
