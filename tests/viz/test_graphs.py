"""Graphs are drawn with every node on its level and every edge from its source to its target."""

import pytest
import torch

from hooked_lm.viz.graphs import curves, layered_graph

LEVELS = {"in": -1, "a0": 0, "<b>": 0, "m0": 1, "out": 8}
EDGES = [
    ("in", "a0", "in → a0"),
    ("in", "<b>", "in → b"),
    ("a0", "m0", "one"),
    ("in", "out", "far"),
    ("m0", "out", "up"),
]
SCORES = torch.tensor([1.0, -4.0, 0.0, 2.0, 4.0])


def test_nodes_stand_on_levels_in_their_order():
    figure = layered_graph(LEVELS, EDGES, SCORES, title="<T>")
    nodes = figure.data[-1]
    at = dict(zip(nodes.text, zip(nodes.x, nodes.y, strict=True), strict=True))
    assert [at[name][1] for name in ("in", "a0", "&lt;b&gt;", "m0", "out")] == [0, 1, 1, 2, 3]
    assert at["a0"][0] < at["&lt;b&gt;"][0]
    assert figure.layout.title.text == "&lt;T&gt;"


def test_edges_run_from_node_to_node_and_are_wide_where_scores_are_large():
    figure = layered_graph(LEVELS, EDGES, SCORES)
    *lines, points, nodes = figure.data
    at = {name: (x, y) for name, x, y in zip(nodes.text, nodes.x, nodes.y, strict=True)}
    ends = set()
    for line in lines:
        x, y = torch.tensor(line.x), torch.tensor(line.y)
        stops = x.isnan().nonzero()[:, 0].tolist()
        starts = [0, *(stop + 1 for stop in stops[:-1])]
        ends |= {
            tuple((round(float(x[i]), 4), round(float(y[i]), 4)) for i in (start, stop - 1))
            for start, stop in zip(starts, stops, strict=True)
        }
    names = {"<b>": "&lt;b&gt;"}
    expected = {tuple(tuple(round(part, 4) for part in at[names.get(n, n)]) for n in edge[:2]) for edge in EDGES}
    assert ends == expected
    widths = [line.line.width for line in lines]
    assert widths == sorted(widths)  # the strongest lie above
    assert len({line.line.color for line in lines}) == 5
    assert points.marker.color == tuple(SCORES.tolist())
    assert points.text == ("in → a0", "in → b", "one", "far", "up")


def test_edges_without_scores_are_alike():
    figure = layered_graph(LEVELS, EDGES)
    [line, points, _] = figure.data
    assert line.line.width > 0
    assert not points.marker.showscale
    assert len(layered_graph({}, []).data) == 2


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="2 scores for 5 edges"):
        layered_graph(LEVELS, EDGES, torch.ones(2))
    with pytest.raises(ValueError, match="ends at 'nowhere', which has no level"):
        layered_graph(LEVELS, [("in", "nowhere", "")])
    with pytest.raises(ValueError, match="'a' has 3 points, and there are 2"):
        curves(torch.ones(2), {"a": torch.ones(3)})


def test_curves_hold_the_numbers():
    x, line = torch.tensor([0.0, 5.0, 9.0]), torch.tensor([0.0, 0.5, 1.0])
    figure = curves(x, {"a": line, "b": -line}, {"a": (line - 0.25, line + 0.25)}, "T", "X", "Y", show_values=True)
    [ribbon, one, other] = figure.data
    assert (one.x, one.y, other.y) == (tuple(x.tolist()), tuple(line.tolist()), tuple((-line).tolist()))
    assert ribbon.y == (0.25, 0.75, 1.25, 0.75, 0.25, -0.25)
    assert one.text == ("0.00", "0.50", "1.00")
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("X", "Y")
