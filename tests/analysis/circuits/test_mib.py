"""Circuits as JSON of MIB's circuit track."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits import Circuit, discover, from_mib, to_mib
from hooked_lm.analysis.circuits.circuit import KL
from hooked_lm.demo.tasks import pairs
from tests.close import assert_close

SIZES = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "d_head": 4,
    "d_mlp": 8,
    "n_ctx": 8,
    "d_vocab": 11,
    "act_fn": "gelu",
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"n_key_value_heads": 2},
    "parallel": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary"},
    "without MLPs": {"attn_only": True},
}


def made(**fields: Any) -> HookedTransformer:
    return HookedTransformer(HookedTransformerConfig(**{**SIZES, **fields}, seed=0))


def drawn(model: HookedTransformer) -> Circuit:
    graph, generator = Graph.of(model), torch.Generator().manual_seed(0)
    scores = torch.randn(graph.is_edge.shape, generator=generator).masked_fill(~graph.is_edge, torch.nan)
    return Circuit(graph, (torch.rand(scores.shape, generator=generator) < 0.5) & graph.is_edge, scores)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = made(**MODELS[name])
    circuit = drawn(model)
    again = from_mib(to_mib(circuit, tmp_path / "circuit.json", model), model)
    assert torch.equal(again.edges, circuit.edges)
    assert_close(again.scores, circuit.scores, depth=1)


def test_edges_that_the_answer_needs_are_positive_there(tmp_path: Path) -> None:
    """Effects of ablation are negative for these; scores of searches that keep edges are positive here and there."""
    model = HookedTransformer.from_pretrained("demo")
    some = pairs("agreement", 4, model=model)
    circuit = discover(model, some, method="exact", n_edges=100, held_out=0, progress=False)
    assert circuit.scores is not None
    content = json.loads(to_mib(circuit, tmp_path / "circuit.json", model).read_text())
    kept = torch.tensor([edge["score"] for edge in content["edges"].values() if edge["in_graph"]])
    assert len(kept) == 100
    assert (kept > 0).float().mean() > 0.6
    assert (circuit.scores[circuit.edges] < 0).float().mean() > 0.6
    assert_close(from_mib(tmp_path / "circuit.json", model).scores, circuit.scores)
    for about in ({"method": "masks"}, {"method": "exact", "metric": KL}):
        as_they_are = Circuit(circuit.graph, circuit.edges, circuit.scores, about=about)
        other = json.loads(to_mib(as_they_are, tmp_path / "other.json", model).read_text())
        of_edges = [[edge["score"] for edge in each["edges"].values()] for each in (content, other)]
        assert_close(torch.tensor(of_edges[0]), -torch.tensor(of_edges[1]))


def test_the_names_are_those_of_eap_ig(tmp_path: Path) -> None:
    model = made(n_key_value_heads=2)
    circuit = Circuit.of(Graph.of(model), [("input", "L0H1<k>"), ("L0H3", "m0"), ("m0", "L1H2<q>"), ("L1H2", "logits")])
    content = json.loads(to_mib(circuit, tmp_path / "circuit.json", model).read_text())
    kept = {name for name, edge in content["edges"].items() if edge["in_graph"]}
    heads = {f"input->a0.h{head}<k>" for head in (2, 3)}  # the heads of the second group
    assert kept == heads | {"a0.h3->m0", "m0->a1.h2<q>", "a1.h2->logits"}
    assert {name for name, node in content["nodes"].items() if node["in_graph"]} == {
        "input", "a0.h3", "m0", "a1.h2", "logits"
    }  # fmt: skip
    assert content["cfg"] == {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 16}
    assert content["edges"]["input->a0.h2<k>"]["score"] == 0.5
    assert "m0->a0.h0<q>" not in content["edges"]


def edited(path: Path, edit: Any) -> Path:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    model = made(n_key_value_heads=2)
    path = to_mib(drawn(model), tmp_path / "circuit.json", model)
    with pytest.raises(ValueError, match="n_heads=4, and this one has 2"):
        from_mib(path, made(n_heads=2, d_head=8))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="is no circuit of MIB's circuit track"):
        from_mib(tmp_path / "other.json", model)

    def flip(content: dict[str, Any]) -> None:
        edge = content["edges"]["input->a0.h0<k>"]
        edge["in_graph"] = not edge["in_graph"]

    with pytest.raises(ValueError, match=r"some of a0.h0<k>, a0.h1<k> alone"):
        from_mib(edited(path, flip), model)
    path = to_mib(drawn(model), path, model)
    with pytest.raises(ValueError, match="has an edge 'm9->logits', which this model does not have"):
        from_mib(edited(path, lambda c: c["edges"].update({"m9->logits": {"score": 1, "in_graph": True}})), model)
    path = to_mib(drawn(model), path, model)
    with pytest.raises(ValueError, match="leaves out neurons of 'm0'"):
        from_mib(edited(path, lambda c: c["nodes"]["m0"].update(neurons=[True, False])), model)


def test_a_model_with_other_nodes_is_refused(tmp_path: Path) -> None:
    model = made(use_normalization_before_and_after=True, normalization_type="RMS")  # all attention is one node
    graph = Graph.of(model)
    circuit = Circuit(graph, graph.is_edge)
    with pytest.raises(ValueError, match="this model has a node 'a0': save the circuit"):
        to_mib(circuit, tmp_path / "circuit.json", model)
