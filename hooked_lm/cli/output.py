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

    from hooked_lm.results import Label
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
            row = {"position": number, **({"token": token} if token else {})} | row | {"position": number}
        rows.append(row)
    return rows


def show_result(
    largest: "pd.DataFrame", table: "pd.DataFrame", axes: Mapping[str, Sequence["Label"]], formats: Mapping[str, str]
) -> dict[str, object]:
    """Prints the largest cells of a result, and how many cells there are; returns it as data."""
    from hooked_lm.reports.sweep import readable

    show_table(records(readable(largest)), formats)
    found = result_data(cells(largest), table, axes)
    if found["shown"] != found["of"]:
        say(f"{found['shown']} of {found['of']:,}; --json has all")
    return found


def result_data(
    largest: Sequence[object], table: "pd.DataFrame", axes: Mapping[str, Sequence["Label"]]
) -> dict[str, object]:
    """A result as data, of one form in all commands: what people see, `shown` of how many cells that is, and all of them.

    `values` has for each number of the table nested lists in the order of `axes`, null where there is no cell.
    """
    from hooked_lm.reports.sweep import parts_of_position

    numbers = table.drop(columns=list(axes)).astype("float32")
    sizes = [len(labels) for labels in axes.values()]
    # as text and back: the digits that tell numbers of single precision apart, and no more
    values = {name: column.to_numpy().astype(str).astype(float).reshape(sizes) for name, column in numbers.items()}
    places = [parts_of_position(label) for label in axes.get("position", ())]
    tokens = {"tokens": [token for _, token in places]} if any(token for _, token in places) else {}
    labels = {**axes, **({"position": [number for number, _ in places]} if places else {})}
    n_cells = int(numbers.notna().any(axis=1).sum())
    return {"largest": largest, "shown": len(largest), "of": n_cells, "axes": labels, **tokens, "values": values}


def say_stored(stored: "Shards", started: float, **facts: object) -> dict[str, object]:
    """Says what is in a folder of shards, and how many were there before, if any; returns the same as data, with the number of
    those that are `written` since, `kept` and `missing`."""
    from hooked_lm.shards.records import record_path

    slack = 0.1  # seconds: times of files are coarse
    written = sum(record_path(stored.path, shard).stat().st_mtime >= started - slack for shard in stored.shards)
    kept = len(stored.shards) - written
    say(escape(str(stored)))
    if kept:
        say(f"resumed: {kept} of {len(stored.shards)} shards were there already")
    shards = {"written": written, "kept": kept, "missing": len(stored.missing)}
    return {"path": stored.path.resolve(), "complete": stored.is_complete, "shards": shards, **facts}


def _cell(value: object, form: str) -> str:
    if isinstance(value, float) and value != value:
        return "-"
    return escape(format(value, form) if form else str(value))


def as_text(result: object) -> str:
    """JSON in ASCII, short lists and objects on a line; what is not a number (NaN, infinity) is null.

    Raises AssertionError for an object that JSON has no form for.
    """
    return _lines(_plain(result))


def _lines(value: object, indent: str = "\n") -> str:
    """A list or an object of others has a line for each entry."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(part, (dict, list)) and part for part in parts):
        return json.dumps(value, allow_nan=False)
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(parts)
    inner = f"{indent}  "
    body = f",{inner}".join(name + _lines(part, inner) for name, part in zip(names, parts, strict=True))
    return f"{{{inner}{body}{indent}}}" if isinstance(value, dict) else f"[{inner}{body}{indent}]"


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
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise AssertionError(f"JSON has no form for a {type(value).__name__}: {value!r}")
