"""`patch`: a sweep of one pair of prompts, or an experiment on a file of pairs."""

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import (
    check_one_source,
    check_readable,
    check_text,
    check_writable,
    check_writable_folder,
    columns_named_by_options,
    decoder,
    load,
    named,
    typed_task,
    which,
)
from hooked_lm.cli.options import (
    AnswersOption,
    CleanOption,
    ColumnOption,
    CorruptedOption,
    ExecutorOption,
    MaxPairsOption,
    ModelArgument,
    PairsOption,
    ShardOption,
    ThreadsOption,
    WorkersOption,
)
from hooked_lm.cli.output import say, say_path, say_stored, show_result
from hooked_lm.cli.prompts_and_sites import short_name

if TYPE_CHECKING:
    from hooked_lm.models.decoder import Decoder
    from hooked_lm.models.text.chat import Chat
    from hooked_lm.reports.circuit import Task

NUMBERS = dict.fromkeys(("value", "effect", "restored", "kept", "low", "high"), "+.3f")
STRETCH = ("start", "stop", "turn", "role", "part")  # of the turns of a result


DirectoryOption = Annotated[
    str | None, typer.Option("--output", "--out", help="With --pairs: the directory; the study is a folder in it.")
]
HtmlOption = Annotated[Path | None, typer.Option(help="Also write the figure to this page.")]
ExperimentOption = Annotated[str, typer.Option(help="With --pairs: sweep, attribute, ablate, or steer.")]
SiteOption = Annotated[
    list[str] | None,
    typer.Option("--site", "--sites", help="The short name of a site, such as resid_pre; may be repeated."),
]
LayersOption = Annotated[str | None, typer.Option(help="each, together, or indices such as 0,-1 or 0-2.")]
PositionsOption = Annotated[
    str | None, typer.Option(help="each, together, indices and ranges, or tokens by meaning such as last_user.")
]
HeadsOption = Annotated[str | None, typer.Option(help="each, together, indices, or labels such as L1H7,L2H0.")]
FurtherOption = Annotated[
    list[str] | None,
    typer.Option(help="A further argument: components=mlps, vectors=FILE, coefficients=[-1,1]; may be repeated."),
]
MetricOption = Annotated[
    list[str] | None, typer.Option(help="With --pairs: logit_difference (the default), logit, probability, ...")
]


@command(
    "hooked-lm patch demo --site resid_pre --html hooked_lm_patch.html \\\n"
    "  --clean 'When Mary and John went to the store, John gave a drink to' \\\n"
    "  --corrupted 'When Mary and John went to the store, Mary gave a drink to' \\\n"
    "  --answers ' Mary, John'",
    interrupt="resumes",
)
def patch(
    model: ModelArgument,
    clean: CleanOption = None,
    corrupted: CorruptedOption = None,
    answers: AnswersOption = None,
    pairs: PairsOption = None,
    output: DirectoryOption = None,
    html: HtmlOption = None,
    experiment: ExperimentOption = "sweep",
    sites: SiteOption = None,
    layers: LayersOption = None,
    positions: PositionsOption = None,
    heads: HeadsOption = None,
    option: FurtherOption = None,
    metric: MetricOption = None,
    column: ColumnOption = None,
    raw: Annotated[
        bool, typer.Option("--raw/--normalized", help="Show effects alone, or also the share that they restore.")
    ] = False,
    max_pairs: MaxPairsOption = None,
    batch_size: Annotated[int, typer.Option(help="The number of pairs of one length that run together.")] = 16,
    pairs_per_shard: Annotated[int, typer.Option(help="The number of pairs in a file.")] = 64,
    shard: ShardOption = None,
    n_workers: WorkersOption = 1,
    executor: ExecutorOption = "processes",
    threads: ThreadsOption = None,
) -> Result:
    """Patch clean activations into a corrupted run.

    With --pairs it is a study of all pairs in a file. After an interruption the same command resumes it.
    """
    options = _options(sites, option, layers=layers, positions=positions, heads=heads)
    check_writable(html)
    check_one_source(clean, corrupted, answers, pairs)
    if pairs is None:
        if output is not None or metric or experiment != "sweep":
            raise ValueError(
                "--output, --metric and --experiment are of a study of --pairs; a page is written with --html"
            )
        return _sweep(model, typed_task(clean, corrupted, answers), options, not raw, html)
    if output is None:
        raise ValueError("--pairs needs --output, the directory of the study")
    check_writable_folder(output)
    from hooked_lm.shards import part_of

    of_shards = {"shard": part_of(shard, "shard"), "n_workers": n_workers, "executor": executor, "threads": threads}
    of_pairs = {"columns": named("column", column), "max_pairs": max_pairs, "pairs_per_shard": pairs_per_shard}
    settings = {"metric": metric or "logit_difference", "batch_size": batch_size, "options": options}
    return _study(model, pairs, experiment, Path(output), {**settings, **of_pairs, **of_shards}, not raw, html)


