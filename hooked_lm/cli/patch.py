"""`patch`: a sweep of one pair of prompts, or an experiment on a file of pairs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import answers_of, check_prompt, check_writable, decoder, load, named, which
from hooked_lm.cli.options import EngineOption, ModelArgument, ShardOption, ThreadsOption, WorkersOption
from hooked_lm.cli.output import records, say, say_path, show_table

if TYPE_CHECKING:
    from hooked_lm.studies import PairTable

NUMBERS = dict.fromkeys(("value", "effect", "low", "high"), "+.3f")


PairClean = Annotated[list[str] | None, typer.Option(help="A prompt that the model answers; may be repeated.")]
PairCorrupted = Annotated[list[str] | None, typer.Option(help="The same with a change that reverses it.")]
PairAnswers = Annotated[list[str] | None, typer.Option(help="The right and a wrong next token, spaced: ' Mary, John'.")]
PairsOption = Annotated[
    str | None,
    typer.Option(help="Instead: a file, folder or pattern of jsonl, parquet or csv with pairs; or a data set."),
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--output", "--out", help="With --pairs: the directory; the study is a folder in it.")
]
HtmlOption = Annotated[Path | None, typer.Option(help="Also write the figure to this page.")]
ExperimentOption = Annotated[str, typer.Option(help="With --pairs: sweep, attribute, ablate, or steer.")]
SiteOption = Annotated[list[str] | None, typer.Option(help="The short name of a site; may be repeated.")]
LayersOption = Annotated[str | None, typer.Option(help="each, together, or indices such as 0,-1.")]
PositionsOption = Annotated[str | None, typer.Option(help="each, together, or indices.")]
HeadsOption = Annotated[str | None, typer.Option(help="each, together, indices, or labels such as L1H7,L2H0.")]
FurtherOption = Annotated[
    list[str] | None,
    typer.Option(help="A further argument: components=mlps, vectors=FILE, coefficients=[-1,1]; may be repeated."),
]
MetricOption = Annotated[
    list[str] | None, typer.Option(help="With --pairs: logit_difference (the default), logit, probability, ...")
]
ColumnOption = Annotated[list[str] | None, typer.Option(help="Another name of a column, e.g. clean=prompt.")]


@command(
    "hooked-lm patch demo --site resid_pre --html hooked_lm_patch.html \\\n"
    "  --clean 'When Mary and John went to the store, John gave a drink to' \\\n"
    "  --corrupted 'When Mary and John went to the store, Mary gave a drink to' \\\n"
    "  --answers ' Mary, John'",
    interrupt="resumes",
)
def patch(
    model: ModelArgument,
    clean: PairClean = None,
    corrupted: PairCorrupted = None,
    answers: PairAnswers = None,
    pairs: PairsOption = None,
    output: DirectoryOption = None,
    html: HtmlOption = None,
    experiment: ExperimentOption = "sweep",
    site: SiteOption = None,
    layers: LayersOption = None,
    positions: PositionsOption = None,
    heads: HeadsOption = None,
    option: FurtherOption = None,
    metric: MetricOption = None,
    column: ColumnOption = None,
    max_pairs: Annotated[int | None, typer.Option(help="How many pairs are read.")] = None,
    batch_size: Annotated[int, typer.Option(help="How many pairs of one length run together.")] = 16,
    pairs_per_shard: Annotated[int, typer.Option(help="The size of a file.")] = 64,
    shard: ShardOption = None,
    workers: WorkersOption = 1,
    engine: EngineOption = "processes",
    threads: ThreadsOption = None,
) -> Result:
    """Patch clean activations into a corrupted run.

    With --pairs over a file of pairs: a study, which the same command resumes, also under torchrun --no-python.
    """
    options = _options(site, option, layers=layers, positions=positions, heads=heads)
    check_writable(html)
    if pairs is None:
        if not (clean and corrupted and answers):
            raise ValueError(
                "give --clean, --corrupted and --answers for a pair of prompts, or --pairs for a file of them"
            )
        if output is not None or metric or experiment != "sweep":
            raise ValueError(
                "--output, --metric and --experiment are of a study of --pairs; a page is written with --html"
            )
        return _sweep(model, clean, corrupted, answers, options, html)
    if clean or corrupted or answers:
        raise ValueError("--pairs replaces --clean, --corrupted and --answers: give one or the other")
    if output is None:
        raise ValueError("--pairs needs --output, the directory of the study")
    from hooked_lm.shards import part_of
    from hooked_lm.studies import study_pairs

    of_shards = {"part": part_of(shard, "shard"), "n_workers": workers, "engine": engine, "threads": threads}
    of_pairs = {"columns": named("column", column), "max_pairs": max_pairs, "pairs_per_shard": pairs_per_shard}
    settings: dict[str, Any] = {
        "metric": metric or "logit_difference",
        "batch_size": batch_size,
        **of_pairs,
        **of_shards,
    }
    return _show_study(study_pairs(load(model), pairs, experiment, output, options=options, **settings), html)


def _options(site: list[str] | None, further: list[str] | None, **chosen: str | None) -> dict[str, Any]:
    """The arguments of the experiment, as the library takes them."""
    sites = {} if not site else {"sites": site[0] if len(site) == 1 else site}
    which_ones = {name: which(name, text) for name, text in chosen.items() if text is not None}
    return {**sites, **which_ones, **{name: _value(name, text) for name, text in named("option", further).items()}}


def _sweep(
    model: str, clean: list[str], corrupted: list[str], answers: list[str], options: dict[str, Any], html: Path | None
) -> Result:
    """Patches one cell after the other of the pairs that were typed."""
    from hooked_lm import patching
    from hooked_lm.analysis import metrics
    from hooked_lm.reports.circuit import Task, check_answers

    if not len(clean) == len(corrupted) == len(answers):
        raise ValueError(
            f"give as many --clean, --corrupted and --answers; got {len(clean)}, {len(corrupted)} and {len(answers)}"
        )
    right, wrong = answers_of(answers)
    loaded = decoder(model, "patch")
    for prompt in (*clean, *corrupted):
        check_prompt(loaded, prompt)
    if "heads" not in options and options.get("sites") == "z":
        options = {"heads": "each", "positions": None, **options}
    metric = metrics.logit_difference(right, wrong, model=loaded)
    result = patching.sweep(loaded, corrupted, clean, metric=metric, **options)
    baselines = check_answers(loaded, Task(clean, corrupted, right, wrong))
    say("[bold]logit difference[/]  " + ", ".join(f"{name} {value:+.2f}" for name, value in baselines.items()))
    say("\nThe cells that move it most, and the logit difference with each:")
    some = ["low", "high"] if len(clean) == 1 else []  # intervals need several pairs
    _show_cells(records(result.top(10).drop(columns=some, errors="ignore")))
    if html is not None:
        result.plot().write_html(html)
        say_path("page:", html)
    return {
        "model": model,
        "logit_difference": baselines,
        "cells": records(result.to_dataframe()),
        "html": html and html.resolve(),
    }


def _show_cells(cells: list[dict[str, object]]) -> None:
    """The token of a position is visible: `10 ·Mary`."""
    show_table(
        [{name: _position(value) if name == "position" else value for name, value in cell.items()} for cell in cells],
        NUMBERS,
    )


def _position(label: object) -> str:
    from hooked_lm import viz

    number, space, token = str(label).partition(" ")
    return f"{number} {viz.visible(token)}" if space else number


def _show_study(study: "PairTable", html: Path | None) -> Result:
    """The cells with the largest effects; positions from the end if the pairs differ in length."""
    say(escape(str(study)))
    if not study.is_complete:
        return {"study": str(study), "complete": False}
    scores = study.scores(align=None if study.has_one_length else "end")
    effects = records(scores.top(10))
    say("\nThe largest effects, means over the pairs with 95% intervals:")
    _show_cells(effects)
    if html is not None:
        scores.plot().write_html(html)
        say_path("page:", html)
    return {"study": str(study), "complete": True, "effects": effects, "html": html and html.resolve()}


def _value(name: str, text: str) -> object:
    """A number, list or word of JSON; the steering vectors of a file; anything else is a string."""
    if name == "vectors":
        from hooked_lm.interventions.steering import SteeringVectors

        return SteeringVectors.load(text)
    try:
        return json.loads(text)
    except ValueError:
        return text
