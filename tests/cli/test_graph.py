"""`hooked-lm graph`: what it says, the files that it writes, and what is refused."""

import json
import re
from pathlib import Path

import pytest

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis.graphs import AttributionGraph, from_neuronpedia
from tests.analysis.graphs.models import transcoders
from tests.cli.test_commands import call, from_json

PROMPT = "When Mary and John left, John gave it to"
FAST = ("--max-nodes", 15, "--check", 3)


def test_a_graph_in_text_and_json(tmp_path: Path) -> None:
    page, viewer, saved = (tmp_path / name for name in ("graph.html", "graph.json", "graph.safetensors"))
    files = ("--html", page, "--neuronpedia", viewer, "--save", saved)
    found = from_json("graph", "demo", PROMPT, "--answers", " Mary, John", *FAST, *files)
    assert found["targets"] == ["logit ' Mary' - logit ' John'"]
    assert found["completeness"]["sums"] < 1e-5
    assert found["unit"] == "neuron"
    assert found["n_nodes"] == len(found["nodes"]) <= found["of_nodes"]
    assert found["n_edges"] == len(found["edges"])
    assert {"replacement", "completeness"} <= set(found["scores"])
    assert "correlation" in found["agreement"]
    graph = hooked_lm.load(saved)
    assert isinstance(graph, AttributionGraph)
    assert (graph.n_nodes, graph.n_edges) == (found["of_nodes"], found["of_edges"])
    assert from_neuronpedia(viewer).n_edges == found["n_edges"]
    assert "Influence shown" in page.read_text(encoding="utf-8")
    shown = call("graph", "demo", PROMPT, "--answers", " Mary, John", *FAST, "--k", 3).output
    assert f"nodes  {found['n_nodes']} of {found['of_nodes']}" in shown
    assert re.search(r"sums exact to  \de-0[678] of the sizes of what is summed", shown)
    assert re.search(r"differences exact to  \de-0[4-7] of the largest edge out of a node", shown)
    assert len(re.findall(r"│ (?:token|error|feature) │", shown)) == 3


def test_transcoders_of_a_file(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    transcoders(model, "topk").save(tmp_path / "transcoders")
    found = from_json("graph", "demo", PROMPT, "--transcoders", tmp_path / "transcoders", *FAST)
    assert found["unit"] == "feature"
    kept = [node for node in found["nodes"] if node["kind"] == "feature"]
    assert 0 < len(kept) <= 15
    assert all(0 <= node["index"] < 20 for node in kept), "an index of a neuron would be up to 512"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PROMPT, "--transcoders", "missing"), "missing"),
        ((PROMPT, "--nodes", 2, *FAST), "nodes must be a share between 0 and 1"),
        ((PROMPT, "--html", "/"), "it is a folder"),
        (("",), "the prompt has no tokens"),
    ],
)
def test_what_is_refused(arguments: tuple, message: str) -> None:
    shown = call("graph", "demo", *arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr


def test_json_of_errors() -> None:
    shown = call("graph", "demo", PROMPT, "--answers", " Mary, Mary", "--json")
    assert shown.exit_code == 2
    assert json.loads(shown.stdout)["ok"] is False
