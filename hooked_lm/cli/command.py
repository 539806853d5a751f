"""What makes a function a command: the options `--json` and `--debug`, warnings, errors as messages, and exit codes.

The function prints for people and returns the same as a mapping, which `--json` prints instead. If the mapping says
`"ok": False`, the exit code is 1.
"""

import functools
import inspect
import re
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Annotated, Any, Protocol, TextIO, runtime_checkable

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from hooked_lm.cli.output import as_text, console, to_stderr

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes: it ran and failed or disagrees; it cannot run as asked; Ctrl-C
# What the library raises for what it cannot do as asked; NotImplementedError names a feature that an architecture lacks.
BAD_INPUTS = (ValueError, TypeError, LookupError, OSError, NotImplementedError)
EXPECTED = (RuntimeError, ArithmeticError, ImportError)  # failures whose message says enough
LINES = {"resumes": "interrupted: complete shards are kept, the same command resumes", "ends": "interrupted"}

CALL_OR_NAME = re.compile(r"[\w.]+\([^()]*\)|--[\w-]+(?: \w+=\S+)?|(?<![\w.'\"/-])([a-z]\w*)\b(=(?=[^\s,;.:)]))?(=)?")

WIDE = shutil.get_terminal_size().columns >= 80  # in a narrower one the boxes of the help cut names of options off


@runtime_checkable
class _Context(Protocol):
    """What is read of click's context, whose class typer keeps private."""

    meta: dict[str, Any]
    command_path: str
    invoked_subcommand: str | None


