"""`leaderboard`: methods that find circuits, compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command, command_line
from hooked_lm.cli.inputs import check_writable, decoder, task_of_file
from hooked_lm.cli.options import ColumnOption, MaxPairsOption, PairsOption
from hooked_lm.cli.output import records, say, say_path, show_table

if TYPE_CHECKING:
    from hooked_lm.analysis import CircuitTask, Leaderboard

DEMO, PLANTED = "demo", "planted"
# the columns of the table and how their numbers are written; JSON, page and file have all of them
FORMATS = {**dict.fromkeys(("cpr", "cmd", "spearman", "sign", "auroc", "cmd_untrained"), ".2f"), "passes": ",.0f"}


@command("hooked-lm leaderboard demo --tasks capitals,agreement --n-pairs 8 \\\n  --methods exact,eap,random")
def leaderboard(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="demo: the bundled model on its tasks; planted: models whose circuits are known; or another, with --pairs.",
        ),
    ] = DEMO,
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between them: exact, eap, ..., random, pruning, masks.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Of demo and planted: the names of tasks, with commas between them.")
    ] = None,
    n_pairs: Annotated[
        int, typer.Option(help="Of demo: the number of pairs of a task; one half is searched, one judged on.")
    ] = 16,
    pairs: PairsOption = None,
    column: ColumnOption = None,
    max_pairs: MaxPairsOption = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained/--no-untrained", help="Also rank the edges of the untrained twin, as a control."),
    ] = True,
    replace_with: Annotated[
        str, typer.Option(help="The value of other edges: corrupted, mean, zero, constant or optimal.")
    ] = "corrupted",
    selection: Annotated[str, typer.Option(help="How many edges are chosen: top (as MIB), paths or greedy.")] = "top",
    by: Annotated[str, typer.Option(help="The column that sorts methods: cmd, cpr, spearman, auroc, ...")] = "cmd",
    seed: Annotated[int, typer.Option(help="Seed of random rankings, untrained weights and prompts.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write the leaderboard to this page.")] = None,
    save: Annotated[Path | None, typer.Option(help="The path of the leaderboard, a safetensors file.")] = None,
) -> Result:
    """Compare methods that find circuits, on tasks whose pairs of prompts no method sees all of.

    Each ranks the edges of a model. Circuits of the best edges are measured as in MIB's circuit track, the scores compared with
    exact patching, and with the circuit that is known of planted models.
    """
    check_writable(html, save)
    if pairs is not None and (tasks is not None or model == PLANTED):
        raise ValueError("--tasks and planted have their own pairs: leave out --pairs, or name another model")
    from hooked_lm.analysis import leaderboard as compare

    given = (
        _tasks(model, _names(tasks), n_pairs, seed) if pairs is None else [_of_file(model, pairs, column, max_pairs)]
    )
    options = {"untrained": untrained, "replace_with": replace_with, "selection": selection, "seed": seed}
    board = compare(given, _names(methods), **options)  # type: ignore[arg-type]
    return _shown(board, model, by, html, save)


def _names(text: str | None) -> list[str] | None:
    """The names in a list with commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _tasks(model: str, names: Sequence[str] | None, n_pairs: int, seed: int) -> "Sequence[CircuitTask]":
    """The tasks of the bundled model, or planted ones."""
    if model == PLANTED:
        from hooked_lm import planted
        from hooked_lm.analysis import CircuitTask

        return [CircuitTask.of(planted.load(name, seed)) for name in names or planted.names()]
    if model != DEMO:
        raise ValueError(f"the tasks of {model!r} are not known: give --pairs, or compare methods on demo or planted")
    from hooked_lm.demo.tasks import tasks

    return tasks(names=names, n=n_pairs, seed=seed)


def _of_file(model: str, pairs: str, column: list[str] | None, max_pairs: int | None) -> "CircuitTask":
    """The task of a file of pairs."""
    from hooked_lm.analysis import CircuitTask

    loaded = decoder(model, "leaderboard")
    return CircuitTask(Path(pairs).stem, loaded, task_of_file(loaded, pairs, column, max_pairs))


def _shown(board: "Leaderboard", model: str, by: str, html: Path | None, save: Path | None) -> Result:
    """Prints the table and where methods fail, and writes the files."""
    table = board.to_dataframe(by)
    names = [task.name for task in board.tasks]
    say(f"[bold]{escape(model)}[/]  {len(names)} task{'s' * (len(names) > 1)}: {escape(', '.join(names))}\n")
    columns = ["method", *(name for name in FORMATS if name in table)]
    show_table(records(table[columns]), {name: form for name, form in FORMATS.items() if name in table})
    say("\ncmd: the area between faithfulness and 1 over the share of edges, largest scores first (0: as the model)")
    say("cpr: the area under it with the edges first that the answer needs (may exceed 1)")
    say("spearman, sign: agreement with exact patching; cmd_untrained: by the ranking that the untrained twin gets")
    failures = records(board.failures()) if "exact" in board.methods and not board.no_interval else []
    if board.no_interval:
        say(f"{escape(board.no_interval)}: where methods fail is not known")
    for row in failures:
        worse, low, high = (float(str(row[name])) for name in ("worse", "low", "high"))
        say(f"{row['method']} fails on {row['task']}: cmd {worse:.3f} above exact ({low:.3f} to {high:.3f})")
    if html is not None:
        say_path("page:", board.write_html(html, command_line()))
    if save is not None:
        board.save(save)
    return {
        "model": model,
        "tasks": names,
        "methods": records(table),
        "per_task": records(board.to_dataframe(by, per_task=True)),
        "failures": failures,
        "html": html and html.resolve(),
        "leaderboard": save and save.resolve(),
    }
