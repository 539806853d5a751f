"""Graphs are drawn with every node on its level and every edge from its source to its target."""

import pytest
import torch

from hooked_lm.viz.graphs import BESIDE, BOX, HEAD, LEVEL, layered_graph
from hooked_lm.viz.line_plots import lines

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
    assert [at[name][1] / LEVEL for name in ("in", "a0", "&lt;b&gt;", "m0", "out")] == [0, 1, 1, 2, 3]
    assert at["a0"][0] < at["&lt;b&gt;"][0]
    assert figure.layout.title.text == "&lt;T&gt;"


def test_many_nodes_of_a_level_are_in_several_rows_and_every_label_fits_its_box():
    names = {f"L10H{head}": 3 for head in range(2 * BESIDE)}
    figure = layered_graph({"in": 0, **names, "a_very_long_name": 4}, [])
    heights = [y for name, y in zip(figure.data[-1].text, figure.data[-1].y, strict=True) if name in names]
    assert len(set(heights)) == 2
    assert heights[0] != heights[1]
    assert min(heights) == LEVEL
    for box in figure.layout.shapes:
        assert box.x1 - box.x0 >= 6.5 * len(box.label.text)  # pixels of the widest letters of this size
        assert box.layer == "above"


def test_edges_run_from_node_to_node_and_are_wide_where_scores_are_large():
    figure = layered_graph(LEVELS, EDGES, SCORES, meanings=("raises <it>", "lowers it"))
    *lines, heads, points, nodes = figure.data
    named = [line for line in lines if line.name]
    lines = [line for line in lines if not line.name]
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
    named_in_page = {"<b>": "&lt;b&gt;"}
    above, below = BOX / 2, -BOX / 2 - HEAD / 2  # from the top of a box to the arrow head below another
    expected = {
        tuple(
            (round(x, 4), round(y + beside, 4))
            for (x, y), beside in zip((at[named_in_page.get(n, n)] for n in edge[:2]), (above, below), strict=True)
        )
        for edge in EDGES
    }
    assert ends == expected
    assert {(x, y + BOX / 2 + HEAD / 2) for x, y in zip(heads.x, heads.y, strict=True)} == {
        at[named_in_page.get(stop, stop)] for _, stop, _ in EDGES
    }
    assert set(heads.marker.symbol) == {"triangle-up"}
    widths, opacities = [line.line.width for line in lines], [line.opacity for line in lines]
    assert (widths, opacities) == (sorted(widths), sorted(opacities))  # the strongest lie above
    assert lines[-1].line.width > 5 * lines[0].line.width
    assert len({line.line.color for line in lines if line.line.width > 1}) == 2
    assert [line.name for line in named] == ["raises &lt;it&gt;", "lowers it", "width: square root of score, up to 4"]
    assert points.customdata == ("1", "-4", "0", "2", "4")
    assert points.text == ("in → a0", "in → b", "one", "far", "up")


def test_edges_without_scores_are_alike():
    figure = layered_graph(LEVELS, EDGES, subtitle="all <5> edges")
    [line, _, points, _] = figure.data
    assert line.line.width > 0
    assert not line.showlegend
    assert set(points.customdata) == {""}
    assert figure.layout.title.subtitle.text == "all &lt;5&gt; edges"
    assert len(layered_graph({}, []).data) == 3
    down = layered_graph({"top": 1, "low": 0}, [("top", "low", "")])
    assert down.data[1].marker.symbol == ("triangle-down",)
    assert down.data[1].y[0] > BOX / 2


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="2 scores for 5 edges"):
        layered_graph(LEVELS, EDGES, torch.ones(2))
    with pytest.raises(ValueError, match="1 of 5 scores are NaN"):
        layered_graph(LEVELS, EDGES, torch.tensor([1.0, 2.0, torch.nan, 0.0, 0.0]))
    with pytest.raises(ValueError, match="ends at 'nowhere', which has no level"):
        layered_graph(LEVELS, [("in", "nowhere", "")])
    with pytest.raises(ValueError, match=r"'a' has values of shape \[3\], and there are 2 points"):
        lines(torch.ones(2), {"a": torch.ones(3)})


def test_curves_hold_the_numbers():
    x, line = torch.tensor([0.0, 5.0, 9.0]), torch.tensor([0.0, 0.5, 1.0])
    figure = lines(x, {"a": line, "b": -line}, {"a": (line - 0.25, line + 0.25)}, "T", "X", "Y", show_values=True)
    [ribbon, one, other] = figure.data
    assert (one.x, one.y, other.y) == (tuple(x.tolist()), tuple(line.tolist()), tuple((-line).tolist()))
    assert ribbon.y == (0.25, 0.75, 1.25, 0.75, 0.25, -0.25)
    assert one.text == ("0.00", "0.50", "1.00")
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("X", "Y")