class _Commands(TyperGroup):
    """Commands for which a wrong option is an error as any other: a line on stderr, and JSON if `--json` is on the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        TYPED.set(tuple(args))
        ctx.meta["flags"] = {flag for flag in ("--json", "--debug") if flag in args}
        if not args:
            return super().parse_args(ctx, args)  # shows the help
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: _Context) -> Any:  # type: ignore[override]
        with _usage_errors(ctx):
            return super().invoke(ctx)  # type: ignore[arg-type]


@runtime_checkable
class Parameter(Protocol):
    """What is read of a parameter, whose class typer keeps private."""

    name: str
    param_type_name: str
    opts: list[str]
    secondary_opts: list[str]
    required: bool
    multiple: bool
    default: object
    help: str | None


@contextmanager
def _usage_errors(ctx: _Context) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message"):  # as what click raises for a wrong command line has
            raise
        command_path = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
        wrong = ValueError(f"{error.format_message().rstrip('.')} (see {command_path} --help)")
        flags = ctx.meta["flags"]
        with clean_errors(sys.stdout if "--json" in flags else None, "--debug" in flags):
            raise wrong from error


app = typer.Typer(
    cls=_Commands,
    help="Transformer language models in which every intermediate value has a name.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if WIDE else None,
)
TYPED: ContextVar[tuple[str, ...]] = ContextVar("TYPED", default=())  # the arguments of the command that runs
EXAMPLES: dict[str, str] = {}  # command -> the example of its help

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


def command_line() -> str:
    """The line of a shell that runs the same command."""
    return shlex.join(["hooked-lm", *TYPED.get()])


def parameters(name: str) -> dict[str, Parameter]:
    """The parameters of a command as typer made them, by their names on the command line, without the options of all commands;
    none for an unknown command."""
    if name not in EXAMPLES:
        return {}
    params = vars(get_command(app))["commands"][name].params
    return {param.opts[0].removeprefix("--").replace("-", "_"): param for param in params if param.name not in OF_ALL}


def in_options(message: str, command: str) -> str:
    """A message of the library, with the options of a command in place of the arguments of the same names.

    Other words and calls of functions stay: a name without "=" is an argument if it has an underscore or begins the message.

    >>> from hooked_lm.cli.command import in_options
    >>> in_options("of 9 documents nothing is known: give tokens_per_document=", "harvest")
    'of 9 documents nothing is known: give --tokens-per-document'
    >>> in_options(
    ...     "reduce must be 'mean', got reduce='sum' and shard_size; see harvest(reduce=...)",
    ...     "harvest",
    ... )
    "--reduce must be 'mean', got --reduce='sum' and --shard-size; see harvest(reduce=...)"
    """
    options = {param.name: param.opts[0] for param in parameters(command).values() if param.opts[0].startswith("--")}

    def option(match: re.Match[str]) -> str:
        name, before_value, before_nothing = match.groups()
        leads = match.start() == 0 and message.startswith(" must ", match.end())
        is_argument = name in options and (before_value or before_nothing or "_" in name or leads)
        return f"{options[name]}{before_value or ''}" if is_argument else match[0]

    return CALL_OR_NAME.sub(option, message)


# ---- commands --------------------------------------------------------------------------------------------------------

Result = Mapping[str, object]
Command = Callable[..., Result]


def command(example: str, interrupt: str = "ends") -> Callable[[Command], Command]:
    """Registers a function as a command with the options of all commands, and an example at the end of its help.

    `interrupt` says what an interrupt does: it "ends" the work, or the same command "resumes" it.
    """

    def register(function: Command) -> Command:
        name = function.__name__

        @functools.wraps(function)
        def run(**given: object) -> None:
            as_json, debug = bool(given.pop("as_json")), bool(given.pop("debug"))
            stdout = sys.stdout if as_json else None
            with _output(as_json, name) as said, clean_errors(stdout, debug, LINES[interrupt], name):
                result = function(**given)
                text = as_text({"ok": True, **result, **({"warnings": said} if said else {})}) if as_json else ""
            if as_json:
                with clean_errors(None, debug):
                    print(text, flush=True)
            if result.get("ok") is False:
                raise typer.Exit(FAILED)

        signature, one = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, one, default=False, annotation=kind) for name, kind in OF_ALL.items()]
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
        run.__annotations__ = {**function.__annotations__, **OF_ALL}
        EXAMPLES[name] = example
        shown = escape(example) if WIDE else f"\b\n{example}"  # \b: its lines are not joined
        app.command(name, epilog=f"Example:\n\n{shown}")(run)
        return function

    return register


@contextmanager
def _output(as_json: bool, name: str) -> Iterator[list[str]]:
    """Where lines for people go: to the terminal, or nowhere. Each warning is one line on stderr; yields the list of them."""
    said: list[str] = []

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = in_options(str(message), name)
        if text not in said:
            said.append(text)
            to_stderr(f"[bold yellow]warning:[/] {escape(text)}")

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
def clean_errors(to: TextIO | None, debug: bool, interrupted: str = LINES["ends"], name: str = "") -> Iterator[None]:
    """Errors are a line on stderr, and the exit code says of which kind they are; the same goes as JSON `to` stdout."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        _end(interrupted, error, INTERRUPTED, to, debug, str(error))
    except BAD_INPUTS as error:
        message = in_options(_message(error), name)
        _end(f"[bold red]error:[/] {escape(message)}", error, BAD_INPUT, to, debug, message)
    except Exception as error:
        message = in_options(str(error), name)
        kind = "" if isinstance(error, EXPECTED) and message else f"{type(error).__name__}: "
        hint = "" if debug or not kind else " (--debug shows where)"
        _end(f"[bold red]failed:[/] {escape(f'{kind}{message}{hint}')}", error, FAILED, to, debug, message)


def _end(line: str, error: BaseException, code: int, stdout: TextIO | None, debug: bool, message: str) -> None:
    if debug:
        traceback.print_exception(error)
    to_stderr(line)
    if stdout is not None:
        found = {"type": type(error).__name__, "message": message}
        with suppress(OSError):  # of a disk that is full
            print(as_text({"ok": False, "error": found}), file=stdout, flush=True)
    raise typer.Exit(code) from None


def _message(error: BaseException) -> str:
    """What the error says; a KeyError would be shown in quotes."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
