"""The command `hooked-lm`. Each command imports what it needs, so that `--help` is fast."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from hooked_lm.demo.experiment import Pair, Result
    from hooked_lm.pretrained import HookedTransformer
    from hooked_lm.studies import PairTable

app = typer.Typer(
    help="Transformer language models in which every intermediate value has a name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

# of the commands whose work is cut into shards
ShardOption = Annotated[str | None, typer.Option(help="i/n: every n-th shard, from the i-th on (from 0).")]
WorkersOption = Annotated[int, typer.Option(help="How many processes compute.")]
EngineOption = Annotated[str, typer.Option(help="processes of this machine, or ray.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Of each forward pass on a CPU.")]


def clean_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command so that errors for bad input are printed without a traceback; the exit code is 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, TypeError, LookupError, OSError) as error:
            message = error.args[0] if isinstance(error, KeyError) and error.args else error
            Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(message))}", soft_wrap=True)
            raise typer.Exit(BAD_INPUT) from None

    return wrapped


def resumes(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command whose finished shards are kept, so that an interrupt says how to go on."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            Console(stderr=True, highlight=False).print(
                "interrupted: complete shards are kept, the same command resumes", soft_wrap=True
            )
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def _show_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        console.print(f"hooked-lm {version('hooked-lm')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Transformer language models in which every intermediate value has a name."""


@app.command()
@clean_errors
def demo(
    output: Annotated[Path, typer.Option(help="The path of the report.")] = Path("hooked_lm_demo.html"),
    n_pairs: Annotated[int, typer.Option(help="The number of prompt pairs.")] = 8,
    open_report: Annotated[bool, typer.Option("--open/--no-open", help="Show the report in a browser.")] = False,
) -> None:
    """Patch the bundled model on the indirect-object task, and write an HTML report."""
    from hooked_lm.viz import check_writable

    check_writable(output)
    start = time.perf_counter()

    from hooked_lm.demo import experiment
    from hooked_lm.pretrained import HookedTransformer

    pairs = experiment.prompt_pairs(n_pairs)
    model = HookedTransformer.from_pretrained("demo")
    _show_setting(model, pairs[0])
    result = experiment.run(model, pairs)
    _show_result(result)
    path = experiment.write_report(result, output).resolve()
    console.print(f"report: [bold]{escape(str(path))}[/]  ({time.perf_counter() - start:.1f} s)", soft_wrap=True)
    if open_report:
        typer.launch(path.as_uri())


def _show_setting(model: "HookedTransformer", pair: "Pair") -> None:
    cfg, size = model.cfg, sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"[bold]model[/]      {cfg.n_layers} layers, {cfg.n_heads} heads, d_model {cfg.d_model}, {size:.2f} M"
    )
    console.print(f"[bold]clean[/]      {escape(pair.clean)}[green]{escape(pair.answer)}[/]")
    console.print(f"[bold]corrupted[/]  {escape(pair.corrupted)}[red]{escape(pair.wrong_answer)}[/]")


def _show_result(result: "Result") -> None:
    clean, corrupted = result.differences.mean.tolist()
    console.print(
        f"\n[bold]logit difference[/] over {len(result.pairs)} pairs of prompts: clean {clean:+.2f}, corrupted {corrupted:+.2f}"
        f"\n[bold]heads[/] by the effect of patching their output (0: corrupted, 1: clean){_and_intervals(result)}:"
    )
    ranking, table = result.ranking(), Table()
    formats = {"restored": "+.3f", "low": "+.3f", "high": "+.3f", "weight": ".2f"}
    for name in ranking.columns:
        table.add_column(name, justify="right" if name in formats else "left")
    for row in ranking.to_dict("records"):
        table.add_row(
            *(f"{value:{formats[name]}}" if name in formats else escape(value) for name, value in row.items())
        )
    console.print(table)
    console.print(f"[bold]patched[/]    {result.work}", soft_wrap=True)


def _and_intervals(result: "Result") -> str:
    return ", with 95% intervals over the pairs" if len(result.pairs) > 1 else ""


