"""The snippets of a page, run one after the other in one folder, and what each of them shows.

Python snippets share a namespace. One shows what it prints. Then it shows, as a notebook does, the value of its last statement if
that is an expression, or the figure that it assigns to the name `figure`.

What a page states about a snippet stands below it as comments, `<!-- fact: "she" in text -->`, which readers do not see. An
expression that is not true is an error.

A comment right below a statement, `# raises ValueError: ...` or `# warns UserWarning: ...`, says what it raises or warns of, in
as many lines as it takes; `...` matches any text. A statement that does something else is an error.

Beside a page there may be files of its own, `page_*.safetensors`, which its snippets can read.

A `console` snippet has a command after each `$ `, and shows what the commands print. They must end with exit code 0, except one
that ends with `; echo $?`.
"""

import ast
import doctest
import html
import io
import os
import re
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any

BLOCK = re.compile(r"^```(python|console)[^\n]*\n(.*?)^```[^\n]*\n((?:<!-- fact: [^\n]* -->\n)*)", flags=re.M | re.S)
WIDTH, SHOW_CODE = 100, "; echo $?"


class SnippetError(Exception):
    """A snippet of a page that raised."""


@dataclass(frozen=True)
class Shown:
    """What one snippet shows: what it printed, and its value as HTML."""

    printed: str = ""
    value: str = ""

    def to_html(self) -> str:
        """The output below the snippet, or nothing."""
        printed = text_to_html(self.printed) if self.printed else ""
        return f'<div class="snippet-output">{printed}{self.value}</div>' if printed or self.value else ""


def snippets(text: str) -> list[tuple[str, str]]:
    """The language and the code of each block of a page that runs."""
    return [(block.group(1), block.group(2)) for block in BLOCK.finditer(text)]


def facts(text: str) -> list[list[str]]:
    """What is stated about each of these blocks, as expressions."""
    return [re.findall("<!-- fact: (.*) -->", block.group(3)) for block in BLOCK.finditer(text)]


def check(stated: list[str], name: str, namespace: dict[str, Any]) -> None:
    """Raises SnippetError for a fact that does not hold."""
    for fact in stated:
        if not eval(fact, namespace):
            raise SnippetError(f"{name}: it is not true that {fact}")


def commands(code: str) -> list[str]:
    """The commands of a console snippet, each in one line."""
    return [line.removeprefix("$ ") for line in code.replace("\\\n", "").splitlines() if line.strip()]


def text_to_html(text: str) -> str:
    """Text as a terminal shows it."""
    return f"<pre tabindex='0'><code>{html.escape(text.rstrip())}</code></pre>"


def figure_to_html(figure: str) -> str:
    """The place of a figure of plotly, given as JSON, which `figures.js` draws."""
    return f'<div class="plotly-figure" data-figure="{html.escape(figure, quote=True)}"></div>'


def value_to_html(value: Any) -> str:
    """A value as a notebook shows it: a plotly figure, an object with `_repr_html_`, or text."""
    if value is None:
        return ""
    if hasattr(value, "to_plotly_json"):
        return figure_to_html(value.to_json())
    rich = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return rich or text_to_html(repr(value))


def execute(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Runs a snippet in a namespace, as a notebook runs a cell; returns the value of its last statement.

    Raises:
        SnippetError: a statement did not raise, or not warn of, what the comment below it says.
    """
    lines, value = code.splitlines(), None
    for statement in ast.parse(code).body:
        comment = takewhile(lambda line: line.startswith("#"), lines[statement.end_lineno :])
        expected = " ".join(line.removeprefix("#").strip() for line in comment)
        tree: Any = ast.Expression(statement.value) if isinstance(statement, ast.Expr) else ast.Module([statement], [])
        step = compile(tree, name, "eval" if isinstance(statement, ast.Expr) else "exec")
        if not expected.startswith(("raises ", "warns ")):
            value = eval(step, namespace)
            continue
        value = None
        said, flags = outcome(step, namespace), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(f"{expected}\n", f"{said}\n", flags):
            raise SnippetError(f"{name}: expected that it {expected}\nit {said}\n\n{ast.unparse(statement)}")
    return value


def outcome(step: CodeType, namespace: dict[str, Any]) -> str:
    """What a statement raises or warns of, as `raises ValueError: ...`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            eval(step, namespace)
        except Exception as error:
            message = error.args[0] if isinstance(error, KeyError) else error  # whose str is a repr
            return f"raises {type(error).__name__}: {message}"
    return (
        "; ".join(f"warns {each.category.__name__}: {each.message}" for each in caught) or "raises and warns of nothing"
    )


def run(code: str, name: str, namespace: dict[str, Any]) -> Shown:
    """Runs a snippet, and returns what it shows.

    Raises:
        SnippetError: the snippet raised; the message has its name, the error and the code.
    """
    old, out = namespace.get("figure"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = execute(code, name, namespace)
        except SnippetError:
            raise
        except Exception as error:
            raise SnippetError(f"{name}: {type(error).__name__}: {error}\n\n{code}") from error
    new = namespace.get("figure")
    value = new if value is None and new is not old else value
    return Shown(out.getvalue(), value_to_html(value))


def run_commands(code: str, name: str) -> Shown:
    """Runs the commands of a console snippet, all of them `hooked-lm`, and shows what they print.

    Raises:
        SnippetError: a command of another program, or one that failed; the message has its name and output.
    """
    from typer.testing import CliRunner

    from hooked_lm.cli import app
    from hooked_lm.cli.output import console

    out = []
    before, console.width = console.width, WIDTH
    try:
        for command in commands(code):
            program, *arguments = shlex.split(command.removesuffix(SHOW_CODE))
            if program != "hooked-lm":
                raise SnippetError(f"{name}: {program} is not a command of this package\n\n{code}")
            done = CliRunner().invoke(app, arguments)
            if done.exit_code and not command.endswith(SHOW_CODE):
                raise SnippetError(f"{name}: exit code {done.exit_code}\n{done.output}\n\n{code}")
            out.append(f"{done.output}{done.exit_code}\n" if command.endswith(SHOW_CODE) else done.stdout)
    finally:
        console.width = before
    return Shown("".join(out).replace(f"{os.getcwd()}{os.sep}", ""))


@contextmanager
def empty_folder() -> Iterator[None]:
    """Works in an empty folder, which is removed afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def run_page(text: str, name: str, data: Iterable[Path] = ()) -> list[Shown]:
    """Runs the snippets of a page in order, in a folder with copies of these files that is removed afterwards."""
    files = [path.resolve() for path in data]
    import pandas
    import torch

    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    wide = ("display.width", 120, "display.max_columns", 12)
    with empty_folder(), pandas.option_context(*wide):
        for path in files:
            shutil.copy(path, path.name)
        for number, ((language, code), stated) in enumerate(zip(snippets(text), facts(text), strict=True), 1):
            called = f"{name}, snippet {number}"
            shown.append(run(code, called, namespace) if language == "python" else run_commands(code, called))
            check(stated, called, namespace)
    return shown
