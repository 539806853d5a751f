"""What notebooks show of objects: a line of text and small HTML tables, escaped, in the notebook's own colours.

Nothing here needs an optional package.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from typing import NamedTuple

__all__ = ["NotebookRepr", "Table", "bytes_in_words", "details", "html_table", "short_repr", "shown_fields", "summary"]

CELL = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;background:none"
LINE = "border-bottom:1px solid color-mix(in srgb, currentColor 25%, transparent)"
MOST_ROWS = 200
MOST_LETTERS = 200  # of a value


class Table(NamedTuple):
    """The columns and rows of a table."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


class NotebookRepr:
    """An object that a notebook shows as a line of text and a table; `repr_table` gives the table.

    >>> class Box(NotebookRepr):
    ...     def repr_table(self):
    ...         return Table(("side", "length"), [("a", 2)])
    ...
    ...     def __repr__(self):
    ...         return "Box(1 side)"
    >>> "<code>Box(1 side)</code>" in Box()._repr_html_(), "<td" in Box()._repr_html_()
    (True, True)
    """

    __slots__ = ()

    def _repr_line(self) -> str:
        """The text above the table; "" for that of `repr`."""
        return ""

    def repr_table(self) -> Table | None:
        """The table of a notebook; None for the fields of a dataclass."""
        return None

    def _repr_parts(self) -> Sequence[str]:
        """The HTML under the text, if it is not just the table."""
        return ()

    def _repr_html_(self) -> str:
        parts = self._repr_parts() or [html_table(*(self.repr_table() or shown_fields(self)))]
        return summary(self._repr_line() or repr(self), *parts)

    def _display_(self) -> "Html":
        """What marimo shows, which has a picture of its own for every module of torch and every list."""
        return Html(self._repr_html_())


@dataclass(frozen=True)
class Html:
    """Something that a notebook shows as this HTML."""

    text: str

    def _repr_html_(self) -> str:
        return self.text


def shown_fields(of: object) -> Table:
    """The fields of a dataclass that its constructor takes, with their values in short."""
    names = [field.name for field in fields(of) if field.init] if is_dataclass(of) else []
    return Table(("", "value"), [(name, short_repr(getattr(of, name))) for name in names])


def short_repr(value: object) -> str:
    """The text of a value on one line: the shape of a tensor, the first letters of anything long.

    >>> short_repr(["a"] * 1000)[-9:]
    "'a', 'a'…"
    """
    shape = getattr(value, "shape", None)
    if shape is not None and getattr(value, "ndim", False):
        return f"{type(value).__name__.lower()} {[*shape]}"
    text = value if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


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


def summary(text: str, *parts: str) -> str:
    """A text, which is escaped, and HTML under it."""
    shown = f"<pre>{escape(text)}</pre>" if "\n" in text else f"<p><code>{escape(text)}</code></p>"
    return f'<div style="overflow-x:auto">{shown}{"".join(parts)}</div>'


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
