"""The command `hooked-lm`. Each command imports what it needs, so that `--help` is fast."""

import functools
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

app = typer.Typer(
    help="Transformer language models in which every intermediate value has a name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
FAILED, BAD_INPUT = 1, 2


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
def verify(
    model: Annotated[str, typer.Argument(metavar="PATH_OR_NAME", help="A directory, a hub id or a short name.")],
) -> None:
    """Load a checkpoint here and in transformers and compare them; exit code 1 if they disagree."""
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