@app.command()
@clean_errors
def circuit(
    model: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A directory, a hub id or a short name.")],
    clean: Annotated[list[str], typer.Option(help="A prompt that the model answers correctly; may be repeated.")],
    corrupted: Annotated[list[str], typer.Option(help="The prompt with a change that reverses the answer.")],
    answers: Annotated[
        list[str], typer.Option(help="The right and a wrong next token, separated by a comma: ' Mary, John'.")
    ],
    method: Annotated[
        str, typer.Option(help="eap, eap-ig-inputs, eap-ig-activations, exact, acdc, pruning or masks.")
    ] = "pruning",
    by: Annotated[
        str, typer.Option(help="The metric of circuits: kl (to the full model) or 'logit difference'.")
    ] = "kl",
    n_edges: Annotated[int | None, typer.Option(help="The number of edges to keep; 5% of all by default.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Or: the smallest effect of an edge, in nats (acdc needs it).")
    ] = None,
    ablation: Annotated[str, typer.Option(help="The value of other edges: resample, mean or zero.")] = "resample",
    check: Annotated[int | None, typer.Option(help="The number of estimates to check by exact patching.")] = None,
    output: Annotated[Path, typer.Option(help="The path of the report.")] = Path("hooked_lm_circuit.html"),
    save: Annotated[Path | None, typer.Option(help="The path of the circuit, a safetensors file.")] = None,
) -> None:
    """Find the edges between heads and MLPs that a task needs, evaluate the circuit, and write an HTML report."""
    from hooked_lm.viz import check_writable

    for path in (output, *([] if save is None else [save])):
        check_writable(path)
    from hooked_lm.pretrained import HookedTransformer
    from hooked_lm.reports import circuit as report

    task = report.Task(clean, corrupted, *report.answers_of(answers))
    study = report.find(
        HookedTransformer.from_pretrained(model),
        task,
        method=method,
        by=by,
        n_edges=n_edges,
        threshold=threshold,
        ablation=ablation,
        check=check,
    )
    for name, value in study.facts.items():
        console.print(f"[bold]{name}[/]  {escape(value)}")
    console.print(f"\n{study.chosen.about['metric']} of the circuit, less that without each node, in nats:")
    table = Table()
    for name in study.nodes.columns:
        table.add_column(name, justify="left" if name == "node" else "right")
    for row in study.nodes.to_dict("records"):
        table.add_row(*(f"{value:+.2f}" if isinstance(value, float) else escape(str(value)) for value in row.values()))
    console.print(table)
    if save is not None:
        study.circuit.save(save)
    path = report.write_report(study, output).resolve()
    console.print(f"report: [bold]{escape(str(path))}[/]  ({study.seconds:.1f} s)", soft_wrap=True)


