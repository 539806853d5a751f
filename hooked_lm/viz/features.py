"""The page of a feature: top texts, a histogram of activations, and tables of tokens."""

import html
from collections.abc import Mapping, Sequence

from hooked_lm.viz.labels import token_label
from hooked_lm.viz.numbers import short
from hooked_lm.viz.token_views import SCRIPT, Snippet, snippet_table
from hooked_lm.viz.token_views import STYLE as TEXT_STYLE
from hooked_lm.viz.view import View

Histogram = tuple[Sequence[float], Sequence[float]]  # the edges of the bins, and the number of values in each

WIDTH, HEIGHT = 400, 110  # of the histogram, in units of its drawing

STYLE = """
h2 { font: 600 16px/1.4 var(--sans); margin: 22px 0 6px; }
h2:first-child { margin-top: 0; }
p, .none { color: var(--faint); margin: 0 0 8px; max-width: 60em; font-size: 13px; }
dl { display: flex; flex-wrap: wrap; gap: 6px 32px; margin: 0 0 8px; }
dt { color: var(--faint); font-size: 13px; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; max-width: 560px; height: auto; }
svg rect { fill: var(--up); }
svg text { fill: var(--faint); font: 11px var(--sans); }
svg line { stroke: var(--faint); }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 320px)); gap: 8px 32px; }
.tables table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
.tables td { padding: 2px 0; border-bottom: 1px solid var(--line); }
.tables td:first-child { font-family: var(--mono); }
.tables td:last-child { text-align: right; padding-left: 12px; }
"""


def feature_view(
    title: str,
    facts: Mapping[str, str],
    snippets: Sequence[Snippet],
    histogram: Histogram,
    tables: Mapping[str, Sequence[tuple[str, float]]],
    notes: Mapping[str, str] | None = None,
) -> View:
    """A page about a feature of a dictionary; all text is escaped.

    Args:
        facts: key figures.
        snippets: texts with a number for each token, strongest first.
        histogram: of the activations that are not zero.
        tables: tokens with numbers, by caption.
        notes: an explanation above some of the tables, by caption.

    >>> page = feature_view("feature 3", {"active at": "5 %"}, [], ([0.0, 1.0], [4.0]), {"promoted": [(" <b>", 1.0)]})
    >>> "·&lt;b&gt;" in page.to_html()
    True
    """
    texts = f'<div class="tokens-view">{snippet_table(snippets)}</div>'
    body = f"<h2>{html.escape(title)}</h2>{_facts(facts)}<h2>Top texts</h2>{texts}"
    body += f"<h2>Activations that are not zero</h2>{_bars(*histogram)}"
    notes = notes or {}
    groups: list[list[str]] = []
    for caption in tables:
        if caption in notes or not groups:
            groups.append([])
        groups[-1].append(caption)
    for group in groups:
        note = f"<p>{html.escape(notes[group[0]])}</p>" if group[0] in notes else ""
        shown = "".join(_table(caption, tables[caption]) for caption in group)
        body += f'<h2>{html.escape(" and ".join(group).capitalize())}</h2>{note}<div class="tables">{shown}</div>'
    about = f"{len(snippets)} texts, {len(tables)} tables of tokens"
    rows = len(snippets) + sum(max(len(tables[caption]) for caption in group) for group in groups)
    return View(title, body, STYLE + TEXT_STYLE, SCRIPT, height=min(1100, 500 + 30 * rows), text=about)


def _facts(facts: Mapping[str, str]) -> str:
    items = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{''.join(items)}</dl>"


def _table(caption: str, rows: Sequence[tuple[str, float]]) -> str:
    cells = (f"<tr><td>{token_label(token, 24)}</td><td>{short(value, sign=True)}</td></tr>" for token, value in rows)
    shown = "".join(cells) or '<tr><td class="none">no tokens</td></tr>'
    return f"<table><caption>{html.escape(caption)}</caption>{shown}</table>"


def _bars(edges: Sequence[float], counts: Sequence[float]) -> str:
    """A histogram as a drawing, with a title for each bar."""
    if not counts:
        return '<div class="none">the feature is active nowhere in these texts</div>'
    top, step = max(counts), WIDTH / len(counts)
    shown = []
    for i, n in enumerate(counts):
        tall = (HEIGHT - 34) * n / top
        says = f"{int(n):,} from {edges[i]:.3g} to {edges[i + 1]:.3g}"
        y = HEIGHT - 16 - tall
        box = f'x="{i * step:.1f}" y="{y:.1f}" width="{max(step - 1, 0.5):.1f}" height="{tall:.1f}"'
        shown.append(f"<rect {box}><title>{says}</title></rect>")
    base = HEIGHT - 16
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{int(sum(counts)):,} activations from {edges[0]:.3g} '
        f'to {edges[-1]:.3g}; the largest bar has {int(top):,}">{"".join(shown)}'
        f'<line x1="0" x2="{WIDTH}" y1="{base}" y2="{base}"/><text x="0" y="{HEIGHT - 3}">{edges[0]:.3g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 3}" text-anchor="end">{edges[-1]:.3g}</text>'
        f'<text x="{WIDTH}" y="10" text-anchor="end">most in a bar: {int(top):,}</text></svg>'
    )
