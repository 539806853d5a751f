"""Circuits as attribution graphs in JSON: the format, the way back, and what is refused."""

import json
from inspect import unwrap
from pathlib import Path

import jsonschema
import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits import Circuit, from_neuronpedia, to_neuronpedia
from tests.close import assert_equal

PROMPT = "When Mary and John went to the store, John gave a drink to"
EDGES = [("input", "m0"), ("m0", "L1H2<k>"), ("m0", "L1H2<v>"), ("L1H2", "logits"), ("m0", "logits"), ("m1", "m2")]
TEXT, NUMBER, LIST = {"type": "string"}, {"type": ["number", "null"]}, {"type": "array"}


def whole(required: dict[str, dict], optional: dict[str, dict] | None = None) -> dict:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


# The fields that Neuronpedia's published schema (version 1.0.0) requires, and the types that it gives to optional ones
SCHEMA = whole(
    {
        "metadata": whole(
            {"slug": TEXT, "scan": TEXT, "prompt": TEXT, "prompt_tokens": {"type": "array", "items": TEXT}},
            {
                "info": {"type": "object"},
                "generation_settings": {"type": "object"},
                "node_threshold": {"type": "number"},
            },
        ),
        "qParams": whole(
            {}, {"pinnedIds": LIST, "supernodes": LIST, "linkType": TEXT, "clickedId": TEXT, "sg_pos": TEXT}
        ),
        "nodes": {
            "type": "array",
            "items": whole(
                {
                    "node_id": TEXT,
                    "feature": {"type": ["integer", "null"]},
                    "layer": {"type": ["string", "integer"]},
                    "ctx_idx": {"type": "integer"},
                    "feature_type": TEXT,
                    "jsNodeId": TEXT,
                    "clerp": TEXT,
                },
                {"influence": NUMBER, "activation": NUMBER},
            ),
        },
        "links": {
            "type": "array",
            "items": whole({"source": TEXT, "target": TEXT, "weight": {"type": "number"}}),
        },
    }
)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def scored(model: HookedTransformer) -> Circuit:
    circuit = Circuit.of(Graph.of(model), EDGES, method="eap", metric="logit_difference")
    scores = torch.randn(circuit.edges.shape, generator=torch.Generator().manual_seed(0))
    return Circuit(circuit.graph, circuit.edges, scores, about=circuit.about)


def test_the_file_has_the_fields_of_the_schema_and_comes_back(model: HookedTransformer, tmp_path: Path) -> None:
    circuit = scored(model)
    path = to_neuronpedia(circuit, tmp_path / "graph.json", model, PROMPT, slug="drinks-1")
    content = json.loads(path.read_text())
    jsonschema.validate(content, SCHEMA)
    for part, field in (("nodes", "clerp"), ("links", "weight"), ("metadata", "scan")):
        broken = json.loads(path.read_text())
        del (broken[part][0] if isinstance(broken[part], list) else broken[part])[field]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)
    back = from_neuronpedia(path, model)
    kept = circuit.pruned()
    assert torch.equal(back.edges, kept.edges)
    assert_equal(back.scores[kept.edges], kept.scores[kept.edges])
    assert back.about == circuit.about
    assert back.scores[~kept.edges].isnan().all()


def test_nodes_are_where_the_viewer_expects_them(model: HookedTransformer, tmp_path: Path) -> None:
    circuit = scored(model)
    content = json.loads(to_neuronpedia(circuit, tmp_path / "graph.json", model, PROMPT).read_text())
    nodes = {node["component"]: node for node in content["nodes"]}
    assert set(nodes) == {"input", "m0", "L1H2", "logits"}, "m1 -> m2 is on no path"
    last = len(content["metadata"]["prompt_tokens"]) - 1
    assert {node["ctx_idx"] for node in nodes.values()} == {last}
    for key in ("node_id", "jsNodeId"):
        assert len({node[key] for node in nodes.values()}) == len(nodes)
    assert (nodes["input"]["layer"], nodes["L1H2"]["layer"], nodes["logits"]["layer"]) == ("E", "1", "5")
    assert nodes["L1H2"]["node_id"] == f"1_2_{last}"
    assert 'Output " Mary"' in nodes["logits"]["clerp"]
    links = {(link["source"], link["target"]): link for link in content["links"]}
    assert len(links) == len(content["links"]) == 4, "keys and values of a head are one link"
    both = links[nodes["m0"]["node_id"], nodes["L1H2"]["node_id"]]
    parts = [circuit.scores[circuit.graph.edge("m0", f"L1H2<{letter}>")].item() for letter in "kv"]
    assert sorted(both["readers"].values()) == sorted(parts)
    assert both["weight"] == sum(both["readers"].values())


def test_edges_without_scores_weigh_one(model: HookedTransformer, tmp_path: Path) -> None:
    circuit = Circuit.of(Graph.of(model), EDGES[:1] + EDGES[4:5])
    path = to_neuronpedia(circuit, tmp_path / "graph.json", model, PROMPT)
    assert {link["weight"] for link in json.loads(path.read_text())["links"]} == {1.0}
    assert from_neuronpedia(path, model).scores is None


def test_what_is_refused(model: HookedTransformer, tmp_path: Path) -> None:
    circuit, path = scored(model), tmp_path / "graph.json"
    with pytest.raises(ValueError, match="small letters, digits and hyphens"):
        to_neuronpedia(circuit, path, model, PROMPT, slug="A graph")
    with pytest.raises(ValueError, match="nothing to show"):
        to_neuronpedia(Circuit.of(circuit.graph, EDGES[-1:]), path, model, PROMPT)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        to_neuronpedia(circuit, tmp_path / "no" / "graph.json", model, PROMPT)
    with pytest.raises(
        TypeError, match=r"prompt must be one text, since a graph is of one; got \['When.*a file for each"
    ):
        unwrap(to_neuronpedia)(circuit, path, model, [PROMPT[:9], PROMPT[:9]])
    assert not path.exists()
    path.write_text('{"metadata": {}, "nodes": [{"node_id": "0_253_1"}], "links": []}')
    with pytest.raises(ValueError, match="no circuit that `to_neuronpedia` wrote"):
        from_neuronpedia(path, model)
