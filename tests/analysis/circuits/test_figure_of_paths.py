"""The figure of a circuit: every node that is drawn is on a drawn path from an input to the logits, and the rest is counted."""

import json
import re
from dataclasses import replace
from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm import HookedTransformer, Pairs
from hooked_lm.analysis.attribution.graph import INPUT, LOGITS, Graph
from hooked_lm.analysis.circuits import Circuit, Evaluation
from hooked_lm.analysis.circuits.circuit import EFFECTS, KL
from hooked_lm.analysis.circuits.paths import feeds, on_paths, strongest_paths
from hooked_lm.viz.graphs import GraphView
from tests.close import assert_equal

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 4, "d_mlp": 8, "n_ctx": 4, "d_vocab": 7, "act_fn": "gelu"}
MODELS = {"plain": {}, "grouped": {"n_key_value_heads": 2}, "parallel": {"parallel_attn_mlp": True}}


@cache
def graph_of(kind: str) -> Graph:
    return Graph.of(HookedTransformer({**SIZES, **MODELS[kind]}))  # type: ignore[arg-type]


def drawn(seed: int, kind: str = "plain", density: float = 0.1, **about: Any) -> Circuit:
    """A circuit of random edges with random scores of both signs."""
    graph, generator = graph_of(kind), torch.Generator().manual_seed(seed)
    shape = graph.is_edge.shape
    edges = graph.is_edge & (torch.rand(shape, generator=generator) < density)
    return Circuit(graph, edges, torch.randn(shape, generator=generator), about=about)


def edges_of(view: GraphView) -> list[list[Any]]:
    """Source, target, port, score and whether it is drawn, of each edge."""
    found = re.search(r'class="data">(.*?)</script>', view.body)
    assert found
    edges: list[list[Any]] = json.loads(found[1])["edges"]
    return edges


def nodes_of(view: GraphView) -> set[str]:
    return set(re.findall(r'data-node="(.*?)"', view.svg))


def widths(graph: Graph, scores: Float[Tensor, "writer reader"], edges: Bool[Tensor, "writer reader"]) -> float:
    """The width of the widest path, by trying all thresholds."""
    sizes = scores.abs()[edges].sort(descending=True).values
    return next((float(size) for size in sizes if bool(on_paths(graph, edges & (scores.abs() >= size)).any())), 0.0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(sorted(MODELS)),
    density=st.sampled_from([0.03, 0.1, 0.3]),
    n_edges=st.integers(1, 40),
)
def test_every_node_is_on_a_drawn_path_and_the_weaker_edges_are_counted(
    seed: int, kind: str, density: float, n_edges: int
) -> None:
    circuit = drawn(seed, kind, density)
    view, n_all = circuit.plot(n_edges=n_edges), circuit.pruned().n_edges
    shown = [edge for edge in edges_of(view) if edge[4]]
    nodes = nodes_of(view)
    if not n_all:
        assert nodes == {INPUT, LOGITS}
        assert not shown
        assert "no path from the input" in view.body or "is empty" in view.body
        return
    from_input, to_logits = {INPUT}, {LOGITS}
    for _ in range(len(nodes)):
        from_input |= {target for source, target, *_ in shown if source in from_input}
        to_logits |= {source for source, target, *_ in shown if target in to_logits}
    assert nodes == from_input == to_logits
    assert nodes == {end for edge in shown for end in edge[:2]}
    kept = strongest_paths(circuit.graph, circuit.edges, circuit.scores, n_edges)
    n_drawn, weaker = int(kept.sum()), n_all - int(kept.sum())
    counted = re.search(r"(\d+) of (\d+) edges on paths .*\+(\d+) weaker, the largest ([\d.e+-]*\d)", view.body)
    if weaker:
        assert counted
        assert [int(number) for number in counted.groups()[:3]] == [n_drawn, n_all, weaker]
        strongest = circuit.scores.abs()[circuit.pruned().edges & ~kept].max()
        assert counted[4] == f"{float(strongest):.2g}"
    else:
        assert not counted
        assert f"All {n_all} edges on paths" in view.body


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(sorted(MODELS)), n_edges=st.integers(1, 40))
def test_the_strongest_edges_come_with_their_widest_paths(seed: int, kind: str, n_edges: int) -> None:
    circuit = drawn(seed, kind, 0.15)
    graph, scores, there = circuit.graph, circuit.scores, circuit.pruned().edges
    kept = strongest_paths(graph, circuit.edges, scores, n_edges)
    assert_equal(on_paths(graph, kept), kept)
    assert not bool((kept & ~there).any())
    if not bool(there.any()):
        return
    strongest = torch.zeros_like(kept)
    strongest.view(-1)[scores.abs().masked_fill(~there, -1).argmax()] = True
    assert bool(kept[strongest])
    first = strongest_paths(graph, circuit.edges, scores, 1)  # the path of the strongest edge alone
    assert int(kept.sum()) <= max(n_edges, int(first.sum()))
    writer, reader = strongest.nonzero()[0].tolist()
    through = there.clone()  # without the edges beside the strongest one: all paths go through it
    rank = graph.readers[reader].rank
    for i, j in there.nonzero().tolist():
        fed = bool(feeds(graph)[j, writer]) or graph.readers[j].rank <= graph.writers[writer].rank
        if (i, j) != (writer, reader) and not fed and graph.writers[i].rank < rank:
            through[i, j] = False
    assert widths(graph, scores, first) >= widths(graph, scores, through) - 1e-6


