"""`graph`: which features, or neurons, and tokens of a prompt lead to an output."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.inputs import check_writable, decoder
from hooked_lm.cli.options import ModelArgument, PromptArgument
from hooked_lm.cli.output import records, say, say_path, show_table, shown
from hooked_lm.cli.prompts_and_sites import prompt_of

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.analysis.graphs import AttributionGraph

FORMATS = {"influence": ".4f", "activation": ".2f"}
COLUMNS = ["name", "kind", "layer", "position", "token", "index", "activation", "influence", "total", "bias", "others"]
OF_WHAT = {"sums": "the sizes of what is summed", "differences": "the largest edge out of a node"}


@command(
    "hooked-lm graph demo \\\n"
    "  'When Mary and John went to the store, John gave a drink to' \\\n"
    "  --answers ' Mary, John' --max-nodes 100 --html hooked_lm_graph.html"
)
def graph(
    model: ModelArgument,
    prompt: PromptArgument,
    transcoders: Annotated[
        str | None,
        typer.Option(
            help="Transcoders whose features are the nodes: demo, a file, a folder, OWNER/NAME; else neurons are."
        ),
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(help="Trace the logit difference of two next tokens, with their spaces: ' Mary, John'."),
    ] = None,
    max_nodes: Annotated[int | None, typer.Option(help="The number of features, or neurons, to keep.")] = None,
    nodes: Annotated[float, typer.Option(help="The share of the influence of nodes that is shown.")] = 0.8,
    edges: Annotated[float, typer.Option(help="The share of the influence of edges that is shown.")] = 0.98,
    check: Annotated[
        int,
        typer.Option(help="The number of features to ablate in the model itself, to compare the graph's predictions."),
    ] = 20,
    k: Annotated[int, typer.Option(help="The number of nodes to list.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Also write the graph to this page.")] = None,
    neuronpedia: Annotated[
        Path | None, typer.Option(help="Also write it to this JSON file, for Neuronpedia and circuit-tracer's viewer.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="The path of the whole graph, a safetensors file.")] = None,
) -> Result:
    """Trace which tokens and features, or neurons, lead to an output.

    Attention patterns and norms are held constant, so that edges are exact: they sum to what each node reads.
    """
    check_writable(html, neuronpedia, save)
    from hooked_lm.analysis.graphs import attribution_graph
    from hooked_lm.interventions.dictionaries import load_transcoders
    from hooked_lm.reports.circuit import answers_of

    loaded = decoder(model, "graph")
    given, words = prompt_of(loaded, prompt)
    options: dict[str, Any] = {"max_nodes": max_nodes, "check": check}
    if answers is not None:
        options["answers"] = tuple(side for [side] in answers_of([answers]))
    if transcoders is not None:
        options["transcoders"] = load_transcoders(transcoders)
    found = attribution_graph(loaded, getattr(given, "tokens", given), **options)
    small = found.pruned(nodes, edges)
    table = _show(found, small, k)
    _write(found, nodes, edges, "" if prompt.startswith("@") else prompt, html, neuronpedia, save)
    return {
        "model": model,
        "tokens": words,
        **_content(found, small),
        "nodes": records(table.astype(object).where(table.notna(), None)),
        "edges": records(small.to_dataframe()),
        "html": html and html.resolve(),
        "neuronpedia": neuronpedia and neuronpedia.resolve(),
        "graph": save and save.resolve(),
    }


def _write(
    found: "AttributionGraph",
    nodes: float,
    edges: float,
    title: str,
    html: Path | None,
    neuronpedia: Path | None,
    save: Path | None,
) -> None:
    """Writes the files that were asked for."""
    from hooked_lm.analysis.graphs import graph_page, to_neuronpedia

    if html is not None:
        graph_page(found, nodes=nodes, edges=edges, title=title).write_html(html)
        say_path("page:", html)
    if neuronpedia is not None:
        to_neuronpedia(found, neuronpedia, nodes=nodes, edges=edges)
        say_path("graph in JSON:", neuronpedia)
    if save is not None:
        found.save(save)
        say_path("graph:", save)


def _content(found: "AttributionGraph", small: "AttributionGraph") -> Result:
    """What a graph is of, how much of it is shown, and what was measured."""
    return {
        "targets": list(found.targets),
        "unit": found.unit,
        "n_nodes": small.n_nodes,
        "of_nodes": found.n_nodes,
        "n_edges": small.n_edges,
        "of_edges": found.n_edges,
        "completeness": dict(found.completeness),
        "scores": found.scores,
        "agreement": None if found.agreement is None else found.agreement.correlation,
        "control": found.control or None,
    }


def _show(found: "AttributionGraph", small: "AttributionGraph", k: int) -> "pd.DataFrame":
    """Prints what a graph is of, and its nodes of the largest influence; returns the nodes that are kept."""
    from hooked_lm import viz

    shown("targets", ", ".join(found.targets))
    shown("nodes", f"{small.n_nodes:,} of {found.n_nodes:,}")
    shown("edges", f"{small.n_edges:,} of {found.n_edges:,}")
    for name, value in found.completeness.items():
        shown(f"{name} exact to", f"{value:.0e} of {OF_WHAT[name]}")
    for name, value in found.scores.items():
        shown(f"{name} score", f"{value:.2f}")
    if found.agreement is not None:
        shown("predictions", found.agreement.in_words())
    for name, value in (found.control or {}).items():
        shown(f"{name} of an untrained twin", f"{value:.2f}")
    table = small.nodes().assign(influence=[float(found.influence[found.node(name)]) for name in small.names])
    say(f"\nThe {escape(found.unit)}s, errors and tokens with the largest influence on the targets:")
    largest = table[table["kind"] != "target"].nlargest(k, "influence")
    rows = [
        {
            "node": viz.visible(str(row["name"]), 30),
            "kind": row["kind"],
            "token": viz.visible(str(row["token"])),
            **_numbers(row),
        }
        for row in records(largest)
    ]
    show_table(rows, FORMATS)
    return table[COLUMNS]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a node; an error and a token have no activation."""
    activation = row["activation"]
    return {"influence": row["influence"], "activation": float("nan") if activation is None else float(activation)}
