"""What is printed: lines and tables for people on `console`, and JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.shards import Shards

console = Console(highlight=False)


def to_stderr(line: str) -> None:
    _print(Console(stderr=True, highlight=False), line)


def say(line: str) -> None:
    """Prints a line of rich markup."""
    _print(console, line)


def _print(to: Console, line: str) -> None:
    """A terminal gets line breaks between words; a path that is longer than a line, and lines for a file or a pipe, get none."""
    longest = max((cell_len(word) for word in Text.from_markup(line).plain.split()), default=0)
    to.print(line, soft_wrap=not to.is_terminal or longest > to.width)


def say_path(label: str, path: Path, after: str = "") -> None:
    """Prints where a file was written."""
    say(f"{label} [bold]{escape(str(path.resolve()))}[/]{after}")


def shown(label: str, value: object) -> None:
    """A line with its name in bold."""
    say(f"[bold]{escape(label)}[/]  {escape(str(value))}")


def show_table(
    rows: Sequence[Mapping[str, object]], formats: Mapping[str, str] | None = None, title: str | None = None
) -> None:
    """Prints rows of one form, numbers and columns with a format to the right.

    Nothing is cut off in a narrow terminal: texts are broken, numbers are not.
    """
    formats = formats or {}
    table = Table(title=title and escape(title), title_justify="left", show_edge=False, pad_edge=False)
    columns = {name: [_cell(row[name], formats.get(name, "")) for row in rows] for name in (rows[0] if rows else ())}
    for name, cells in columns.items():
        if name in formats or isinstance(rows[0][name], (int, float)):
            table.add_column(escape(name), justify="right", overflow="fold", min_width=max(map(len, cells)))
        else:
            table.add_column(escape(name), overflow="fold")
    for line in zip(*columns.values(), strict=True):
        table.add_row(*line)
    console.print(table)


def records(frame: "pd.DataFrame") -> list[dict[str, object]]:
    """The rows of a table."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def cells(frame: "pd.DataFrame") -> list[dict[str, object]]:
    """The rows of a table of cells, with a position as its number and its token."""
    from hooked_lm.reports.sweep import parts_of_position

    rows = []
    for row in records(frame):
        if "position" in row:
            number, token = parts_of_position(row["position"])  # type: ignore[arg-type]
            row = {"position": number, "token": token} | row | {"position": number}
        rows.append(row)
    return rows


def say_resumed(shards: "Shards", started: float) -> dict[str, int]:
    """Says how many shards were there before, if any; returns the numbers of those that are `written` since and `kept`."""
    from hooked_lm.shards.records import record_path

    slack = 0.1  # seconds: times of files are coarse
    written = sum(record_path(shards.path, shard).stat().st_mtime >= started - slack for shard in shards.shards)
    kept = len(shards.shards) - written
    if kept:
        say(f"resumed: {kept} of {len(shards.shards)} shards were there already")
    return {"written": written, "kept": kept}


def _cell(value: object, form: str) -> str:
    if isinstance(value, float) and value != value:
        return "-"
    return escape(format(value, form) if form else str(value))


def as_text(result: object) -> str:
    """JSON in ASCII; what is not a number (NaN, infinity) is null."""
    return json.dumps(_plain(result), allow_nan=False, indent=2)


def _plain(value: object) -> object:
    """Dicts, lists, strings and numbers alone."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # of tensors, arrays and their numbers
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
