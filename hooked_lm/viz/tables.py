"""Small HTML tables for notebooks: strings only, escaped, in the notebook's own colours."""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["bytes_in_words", "details", "html_table", "summary"]

CELL = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;background:none"
LINE = "border-bottom:1px solid color-mix(in srgb, currentColor 25%, transparent)"
MOST_ROWS = 200


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], most: int = MOST_ROWS) -> str:
    """A table of these columns; everything is escaped, and rows after the first `most` are counted.

    >>> html_table(["site"], [["<b>"]]).count("&lt;b&gt;")
    1
    """
    listed = [list(row) for row in rows]
    head = "".join(f'<th scope="col" style="{CELL};{LINE}">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(str(cell))}</td>' for cell in row) + "</tr>"
        for row in listed[:most]
    )
    more = f"<p>and {len(listed) - most:,} more rows</p>" if len(listed) > most else ""
    style = "border-collapse:collapse;font-size:0.9em;color:inherit;background:none"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}'


def details(title: str, inner: str, is_open: bool = False) -> str:
    """A part of a page that folds; `inner` is HTML, the title is escaped."""
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary>{inner}</details>"


def summary(line: str, *parts: str) -> str:
    """A line of text, which is escaped, and HTML under it."""
    return f'<div style="overflow-x:auto"><p><code>{escape(line)}</code></p>{"".join(parts)}</div>'


def bytes_in_words(n: int) -> str:
    """A number of bytes with the unit that suits it.

    >>> bytes_in_words(512), bytes_in_words(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