def _options(sites: list[str] | None, further: list[str] | None, **chosen: str | None) -> dict[str, Any]:
    """The arguments of the experiment, as the library takes them."""
    every = [short_name(part.strip(), " and --layers") for each in sites or [] for part in each.split(",")]
    where = {} if not every else {"sites": every[0] if len(every) == 1 else every}
    which_ones = {name: which(name, text) for name, text in chosen.items() if text is not None}
    return {**where, **which_ones, **{name: _value(name, text) for name, text in named("option", further).items()}}


def _sweep(model: str, task: "Task", options: dict[str, Any], normalized: bool, html: Path | None) -> Result:
    """Patches one cell after the other of the pairs that were typed."""
    from hooked_lm import patching
    from hooked_lm.engine.pairs import with_chats
    from hooked_lm.engine.study import SwapWarning
    from hooked_lm.reports import sweep
    from hooked_lm.reports.circuit import check_answers

    loaded = decoder(model, "patch")
    task = with_chats(loaded, task)
    typed: list[Any] = [task.clean, task.corrupted]
    tokens = [row for prompts in typed for row in _words(loaded, prompts)]
    if "heads" not in options and options.get("sites") == "z":
        options = {"heads": "each", "positions": None, **options}
    baselines = check_answers(loaded, task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)  # `check_answers` says it
        result = patching.sweep(loaded, task, **options)
    shares = sweep.Shares(result)
    if normalized and shares.gap != shares.gap:
        raise ValueError("clean and corrupted run do not differ, so there are no shares to show: give --raw for nats")
    say("[bold]logit difference[/]  " + ", ".join(f"{name} {value:+.2f}" for name, value in baselines.items()))
    top, table = sweep.tables(result, normalized)
    turns = result.about.get("turns", [])
    finding = sweep.finding(result).replace("`", "")
    scale = f"{shares.name}: 0 is the corrupted run, 1 the clean one" if normalized else "in nats"
    say(f"\nThe cells that move it most; {scale}:")
    found = show_result(top, table, result.axes, NUMBERS)
    say(escape(finding))
    if html is not None:
        sweep.write_report(result, task, (tokens[0], tokens[len(task)]), html, normalized)
        say_path("page:", html)
    return {
        "model": model,
        "logit_difference": baselines,
        "finding": finding,
        **found,
        **({"turns": [dict(zip(STRETCH, each, strict=True)) for each in turns]} if turns else {}),
        "html": html and html.resolve(),
    }


def _words(model: "Decoder", prompts: "Chat | Sequence[str]") -> list[Sequence[str]]:
    """The tokens of each prompt, as strings."""
    from hooked_lm.models.text.chat import Chat

    if isinstance(prompts, Chat):
        return list(prompts.str_tokens)
    return [check_text(model, prompt, "patch") for prompt in prompts]


def _study(
    model: str, pairs: str, experiment: str, output: Path, settings: dict[str, Any], normalized: bool, html: Path | None
) -> Result:
    """Runs an experiment on the pairs of a file, or goes on with it. Where pairs have other positions, these count from the end;
    of conversations it shows the means over each turn."""
    from hooked_lm import viz
    from hooked_lm.engine.result import SweepResult
    from hooked_lm.reports import sweep
    from hooked_lm.studies import study_pairs

    started = time.time()
    with columns_named_by_options():
        study = study_pairs(load(model, settings["threads"]), pairs, experiment, output, **settings)
    facts = {"model": study.plan.model["name"], "experiment": study.plan.experiment["name"]}
    stored = say_stored(study, started, pairs=study.n_pairs, rows=len(study))
    if not study.is_complete:
        return {**facts, **stored}
    scores = study.scores(align=study.alignment)
    top, table = sweep.tables(scores, normalized)
    intervals = " with 95% intervals of all cells at once" if "low" in top else ""
    say(f"\nThe largest effects, means over the pairs{intervals}:")
    found = show_result(top, table, scores.axes, NUMBERS)
    if isinstance(scores, SweepResult) and (counted := sweep.significant_cells(scores)):
        say(counted)
        found["significant"] = counted
    if html is not None:
        has_shares = isinstance(scores, SweepResult) and normalized and scores.clean is not None
        figure = viz.CaptionedFigure((scores.normalized() if has_shares else scores).plot())  # type: ignore[attr-defined]
        section = viz.Section("What was found", figure, "The largest effects:", sweep.readable(top))
        viz.report(f"A {facts['experiment']} over {study.n_pairs:,} pairs of prompts", [section], html)
        say_path("page:", html)
    return {**facts, **stored, **found, "html": html and html.resolve()}


def _value(name: str, text: str) -> object:
    """A number, list or word of JSON; the steering vectors of a file; anything else is a string."""
    if name == "vectors":
        from hooked_lm.interventions.steering import SteeringVectors

        check_readable(text, "steering vectors, as SteeringVectors.save writes them")
        return SteeringVectors.load(text)
    try:
        return json.loads(text)
    except ValueError:
        return text
