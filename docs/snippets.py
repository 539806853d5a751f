"""The Python snippets of a page, run one after the other in one namespace, and what each of them shows.

A snippet shows what it prints. Then it shows, as a notebook does, the value of its last statement if that is an expression, or
the figure that it assigns to the name `figure`.
"""

import ast
import html
import io
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```[^\n]*\n", flags=re.M | re.S)


class SnippetError(Exception):
    """A snippet of a page that raised."""


@dataclass(frozen=True)
class Shown:
    """What one snippet shows: what it printed, and its value as HTML."""

    printed: str = ""
    value: str = ""

    def to_html(self) -> str:
        """The output below the snippet, or nothing."""
        printed = f"<pre tabindex='0'><code>{html.escape(self.printed.rstrip())}</code></pre>" if self.printed else ""
        return f'<div class="snippet-output">{printed}{self.value}</div>' if printed or self.value else ""


def snippets(text: str) -> list[str]:
    """The Python blocks of a page."""
    return [block.group(1) for block in BLOCK.finditer(text)]


def value_to_html(value: Any) -> str:
    """A value as a notebook shows it: a plotly figure, an object with `_repr_html_`, or text."""
    if value is None:
        return ""
    if hasattr(value, "to_plotly_json"):
        return f'<div class="plotly-figure" data-figure="{html.escape(value.to_json(), quote=True)}"></div>'
    rich = value._repr_html_() if hasattr(value, "_repr_html_") else None
    return rich or f"<pre tabindex='0'><code>{html.escape(repr(value))}</code></pre>"


def run(code: str, name: str, namespace: dict[str, Any]) -> Shown:
    """Runs a snippet in a namespace, as a notebook runs a cell.

    Raises:
        SnippetError: the snippet raised; the message has its name, the error and the code.
    """
    body = ast.parse(code).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    old, out = namespace.get("figure"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(ast.Module(body, []), name, "exec"), namespace)
            value = eval(compile(last, name, "eval"), namespace) if last else None
        except Exception as error:
            raise SnippetError(f"{name}: {type(error).__name__}: {error}\n\n{code}") from error
    new = namespace.get("figure")
    value = new if value is None and new is not old else value
    return Shown(out.getvalue(), value_to_html(value))


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


def run_page(text: str, name: str) -> list[Shown]:
    """Runs the snippets of a page in order, in an empty folder that is removed afterwards."""
    import pandas
    import torch

    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    wide = ("display.width", 120, "display.max_columns", 12)
    with empty_folder(), pandas.option_context(*wide):
        for number, code in enumerate(snippets(text), 1):
            shown.append(run(code, f"{name}, snippet {number}", namespace))
    return shown
