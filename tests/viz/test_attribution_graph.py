"""The page of an attribution graph, as far as no browser is needed: what it holds, escapes and refuses."""

import json
import re

import pytest

from hooked_lm.analysis.graphs.page import graph_page
from hooked_lm.viz.attribution_graph import GraphNode, attribution_graph_view
from tests.analysis.graphs.small import random_graph

NODES = [
    GraphNode("a", "token", None, 0, "</script>"),
    GraphNode("L0F1@0", "feature", 0, 0),
    GraphNode("b", "target", None, 0, "b"),
]


def data(page: str) -> dict:
    found = re.search(r'class="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_holds_the_graph_and_loads_nothing():
    view = attribution_graph_view(
        NODES, [(0, 1, 1.23456789), (1, 2, -2.0)], ["</script>"], groups={"one": [1]}, title="<b>"
    )
    page = view.to_html()
    found = data(page)
    assert found["edges"] == [[0, 1, 1.2346], [1, 2, -2.0]]
    assert [node["row"] for node in found["nodes"]] == [0, 1, 2]
    assert found["groups"] == [["one", [1]]]
    assert found["nodes"][0]["text"] == "</script>"
    assert "<h2>&lt;b&gt;</h2>" in page
    assert "default-src 'none'" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [*NODES, GraphNode("x", "head", 0, 0)]}, "node 'x' has kind 'head'"),
        ({"nodes": [GraphNode("x", "feature", 0, 3)]}, "is at position 3, and there are 1 tokens"),
        ({"nodes": [GraphNode("x", "feature", None, 0)]}, "of kind 'feature' has layer None"),
        ({"nodes": [GraphNode("x", "feature", 0, 0, card=1)]}, "has card 1, and there are 0 cards"),
        ({"edges": [(0, 7, 1.0)]}, "an edge has node 7, and there are 3 nodes"),
        ({"groups": {"one": [9]}}, "group 'one' has node 9"),
    ],
)
def test_what_is_refused(change: dict, message: str):
    given = {"nodes": NODES, "edges": [], "groups": {}} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        attribution_graph_view(given["nodes"], given["edges"], ["a"], groups=given["groups"])


def test_the_page_of_a_graph_has_what_is_kept():
    graph = random_graph()
    small, found = graph.pruned(), data(graph_page(graph).to_html())
    assert [node["name"] for node in found["nodes"]] == small.names
    assert len(found["edges"]) == small.n_edges
    shares = [node["share"] for node in found["nodes"] if node["kind"] in ("feature", "error")]
    assert max(shares) < 0.85  # the share of the last one that is kept
    inner = [node for node in found["nodes"] if node["kind"] in ("feature", "error")]
    by_influence = sorted(inner, key=lambda node: -node["influence"])
    assert [node["share"] for node in by_influence] == sorted(shares)
    assert len(data(graph_page(graph, nodes=1.0, edges=1.0).to_html())["nodes"]) > len(shares)
    with pytest.raises(ValueError, match="labels has 'nothing', which is no node"):
        graph_page(graph, labels={"nothing": "x"})
