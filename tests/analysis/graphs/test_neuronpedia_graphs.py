"""Attribution graphs in JSON: what a file holds, the way back, and what is refused. `tests/clients` compares circuit-tracer's."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hooked_lm.analysis.graphs.neuronpedia import from_neuronpedia, to_neuronpedia
from hooked_lm.analysis.graphs.page import graph_page
from tests.analysis.graphs.small import random_graph
from tests.close import assert_close


def test_a_graph_comes_back(tmp_path: Path):
    graph = replace(random_graph(), supernodes={"both": [0, 1]})
    found, pruned = from_neuronpedia(to_neuronpedia(graph, tmp_path / "g.json")), graph.pruned()
    assert found.names == pruned.names
    assert torch.equal(found.adjacency, pruned.adjacency)
    for name in ("activations", "probabilities", "totals", "biases"):
        assert_close(getattr(found, name), getattr(pruned, name))
    assert found.completeness == graph.completeness
    assert found.scores == graph.scores
    assert list(found.targets) == list(graph.targets)
    assert found.supernodes == pruned.supernodes
    more = from_neuronpedia(to_neuronpedia(graph, tmp_path / "g.json", nodes=0.95, edges=0.99))
    assert more.names == graph.pruned(0.95, 0.99).names
    assert more.n_edges == graph.pruned(0.95, 0.99).n_edges > found.n_edges


def test_targets_are_where_they_are_read(tmp_path: Path):
    """In the file, in what comes back, and on the page."""
    graph = replace(random_graph(), reads=[("", 3), ("blocks.0.hook_resid_post", -4)])
    path = to_neuronpedia(graph, tmp_path / "g.json")
    nodes = [node for node in json.loads(path.read_text())["nodes"] if node["feature_type"] == "logit"]
    assert [node["ctx_idx"] for node in nodes] == [3, 1]
    assert [node["node_id"].rpartition("_")[2] for node in nodes] == ["3", "1"]
    assert list(from_neuronpedia(path).reads) == [("", 3), ("blocks.0.hook_resid_post", 1)]
    page = graph_page(graph).to_html()
    found = json.loads(re.search(r'class="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [node["position"] for node in found["nodes"] if node["kind"] == "target"] == [3, 1]


def test_a_token_without_a_node_has_no_edges(tmp_path: Path):
    path = to_neuronpedia(graph := random_graph(), tmp_path / "g.json", nodes=1, edges=1)
    content = json.loads(path.read_text())
    gone = next(node["node_id"] for node in content["nodes"] if node["feature_type"] == "embedding" and node["ctx_idx"])
    content["nodes"] = [node for node in content["nodes"] if node["node_id"] != gone]
    content["links"] = [link for link in content["links"] if link["source"] != gone]
    path.write_text(json.dumps(content))
    found = from_neuronpedia(path)
    assert list(found.tokens) == list(graph.tokens)
    assert len(found.nodes()) == found.n_nodes
    assert found.token_ids.tolist().count(-1) == 1
    assert not found.adjacency[:, found.slice_of("token").start + found.token_ids.tolist().index(-1)].any()


def test_no_features_are_looked_up_for_neurons(tmp_path: Path):
    scans = [
        json.loads(to_neuronpedia(replace(random_graph(), unit=unit), tmp_path / unit).read_text())["metadata"]["scan"]
        for unit in ("feature", "neuron")
    ]
    assert scans == ["toy", "neurons of toy"]


def test_ids_are_different_where_an_error_would_have_that_of_a_feature(tmp_path: Path):
    """In circuit-tracer an error of layer 3 has the id of feature 3 of layer 0."""
    graph = random_graph()
    features = graph.features.clone()
    features[features[:, 0] == 0, 2] -= 19  # features 1 and 2 of layer 0
    content = json.loads(
        to_neuronpedia(replace(graph, features=features), tmp_path / "g.json", nodes=1, edges=1).read_text()
    )
    ids = [node["node_id"] for node in content["nodes"]]
    assert len(set(ids)) == len(ids)
    assert any(name.endswith("_error") for name in ids)


def test_labels_and_the_list_of_a_folder(tmp_path: Path):
    graph = random_graph()
    name = graph.pruned().names[0]
    to_neuronpedia(graph, tmp_path / "a.json", slug="a", labels={name: "says so"}, listed=True)
    to_neuronpedia(graph, tmp_path / "b.json", slug="b", listed=True)
    to_neuronpedia(graph, tmp_path / "a.json", slug="a", labels={name: "says so"}, listed=True)
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [one["slug"] for one in listed] == ["b", "a"]
    assert json.loads((tmp_path / "a.json").read_text())["nodes"][0]["clerp"] == "says so"


def test_what_is_refused(tmp_path: Path):
    graph = random_graph()
    with pytest.raises(ValueError, match="slug must be small letters"):
        to_neuronpedia(graph, tmp_path / "g.json", slug="A graph")
    with pytest.raises(ValueError, match="labels has 'nothing', which is no node of the graph"):
        to_neuronpedia(graph, tmp_path / "g.json", labels={"nothing": "x"})
    (tmp_path / "g.json").write_text('{"nodes": []}')
    with pytest.raises(ValueError, match="no attribution graph of features in JSON"):
        from_neuronpedia(tmp_path / "g.json")