@app.command()
@clean_errors
@resumes
def harvest(
    model: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A directory, a hub id or a short name.")],
    documents: Annotated[
        str,
        typer.Argument(metavar="DATA", help="A file, folder or pattern of jsonl, parquet, csv or txt; or a data set."),
    ],
    output: Annotated[Path, typer.Argument(help="The directory; the harvest is a folder in it.")],
    site: Annotated[list[str], typer.Option(help="A site, or a glob of sites; may be repeated.")],
    positions: Annotated[str, typer.Option(help="all, text (no special tokens), or indices such as 0,-1.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    reduce: Annotated[str | None, typer.Option(help="mean, max or last of each row.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a row, at most; the model's context by default.")
    ] = None,
    long: Annotated[str, typer.Option(help="Longer documents: truncate, split or error.")] = "truncate",
    column: Annotated[str | None, typer.Option(help="The column of the documents.")] = None,
    max_documents: Annotated[int | None, typer.Option(help="How many documents are read.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of a random order of the documents.")] = None,
    batch_size: Annotated[int, typer.Option(help="How many rows run together.")] = 32,
    shard_size: Annotated[str, typer.Option(help="The size of a file, about.")] = "512MB",
    documents_per_shard: Annotated[int | None, typer.Option(help="The size of a file in documents instead.")] = None,
    shard: ShardOption = None,
    workers: WorkersOption = 1,
    engine: EngineOption = "processes",
    threads: ThreadsOption = None,
) -> None:
    """Write the activations of a corpus to disk; the same command resumes, also under torchrun --no-python."""
    from hooked_lm.harvest import harvest as run
    from hooked_lm.pretrained import HookedTransformer
    from hooked_lm.shards import part_of

    store = run(
        HookedTransformer.from_pretrained(model),
        documents,
        site,
        output,
        positions=positions if positions in ("all", "text") else _integers("positions", positions, ","),
        dtype=dtype,
        reduce=reduce,
        context=context,
        long=long,
        column=column,
        max_documents=max_documents,
        seed=seed,
        batch_size=batch_size,
        shard_size=shard_size,
        documents_per_shard=documents_per_shard,
        part=part_of(shard, "shard"),
        n_workers=workers,
        engine=engine,
        threads=threads,
    )
    console.print(escape(str(store)), soft_wrap=True)


@app.command()
@clean_errors
@resumes
def patch(
    model: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A directory, a hub id or a short name.")],
    pairs: Annotated[
        str, typer.Option(help="Pairs of prompts: a file, folder or pattern of jsonl, parquet or csv; or a data set.")
    ],
    output: Annotated[Path, typer.Option(help="The directory; the study is a folder in it.")],
    experiment: Annotated[str, typer.Option(help="sweep, attribute, ablate, or steer.")] = "sweep",
    site: Annotated[list[str] | None, typer.Option(help="The short name of a site; may be repeated.")] = None,
    layers: Annotated[str | None, typer.Option(help="each, together, or indices such as 0,-1.")] = None,
    positions: Annotated[str | None, typer.Option(help="each, together, or indices.")] = None,
    heads: Annotated[str | None, typer.Option(help="each, together, indices, or labels such as L1H7,L2H0.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="A further argument: components=mlps, vectors=FILE, coefficients=[-1,1]; may be repeated."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="logit_difference (the default), logit, probability, ...; may be repeated.")
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help="Another name of a column, e.g. clean=prompt.")] = None,
    max_pairs: Annotated[int | None, typer.Option(help="How many pairs are read.")] = None,
    batch_size: Annotated[int, typer.Option(help="How many pairs of one length run together.")] = 16,
    pairs_per_shard: Annotated[int, typer.Option(help="The size of a file.")] = 64,
    shard: ShardOption = None,
    workers: WorkersOption = 1,
    engine: EngineOption = "processes",
    threads: ThreadsOption = None,
) -> None:
    """Patch, attribute or ablate over a file of pairs of prompts; the same command resumes, also under torchrun --no-python."""
    from hooked_lm.pretrained import HookedTransformer
    from hooked_lm.shards import part_of
    from hooked_lm.studies import study_pairs

    options: dict[str, object] = {} if not site else {"sites": site[0] if len(site) == 1 else site}
    given = {"layers": layers, "positions": positions, "heads": heads}
    options |= {name: _which(name, text) for name, text in given.items() if text is not None}
    options |= {name: _value(name, text) for name, text in _named("option", option).items()}
    table = study_pairs(
        HookedTransformer.from_pretrained(model),
        pairs,
        experiment,
        output,
        options=options,
        metric=metric or "logit_difference",
        columns=_named("column", column),
        max_pairs=max_pairs,
        batch_size=batch_size,
        pairs_per_shard=pairs_per_shard,
        part=part_of(shard, "shard"),
        n_workers=workers,
        engine=engine,
        threads=threads,
    )
    console.print(escape(str(table)), soft_wrap=True)
    if table.is_complete:
        _show_strongest(table)


def _show_strongest(study: "PairTable") -> None:
    """The cells with the largest effects; positions from the end if the pairs differ in length."""
    effects = study.scores(align=None if study.has_one_length else "end").top(10)
    console.print("\nThe largest effects, means over the pairs with 95% intervals:")
    table = Table()
    for name in effects.columns:
        table.add_column(name, justify="right")
    for row in effects.to_dict("records"):
        table.add_row(*(f"{value:+.3f}" if isinstance(value, float) else escape(str(value)) for value in row.values()))
    console.print(table)


def _named(name: str, given: list[str] | None) -> dict[str, str]:
    """What was given as name=value, by name."""
    parts = [text.partition("=") for text in given or []]
    if wrong := [key for key, equals, value in parts if not (key and equals and value)]:
        raise ValueError(f"{name} must be name=value, got {wrong[0]!r}")
    return {key: value for key, _, value in parts}


def _value(name: str, text: str) -> object:
    """A number, list or word of JSON; the steering vectors of a file; anything else is a string."""
    if name == "vectors":
        from hooked_lm.interventions.steering import SteeringVectors

        return SteeringVectors.load(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _which(name: str, text: str) -> object:
    """ "each", None for all together, indices, or labels of heads."""
    if text in ("each", "together"):
        return None if text == "together" else text
    labels = [part.strip() for part in text.split(",")]
    return labels if name == "heads" and labels[0].startswith("L") else _integers(name, text, ",")


def _integers(name: str, text: str, separator: str) -> list[int]:
    """Integers with a separator between them; ValueError for anything else."""
    parts = text.split(separator)
    if not all(part.strip().removeprefix("-").isdigit() for part in parts):
        raise ValueError(f"{name} must be integers with {separator!r} between them, got {text!r}")
    return [int(part) for part in parts]


@app.command()
@clean_errors
def verify(
    model: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A directory, a hub id or a short name.")],
) -> None:
    """Load a checkpoint here and in transformers and compare them, on random texts and images; exit code 1 if they disagree."""
    from hooked_lm import hub

    verification = hub.verify(model)
    table = Table(title=escape(model), title_justify="left")
    for column, justify in (("check", "left"), ("largest error", "right"), ("allowed", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for check in verification.checks:
        verdict = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(escape(check.name), f"{check.largest:.1e}", f"{check.tolerance:.0e}", verdict)
    console.print(table)
    if not verification.ok:
        console.print(f"[bold red]{len(verification.failed)} of {len(verification.checks)} checks failed[/]")
        raise typer.Exit(FAILED)


@app.command()
@clean_errors
def models(
    missing: Annotated[
        bool, typer.Option("--missing", help="List those of transformers that do not load, and why.")
    ] = False,
) -> None:
    """List the supported architectures by the model_type of their config, and the class of their models."""
    if missing:
        from hooked_lm.hub.missing import missing as reasons_of_missing

        rows = reasons_of_missing()
    else:
        from hooked_lm.families import model_classes

        rows = {name: " or ".join(classes) for name, classes in model_classes().items()}
    table = Table("model_type", "why not" if missing else "class")
    for name, entry in rows.items():
        table.add_row(escape(name), escape(entry))
    console.print(table)
