"""circuit-tracer: the file of an attribution graph is the one that it writes of the same graph, and its classes read ours."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.analysis.graphs.neuronpedia import from_neuronpedia, to_neuronpedia
from tests.analysis.graphs.small import random_graph
from tests.close import assert_close

logging.getLogger("circuit_tracer").setLevel(logging.ERROR)  # it warns of graphs that have no name
SHARES = [(0.8, 0.98), (0.5, 0.7)]


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def graph(demo: HookedTransformer) -> AttributionGraph:
    ids = demo.to_tokens("When Mary and John left")[0]
    found = random_graph(n_layers=4, n_pos=len(ids), each=3, seed=5)
    about = {**found.about, "d_vocab": demo.cfg.d_vocab, "scan": "mine"}
    return replace(found, tokens=[demo.tokenizer.decode(token) for token in ids], token_ids=ids.cpu(), about=about)


def theirs(
    graph: AttributionGraph, demo: HookedTransformer, folder: Path, nodes: float, edges: float
) -> dict[str, Any]:
    """The file that circuit-tracer writes."""
    from circuit_tracer.attribution.targets import LogitTarget
    from circuit_tracer.graph import Graph
    from circuit_tracer.utils.create_graph_files import create_graph_files

    names = [target.removeprefix("logit '").removesuffix("'") for target in graph.targets]
    original = Graph.__new__(Graph)
    original.__dict__ |= {
        "input_string": graph.about["prompt"],
        "input_tokens": graph.token_ids,
        "active_features": graph.features,
        "selected_features": torch.arange(len(graph.features)),
        "adjacency_matrix": graph.adjacency.clone(),
        "activation_values": graph.activations,
        "logit_targets": [LogitTarget(*target) for target in zip(names, graph.target_ids.tolist(), strict=True)],
        "logit_probabilities": graph.probabilities,
        "vocab_size": demo.cfg.d_vocab,
        "cfg": SimpleNamespace(n_layers=graph.about["n_layers"], tokenizer_name=demo.tokenizer.name_or_path),
        "scan": "mine",
        "n_pos": len(graph.tokens),
    }
    create_graph_files(original, slug="one", output_path=str(folder), node_threshold=nodes, edge_threshold=edges)
    return json.loads((folder / "one.json").read_text())


def same(found: Any, expected: Any, name: str = "") -> None:
    """What they write is in ours, numbers up to rounding; ours may have more fields."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            same(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{name}[{i}]")
    elif isinstance(expected, float):
        assert_close(torch.tensor(found), expected)
    else:
        assert found == expected, name


@pytest.mark.parametrize(("nodes", "edges"), SHARES)
def test_the_file_is_the_one_that_it_writes(
    graph: AttributionGraph, demo: HookedTransformer, tmp_path: Path, nodes: float, edges: float
) -> None:
    """Ids, links, weights, influences, metadata and settings; then nodes of its viewer and the list of its folder."""
    expected = theirs(graph, demo, tmp_path, nodes, edges)
    (tmp_path / "ours").mkdir()
    path = to_neuronpedia(graph, tmp_path / "ours" / "one.json", nodes=nodes, edges=edges, slug="one", listed=True)
    found = json.loads(path.read_text())
    assert 10 < len(expected["nodes"]) < graph.n_nodes
    for node in expected["nodes"]:  # an influence of a target is not used there
        node.pop("influence") if node["feature_type"] == "logit" else None
    same(found, expected)
    listed = json.loads((tmp_path / "ours" / "graph-metadata.json").read_text())["graphs"]
    same(listed, json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"])


def test_its_classes_read_the_file(graph: AttributionGraph, tmp_path: Path) -> None:
    from circuit_tracer.frontend.graph_models import Model

    path = to_neuronpedia(graph, tmp_path / "one.json")
    found = Model.model_validate_json(path.read_text())
    assert {node.node_id for node in found.nodes} >= {link["source"] for link in found.links}
    assert found.metadata.prompt_tokens == list(graph.tokens)


def test_its_file_is_read(graph: AttributionGraph, demo: HookedTransformer, tmp_path: Path) -> None:
    theirs(graph, demo, tmp_path, 0.8, 0.98)
    found, pruned = from_neuronpedia(tmp_path / "one.json"), graph.pruned()
    assert torch.equal(found.adjacency, pruned.adjacency)
    assert torch.equal(found.features, pruned.features)
    assert torch.equal(found.errors, pruned.errors)
    assert list(found.tokens) == list(pruned.tokens)
    assert_close(found.activations, pruned.activations)