def test_small_circuits_are_drawn_whole() -> None:
    graph = graph_of("plain")
    edges = [(INPUT, "L0H1<q>"), ("L0H1", "m1"), ("m1", LOGITS), (INPUT, LOGITS), ("L0H0", "m0")]
    circuit = Circuit.of(graph, edges)
    view = circuit.plot()
    assert [edge[:3] for edge in edges_of(view)] == [
        [INPUT, "L0H1", "q"],
        [INPUT, LOGITS, ""],
        ["L0H1", "m1", ""],
        ["m1", LOGITS, ""],
    ]
    assert all(edge[4] and not edge[3] for edge in edges_of(view))
    assert "All 4 edges on paths from the input (bottom) to the logits (top); 1 other is on no path." in view.body
    assert "No scores rank them" in view.body
    assert nodes_of(view) == {INPUT, "L0H1", "m1", LOGITS}
    with pytest.raises(ValueError, match="n_edges must be at least 1, got 0"):
        circuit.plot(n_edges=0)


def test_a_circuit_without_a_path_says_so() -> None:
    graph = graph_of("plain")
    for circuit, said in (
        (Circuit.of(graph, []), "The circuit is empty"),
        (
            Circuit.of(graph, [(INPUT, "m0"), ("m1", LOGITS)]),
            "no path from the input (bottom) to the logits (top): none of the 2",
        ),
    ):
        view = circuit.plot()
        assert said in view.body
        assert nodes_of(view) == {INPUT, LOGITS}
        assert not edges_of(view)


def test_keys_that_heads_share_end_at_each_of_them() -> None:
    graph = graph_of("grouped")
    edges = [(INPUT, "L0H0<k>"), ("L0H0", LOGITS), ("L0H1", LOGITS)]
    view = Circuit.of(graph, edges).plot()
    assert [edge[:3] for edge in edges_of(view)][:2] == [[INPUT, "L0H0", "k"], [INPUT, "L0H1", "k"]]
    assert "All 3 edges on paths" in view.body


@pytest.mark.parametrize(
    ("about", "scores", "meanings"),
    [
        (
            {"method": "eap", "metric": "logit difference"},
            (-1, 1),
            "needed for the answer: without it the logit difference falls",
        ),
        ({"method": "acdc", "metric": KL}, (1, -1), f"needed for the answer: without it {KL} rises"),
        (
            {"method": "x", "metric": "logit difference", "direction": "denoise"},
            (-1, 1),
            "needed for the answer: it raises the logit difference",
        ),
        ({"method": "eap", "metric": "mine"}, (1, -1), "without it the mine rises"),
        (
            {"method": "eap", "metric": "mine", "scale": "restored"},
            (-1, 1),
            "needed for the answer: without it the share of the mine restored falls",
        ),
        ({"method": "pruning", "metric": "logit difference"}, (1, -1), "positive score"),
        (
            {"method": "pruning", "scores": EFFECTS, "metric": "rank"},
            (1, -1),
            "needed for the answer: without it the rank rises",
        ),
    ],
)
def test_the_legend_says_what_colours_mean(about: dict[str, Any], scores: tuple[int, int], meanings: str) -> None:
    graph = graph_of("plain")
    edges = Circuit.of(graph, [(INPUT, "m0"), ("m0", LOGITS)]).edges
    values = torch.zeros(edges.shape)
    values[graph.edge(INPUT, "m0")], values[graph.edge("m0", LOGITS)] = scores
    legend = re.findall(
        r'<line class="line (\w+)"[^<]*</svg>([^<]+)</span>', Circuit(graph, edges, values, about=about).plot().body
    )
    assert [kind for kind, _ in legend] == ["up", "down"]
    assert legend[0][1] == meanings
    assert legend[1][1] != meanings


def test_a_circuit_writes_a_page(tmp_path: Path) -> None:
    circuit = drawn(
        3,
        "plain",
        0.3,
        method="eap",
        metric="logit difference",
        search_prompts=["0123abcd"],
        agreement={"spearman": 0.5},
    )
    pairs = Pairs(["one <b>", "two"], ["three", "four"], [[" a", " b"], [" c", " d"]], [" e", " f"])
    n, empty = circuit.graph.n_edges, torch.zeros(2)
    values = torch.stack([torch.rand(1, 2), torch.rand(1, 2)])
    found = Evaluation(
        values, {"of": ["circuit", "complement"], "circuit": ["it"]}, empty + 1, empty, [circuit.n_edges], n
    )
    page = circuit.report(tmp_path / "page.html", found, pairs, command="hooked-lm circuit `x`").read_text(
        encoding="utf-8"
    )
    for part in (
        "How faithful it is",
        "one &lt;b&gt;",
        " a or  b",
        "<code>hooked-lm circuit ",
        "spearman 0.5",
        "logit difference",
        "srcdoc=",
        'id="plotly"',
        f"The 24 edges with the largest scores, of {circuit.pruned().n_edges} on a path.",
    ):
        assert part in page, part
    assert "0123abcd" not in page
    assert "Not evaluated" not in page
    assert not re.search(r"(src|href)=.?http|url\(http", page.partition('id="plotly"')[0])
    assert "Not evaluated" in circuit.report(tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"evaluation must be a result of circuits\.evaluate for this model"):
        circuit.report(tmp_path / "page.html", replace(found, n_all=n + 1))
    with pytest.raises(TypeError, match="pairs must be Pairs, got"):
        unwrap(Circuit.report)(circuit, tmp_path / "page.html", pairs=["one"])
