"""`circuit`: the edges that a task needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command, command_line
from hooked_lm.cli.inputs import check_one_source, check_writable, decoder, task_of_file, typed_task
from hooked_lm.cli.options import (
    AnswersOption,
    CleanOption,
    ColumnOption,
    CorruptedOption,
    MaxPairsOption,
    ModelArgument,
    PairsOption,
)
from hooked_lm.cli.output import records, say, say_path, show_result, shown

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.reports.circuit import CircuitStudy

PAGE = Path("hooked_lm_circuit.html")


@command(
    "hooked-lm circuit demo --method eap \\\n"
    "  --clean 'When Mary and John went to the store, John gave a drink to' \\\n"
    "  --corrupted 'When Mary and John went to the store, Mary gave a drink to' \\\n"
    "  --answers ' Mary, John'"
)
def circuit(
    model: ModelArgument,
    clean: CleanOption = None,
    corrupted: CorruptedOption = None,
    answers: AnswersOption = None,
    pairs: PairsOption = None,
    method: Annotated[
        str, typer.Option(help="eap, eap-ig-inputs, eap-ig-activations, exact, acdc, pruning, exchange or masks.")
    ] = "pruning",
    by: Annotated[
        str, typer.Option(help="The metric of circuits: 'logit difference', or kl (to the full model).")
    ] = "logit difference",
    n_edges: Annotated[int | None, typer.Option(help="The number of edges to keep; 5% of all by default.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Or: the smallest effect of an edge, in nats (acdc needs it).")
    ] = None,
    replace_with: Annotated[str, typer.Option(help="The value of other edges: corrupted, mean or zero.")] = "corrupted",
    check: Annotated[int | None, typer.Option(help="The number of estimates to check by exact patching.")] = None,
    held_out: Annotated[
        float | None,
        typer.Option(help="The share of pairs that the search does not see; half of them by default if there are 8."),
    ] = None,
    nulls: Annotated[
        int, typer.Option(help="The number of null circuits: the same search for the answers of other pairs.")
    ] = 0,
    column: ColumnOption = None,
    max_pairs: MaxPairsOption = None,
    output: Annotated[Path, typer.Option("--output", "--out", help="The path of the report.")] = PAGE,
    save: Annotated[Path | None, typer.Option(help="The path of the circuit, a safetensors file.")] = None,
) -> Result:
    """Find the edges between heads and MLPs that a task needs.

    The circuit is evaluated against the whole model; the report is an HTML page. All prompts have as many tokens each.
    """
    check_writable(output, save)
    check_one_source(clean, corrupted, answers, pairs)
    from hooked_lm.reports import circuit as report

    task = typed_task(clean, corrupted, answers) if pairs is None else None
    loaded = decoder(model, "circuit")
    task = task or task_of_file(loaded, str(pairs), column, max_pairs)
    options: dict[str, Any] = {"method": method, "by": by, "replace_with": replace_with, "n_edges": n_edges}
    options |= {"threshold": threshold, "check": check, "held_out": held_out, "nulls": nulls}
    study = report.find(loaded, task, **options)
    return _shown(model, method, study, output, save)


def _shown(model: str, method: str, study: "CircuitStudy", output: Path, save: Path | None) -> Result:
    """Prints the key figures, and writes the page and the circuit."""
    from hooked_lm.analysis.circuits.held_out import JUDGED
    from hooked_lm.reports.circuit import DIFFERENCE

    for name, value in study.facts.items():
        shown(name, value)
    say("faithfulness: 1 is the whole model, 0 no edges; completeness: the same of the model without these edges")
    metric, replaced = study.chosen.about["metric"], study.circuit.about["replace_with"]
    sign = "negative" if metric == DIFFERENCE else "positive"
    of_nodes = f"the change of the circuit's {metric} without the node, in nats: {sign} if the circuit needs the node"
    of_edges = (
        f"the change of the {DIFFERENCE} if this edge alone has its {replaced} value in the whole model, in nats: negative if "
        "the answer needs the edge"
    )
    edges = study.edges.assign(edge=study.edges["writer"] + " -> " + study.edges["reader"])
    found = {
        "nodes": _show_effects("node", of_nodes, study.nodes),
        "edges": _show_effects("edge", of_edges, edges[["edge", "effect"]]),
    }
    if save is not None:
        study.circuit.save(save)
    path = study.report(output, command_line()).resolve()
    say_path("report:", path, f"  ({study.seconds:.1f} s)")
    return {
        "model": model,
        "n_pairs": len(study.task),
        "ahead": study.ahead,
        "method": method,
        "metric": metric,
        "replace_with": replaced,
        "n_edges": study.circuit.n_edges,
        "of": study.circuit.graph.n_edges,
        "evaluation": records(study.chosen.to_dataframe()),
        "agreement": study.agreement,
        "judged_on": study.chosen.about[JUDGED],
        "in_search": None if study.searched is None else records(study.searched.to_dataframe()),
        "nulls": None if study.nulls is None else records(study.nulls.to_dataframe()),
        **found,
        "report": path,
        "circuit": save and save.resolve(),
        "seconds": study.seconds,
    }


def _show_effects(name: str, meaning: str, table: "pd.DataFrame") -> dict[str, object]:
    """Prints the largest effects of nodes or edges, and what their sign says; returns all as data."""
    from hooked_lm.reports.circuit import SHOWN_NODES

    say(f"\nOf {name}s: {escape(meaning)}:")
    formats = dict.fromkeys(("effect", "low", "high"), "+.2f")
    return {"meaning": meaning, **show_result(table.head(SHOWN_NODES), table, {name: table[name].tolist()}, formats)}
