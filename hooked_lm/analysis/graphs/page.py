"""The page of an attribution graph, with cards of its features."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hooked_lm.analysis.graphs.graph import ERROR, FEATURE, TARGET, TOKEN, AttributionGraph, checked_labels
from hooked_lm.analysis.graphs.influence import cumulative
from hooked_lm.analysis.reading.feature_report import FeatureReport
from hooked_lm.viz.attribution_graph import GraphNode, attribution_graph_view
from hooked_lm.viz.features import feature_card

if TYPE_CHECKING:
    from hooked_lm.viz.view import View

__all__ = ["graph_page"]

TEXTS, ROWS = 4, 5  # of a card: its texts, and the tokens of a table
PROMOTED = ("promoted", "suppressed")


def graph_page(
    graph: AttributionGraph,
    reports: Sequence[FeatureReport] = (),
    *,
    labels: Mapping[str, str] | None = None,
    nodes: float = 0.8,
    edges: float = 0.98,
    title: str = "",
) -> "View":
    """The page of a graph, pruned: `show()`, `write_html(path)`. A reader follows edges, pins nodes, groups them, and hides those
    of little influence, with the mouse or with the keyboard. It loads nothing.

    Args:
        graph: the whole graph, whose influences decide what is kept; its supernodes are drawn as one node each.
        reports: of features (`feature_report`), cards of their nodes.
        labels: descriptions of nodes by name, as `{"L1F17@3": "names"}`.
        nodes, edges: the shares of influence that are kept, as in `AttributionGraph.pruned`.
        title: a title; by default the prompt.

    Raises ValueError for labels of nodes that the graph lacks, and for shares outside of 0 to 1.
    """
    labels = checked_labels(graph, labels)
    small = graph.pruned(nodes, edges)
    shares = dict(zip(graph.names, cumulative(graph.influence).tolist(), strict=True))
    sizes = dict(zip(graph.names, graph.influence.tolist(), strict=True))
    cards = {_place(report): _card(report) for report in reports}
    used = [place for place in ((layer, index) for layer, _, index in small.features.tolist()) if place in cards]
    order = {place: i for i, place in enumerate(dict.fromkeys(used))}
    drawn = [_node(small, node, labels, shares, sizes, order) for node in range(small.n_nodes)]
    rows, columns = small.adjacency.nonzero(as_tuple=True)
    links = list(zip(columns.tolist(), rows.tolist(), small.adjacency[rows, columns].tolist(), strict=True))
    return attribution_graph_view(
        drawn,
        links,
        graph.tokens,
        groups={name: list(of) for name, of in small.supernodes.items() if len(of)},
        cards=[cards[place] for place in order],
        title=title or str(graph.about.get("prompt") or "".join(graph.tokens)),
        subtitle=_subtitle(graph, small),
        unit=graph.unit,
    )


def _subtitle(graph: AttributionGraph, small: AttributionGraph) -> str:
    """How much of the graph is shown, and what was checked."""
    n_inner = len(graph.features) + len(graph.errors)
    said = [
        f"{len(small.features) + len(small.errors):,} of {n_inner:,} nodes and {small.n_edges:,} of {graph.n_edges:,} edges"
    ]
    said += [f"{name} score {value:.2f}" for name, value in graph.scores.items()]
    said += [f"{name} exact to {value:.0e}" for name, value in graph.completeness.items() if isinstance(value, float)]
    return "; ".join(said) + "."


def _node(
    graph: AttributionGraph,
    node: int,
    labels: Mapping[str, str],
    shares: Mapping[str, float],
    sizes: Mapping[str, float],
    cards: Mapping[tuple[int, int], int],
) -> GraphNode:
    name, kind = graph.names[node], graph.kinds[node]
    place, is_inner = node - graph.slice_of(kind).start, kind in (FEATURE, ERROR)
    inner = {FEATURE: graph.features, ERROR: graph.errors}
    position_of = {TOKEN: range(len(graph.tokens)), TARGET: graph.target_positions}
    layer, position = inner[kind][place].tolist()[:2] if is_inner else (None, position_of[kind][place])
    text = graph.tokens[place] if kind == TOKEN else ""
    probability = None
    if kind == TARGET:
        probability = float(graph.probabilities[place])
        text = graph.targets[place].removeprefix("logit ")
    activation = float(graph.activations[place]) if kind == FEATURE else None
    total = None if kind in (ERROR, TOKEN) else float(graph.totals[node])
    feature = tuple(graph.features[place, ::2].tolist()) if kind == FEATURE else None
    return GraphNode(
        name,
        kind,
        layer,
        position,
        text=text,
        label=labels.get(name, ""),
        share=shares[name],
        influence=sizes[name],
        activation=activation,
        probability=probability,
        total=total,
        bias=float(graph.biases[node]),
        others=float(graph.others[node]),
        card=cards.get(feature) if feature is not None else None,
    )


def _place(report: FeatureReport) -> tuple[int, int]:
    """The layer and the index of the feature of a report."""
    site = str(report.about["site"])
    found = re.search(r"blocks\.(\d+)\.", site)
    if found is None:
        raise ValueError(f"the report of feature {report.about['feature']} is of {site!r}, which has no layer")
    return int(found[1]), int(report.about["feature"])


def _card(report: FeatureReport) -> str:
    """The card of a feature: key figures, its top texts, and the tokens that it promotes and suppresses."""
    facts = {name: report.facts()[name] for name in ("density", "largest activation")}
    tables = {name: report.tables[name][:ROWS] for name in PROMOTED if report.tables[name]}
    return feature_card(facts, report.examples.snippets()[:TEXTS], tables)
