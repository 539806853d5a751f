"""What all commands share: the options `--json` and `--debug`, tables, warnings, errors as messages, and exit codes.

A command is a function that prints for people on `console` and returns the same as a mapping, which `--json` prints instead. If
it says `"ok": False`, the exit code is 1.
"""

import functools
import inspect
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    import pandas as pd

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes: it ran and failed or disagrees; it cannot run as asked; Ctrl-C
BAD = (ValueError, TypeError, LookupError, OSError, ImportError, NotImplementedError)
LINES = {"resumes": "interrupted: complete shards are kept, the same command resumes", "ends": "interrupted"}

app = typer.Typer(
    help="Transformer language models in which every intermediate value has a name.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
EXAMPLES: dict[str, str] = {}  # command -> the example of its help

# ---- options of several commands -------------------------------------------------------------------------------------

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, a hub id, a short name such as gpt2, or demo.")
]
PromptArgument = Annotated[str, typer.Argument(metavar="PROMPT", help="A text.")]
CleanOption = Annotated[list[str], typer.Option(help="A prompt that the model answers correctly; may be repeated.")]
CorruptedOption = Annotated[list[str], typer.Option(help="The prompt with a change that reverses the answer.")]
AnswersOption = Annotated[
    list[str], typer.Option(help="The right and a wrong next token, with their spaces: ' Mary, John'.")
]
# of the commands whose work is cut into shards
ShardOption = Annotated[str | None, typer.Option(help="i/n: every n-th shard, from the i-th on (from 0).")]
WorkersOption = Annotated[int, typer.Option(help="How many processes compute.")]
EngineOption = Annotated[str, typer.Option(help="processes of this machine, or ray.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Of each forward pass on a CPU.")]
# of every command
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead, and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
OF_ALL = {"as_json": JsonOption, "debug": DebugOption}


def _show_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        console.print(f"hooked-lm {version('hooked-lm')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Transformer language models in which every intermediate value has a name."""


# ---- commands --------------------------------------------------------------------------------------------------------

Result = Mapping[str, object]
Command = Callable[..., Result]


def command(example: str, interrupt: str = "ends") -> Callable[[Command], Command]:
    """Registers a function as a command with the options of all commands, and an example at the end of its help.

    `interrupt` says what an interrupt does: it "ends" the work, or the same command "resumes" it.
    """

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def run(**given: object) -> None:
            as_json, debug = bool(given.pop("as_json")), bool(given.pop("debug"))
            stdout = sys.stdout if as_json else None
            with _output(as_json) as said, _clean_errors(stdout, debug, LINES[interrupt]):
                result = function(**given)
            if as_json:
                print(as_text({**result, **({"warnings": said} if said else {})}))
            if result.get("ok") is False:
                raise typer.Exit(FAILED)

        signature, one = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, one, default=False, annotation=kind) for name, kind in OF_ALL.items()]
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
        run.__annotations__ = {**function.__annotations__, **OF_ALL}
        name = function.__name__
        EXAMPLES[name] = example
        app.command(name, epilog=f"Example:\n\n{escape(example)}")(run)
        return function

    return register


@contextmanager
def _output(as_json: bool) -> Iterator[list[str]]:
    """Where lines for people go: to the terminal, or nowhere. Warnings are lines on stderr; yields the list of them."""
    said: list[str] = []

    def show(message: Warning | str, *_: object, **__: object) -> None:
        said.append(str(message))
        to_stderr(f"[bold yellow]warning:[/] {escape(str(message))}")

    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a token shows a question mark
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    quiet, console.quiet = console.quiet, as_json
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            if as_json:
                with redirect_stdout(sys.stderr):
                    yield said
            else:
                yield said
    finally:
        console.quiet = quiet


@contextmanager
def _clean_errors(stdout: TextIO | None, debug: bool, interrupted: str) -> Iterator[None]:
    """Errors are a line on stderr, and the exit code says of which kind they are; on `stdout` goes the same as JSON."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        _end(interrupted, error, INTERRUPTED, stdout, debug)
    except BAD as error:
        _end(f"[bold red]error:[/] {escape(_message(error))}", error, BAD_INPUT, stdout, debug)
    except Exception as error:
        kind = "" if isinstance(error, (RuntimeError, ArithmeticError)) and str(error) else f"{type(error).__name__}: "
        hint = "" if debug or not kind else " (--debug shows where)"
        _end(f"[bold red]failed:[/] {escape(f'{kind}{error}{hint}')}", error, FAILED, stdout, debug)


def _end(line: str, error: BaseException, code: int, stdout: TextIO | None, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    to_stderr(line)
    if stdout is not None:
        found = {"type": type(error).__name__, "message": _message(error)}
        print(as_text({"ok": False, "error": found}), file=stdout)
    raise typer.Exit(code) from None


def _message(error: BaseException) -> str:
    """What the error says; a KeyError would be shown in quotes."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


# ---- output ----------------------------------------------------------------------------------------------------------


def to_stderr(line: str) -> None:
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def say(line: str) -> None:
    """Prints a line of rich markup; a long one is not broken."""
    console.print(line, soft_wrap=True)


def show_table(
    rows: Sequence[Mapping[str, object]], formats: Mapping[str, str] | None = None, title: str | None = None
) -> None:
    """Prints rows of one form, numbers and columns with a format to the right. Nothing is cut off in a narrow terminal."""
    formats = formats or {}
    table = Table(title=title and escape(title), title_justify="left")
    for name in rows[0] if rows else ():
        number = name in formats or isinstance(rows[0][name], (int, float))
        table.add_column(escape(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value, formats.get(name, "")) for name, value in row.items()))
    console.print(table)


def records(frame: "pd.DataFrame") -> list[dict[str, object]]:
    """The rows of a table."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


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


def load(model: str, **options: Any) -> Any:
    """The model of any class; raises ValueError for a name that is empty."""
    from hooked_lm import pretrained

    if not model:
        raise ValueError("the name of the model is empty: give a directory, a hub id, a short name or demo")
    return pretrained.from_pretrained(model, **options)


def decoder(model: str, does: str) -> Any:
    """The model; raises ValueError if it is no decoder. `does` says what needs one."""
    from hooked_lm.models.decoder import Decoder

    loaded = load(model)
    if not isinstance(loaded, Decoder):
        raise ValueError(f"{does} needs a decoder, a HookedTransformer; {model} is a {type(loaded).__name__}")
    return loaded


def check_prompt(model: Any, prompt: str, name: str = "the prompt") -> list[str]:
    """The tokens of a prompt as strings; raises ValueError if it has none."""
    if not prompt or not (words := list(map(str, model.to_str_tokens(prompt)))):
        raise ValueError(f"{name} has no tokens: give some text")
    return words


def check_writable(*paths: Path | None) -> None:
    """Raises OSError with the reason for a file that cannot be written, before the work."""
    from hooked_lm.files import writable

    for path in paths:
        if path is not None:
            writable(path)


def answers_of(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Right and wrong answers of texts such as " Mary, John"."""
    from hooked_lm.reports.circuit import answers_of as split

    return split(given)


def shown(label: str, value: object) -> None:
    """A line with its name in bold."""
    say(f"[bold]{escape(label)}[/]  {escape(str(value))}")
