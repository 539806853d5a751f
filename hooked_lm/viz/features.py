"""The page of a feature: top texts, a histogram of activations, and tables of tokens."""

import html
import math
from collections.abc import Mapping, Sequence

from hooked_lm.viz.labels import token_label
from hooked_lm.viz.numbers import aligned
from hooked_lm.viz.token_views import SCRIPT, Snippet, snippet_table
from hooked_lm.viz.token_views import STYLE as TEXT_STYLE
from hooked_lm.viz.view import View

Histogram = tuple[Sequence[float], Sequence[float]]  # the edges of the bins, and the number of values in each

MOST_ROWS = 5000  # of an index
WIDTH, HEIGHT = 400, 110  # of the histogram, in units of its drawing

INDEX = "index.html"
CLOSE = (
    "The cosine of the directions that the dictionary writes: features that nearly coincide, or that split one meaning."
)

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
nav { display: flex; gap: 24px; margin: 0 0 12px; }
a { color: var(--focus); }
.near { display: flex; flex-wrap: wrap; gap: 4px 24px; list-style: none; margin: 0; padding: 0; }
.index { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.index td, .index th { padding: 3px 20px 3px 0; text-align: right; border-bottom: 1px solid var(--line); }
.index td:last-child, .index th:last-child { text-align: left; }
.index code { font: 13px/1.5 var(--mono); background: var(--panel); border-radius: 3px; padding: 1px 4px; }
.index button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
.index [aria-sort] button { text-decoration: underline; }
.near b { font-variant-numeric: tabular-nums; }
"""


# The largest number of a column comes first, and at the next click the smallest; rows without a number are last.
SORT = """
const heads = [...document.querySelectorAll(".index th")], body = document.querySelector(".index tbody");
for (const [i, head] of heads.entries()) head.firstChild.addEventListener("click", () => {
  const falls = head.ariaSort !== "descending", sign = falls ? -1 : 1;
  heads.forEach(each => each.ariaSort = each === head ? (falls ? "descending" : "ascending") : null);
  const of = row => row.cells[i].dataset.value ?? row.cells[i].textContent, missing = row => of(row) === "nan";
  body.append(...[...body.rows].sort((a, b) => missing(a) - missing(b) || sign * (of(a) - of(b) || of(a).localeCompare(of(b)))));
});
"""


def feature_view(
    title: str,
    facts: Mapping[str, str],
    snippets: Sequence[Snippet],
    histogram: Histogram,
    tables: Mapping[str, Sequence[tuple[str, float]]],
    notes: Mapping[str, str] | None = None,
    neighbours: Sequence[tuple[int, float]] = (),
    feature: int | None = None,
    links: Mapping[int, str] | None = None,
) -> View:
    """A page about a feature of a dictionary; all text is escaped.

    Args:
        facts: key figures.
        snippets: texts with a number for each token, strongest first.
        histogram: of the activations that are not zero.
        tables: tokens with numbers, by caption.
        notes: an explanation above some of the tables, by caption.
        neighbours: other features, with the cosines of the directions.
        feature, links: the index of the feature, and the files of the pages of several, in their order: the page leads to the
            previous and the next one, to the index and to the neighbours that have one.

    >>> page = feature_view(
    ...     "feature 3",
    ...     {"active at": "5 %"},
    ...     [],
    ...     ([0.0, 1.0], [4.0]),
    ...     {"promoted": [(" <b>", 1.0)]},
    ... )
    >>> "·&lt;b&gt;" in page.to_html()
    True
    """
    texts = f'<div class="tokens-view">{snippet_table(snippets)}</div>'
    links = links or {}
    body = f"{_navigation(feature, links)}<h2>{html.escape(title)}</h2>{_facts(facts)}<h2>Top texts</h2>{texts}"
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
    if neighbours:
        near = (f"<li>{_linked(other, links)} <b>{cosine:.2f}</b></li>" for other, cosine in neighbours)
        body += f"<h2>Nearest features</h2><p>{CLOSE}</p><ol class='near'>{''.join(near)}</ol>"
    about = f"{len(snippets)} texts, {len(tables)} tables of tokens"
    rows = len(snippets) + sum(max(len(tables[caption]) for caption in group) for group in groups)
    return View(title, body, STYLE + TEXT_STYLE, SCRIPT, height=min(1100, 500 + 30 * rows), text=about)


def feature_card(
    facts: Mapping[str, str], snippets: Sequence[Snippet], tables: Mapping[str, Sequence[tuple[str, float]]]
) -> str:
    """What a page says of one of its features, as HTML with all text escaped: as `feature_view`, in short.

    >>> feature_card({"active at": "5 %"}, [], {"promoted": [(" <b>", 1.0)]}).count(
    ...     "&lt;b&gt;"
    ... )
    1
    """
    shown = "".join(_table(caption, tables[caption]) for caption in tables)
    texts = f'<h4>Top texts</h4><div class="tokens-view">{snippet_table(snippets)}</div>' if snippets else ""
    return f'{_facts(facts)}{texts}<div class="tables">{shown}</div>'


def features_index(
    title: str,
    features: Sequence[int],
    columns: Mapping[str, Sequence[float]],
    tokens: Sequence[Sequence[str]],
    links: Mapping[int, str],
) -> View:
    """A page with a row for each feature, which a click on the head of a column sorts; all text is escaped.

    Args:
        columns: the numbers of each feature, by name; cells are empty where a number is NaN.
        tokens: some tokens of each feature.
        links: the files of the pages of features. Those with a page come first; at most 5,000 rows are shown.

    >>> page = features_index(
    ...     "Features", [0, 1], {"density": [0.5, 0.25]}, [[" a"], []], {1: "feature-1.html"}
    ... )
    >>> page.text, page.body.index("feature-1.html") < page.body.index("feature 0")
    ('2 features, 1 page', True)
    """
    rows = sorted(range(len(features)), key=lambda row: features[row] not in links)[:MOST_ROWS]
    texts = {name: aligned(values) for name, values in columns.items()}
    names = ["feature", *columns, "tokens"]
    heads = "".join(f'<th scope="col"><button>{html.escape(name)}</button></th>' for name in names)
    body = []
    for row in rows:
        cells = [f'<td data-value="{features[row]}">{_linked(features[row], links)}</td>']
        numbers = {name: "" if math.isnan(values[row]) else texts[name][row] for name, values in columns.items()}
        cells += [f'<td data-value="{columns[name][row]}">{text}</td>' for name, text in numbers.items()]
        shown = " ".join(f"<code>{token_label(token, 24)}</code>" for token in tokens[row])
        body.append(f"<tr>{''.join(cells)}<td>{shown}</td></tr>")
    left = f" The first {MOST_ROWS:,} of {len(features):,} are shown." if len(features) > MOST_ROWS else ""
    lead = (
        f"<p>A click on the head of a column sorts the table. Features with a page are links, and come first.{left}</p>"
    )
    table = f'<table class="index"><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    about = f"{len(features)} features, {len(links)} page{'s' * (len(links) != 1)}"
    return View(title, f"<h2>{html.escape(title)}</h2>{lead}{table}", STYLE, SORT, height=700, text=about)


def _navigation(feature: int | None, links: Mapping[int, str]) -> str:
    """Links to the index, and to the pages before and after that of the feature."""
    if feature is None or feature not in links:
        return ""
    order = list(links)
    place = order.index(feature)
    near = {"prev": order[place - 1] if place else None, "next": order[place + 1] if place + 1 < len(order) else None}
    words = {"prev": "← feature {}", "next": "feature {} →"}
    shown = [
        f'<a rel="{to}" href="{links[of]}">{words[to].format(of)}</a>' for to, of in near.items() if of is not None
    ]
    return f'<nav><a href="{INDEX}">all features</a>{"".join(shown)}</nav>'


def _linked(feature: int, links: Mapping[int, str]) -> str:
    name = f"feature {feature}"
    return f'<a href="{links[feature]}">{name}</a>' if feature in links else name


def _facts(facts: Mapping[str, str]) -> str:
    items = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{''.join(items)}</dl>"


def _table(caption: str, rows: Sequence[tuple[str, float]]) -> str:
    numbers = aligned([value for _, value in rows], sign=True)
    cells = (
        f"<tr><td>{token_label(token, 24)}</td><td>{number}</td></tr>"
        for (token, _), number in zip(rows, numbers, strict=True)
    )
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
