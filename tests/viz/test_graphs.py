"""Graphs are drawn with every node on its level and every edge from its source to its target, around the boxes of others."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from hooked_lm.viz.graphs import BOX, HEAD, NARROW, PORT, THICK, WIDE, GraphView, layered_graph
from hooked_lm.viz.line_plots import lines
from tests.close import assert_close

LEVELS = {"in": -1, "a0": 0, "<b>": 0, "m0": 1, "out": 8}
EDGES = [
    ("in", "a0", "in → a0"),
    ("in", "<b>", "in → b"),
    ("a0", "m0", "one"),
    ("in", "out", "far"),
    ("m0", "out", "up"),
]
SCORES = torch.tensor([1.0, -4.0, 0.0, 2.0, 4.0])
SVG = "{http://www.w3.org/2000/svg}"


def elements(view: GraphView, name: str) -> list[Any]:
    """The elements of a class in the picture."""
    every = ElementTree.fromstring(view.svg).iter()
    return [each for each in every if name in each.get("class", "").split()]


def places(view: GraphView) -> dict[str, tuple[float, float]]:
    found = {}
    for node in elements(view, "node"):
        x, y = map(float, re.findall(r"-?[\d.]+", node.get("transform")))
        found[node.get("data-node")] = x, y
    return found


def curves(view: GraphView) -> dict[int, list[tuple[float, float]]]:
    """The points of each edge, from its Bezier curves."""
    found = {}
    for edge in elements(view, "edge"):
        numbers = list(map(float, re.findall(r"-?[\d.]+", edge.find(f"{SVG}path").get("d"))))
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        at = [points[0]]
        for i in range(0, len(points) - 1, 3):
            p, t = torch.tensor(points[i : i + 4]), torch.linspace(0, 1, 12)[1:, None]
            at += map(
                tuple,
                ((1 - t) ** 3 * p[0] + 3 * t * (1 - t) ** 2 * p[1] + 3 * t**2 * (1 - t) * p[2] + t**3 * p[3]).tolist(),
            )  # type: ignore[arg-type]
        found[int(edge.get("data-edge"))] = at
    return found


def test_nodes_stand_on_levels_in_their_order() -> None:
    view = layered_graph(LEVELS, EDGES, SCORES, title="<T>")
    at = places(view)
    heights = [at[name][1] for name in ("in", "a0", "<b>", "m0", "out")]
    assert heights[1] == heights[2]
    steps = [before - after for before, after in pairwise([*heights[:2], *heights[3:]])]
    assert len(set(steps)) == 1
    assert steps[0] > 0
    assert at["a0"][0] < at["<b>"][0]
    assert "<h2>&lt;T&gt;</h2>" in view.body
    assert repr(view).startswith("View('<T>', 5 nodes, 5 edges")


def test_many_nodes_of_a_level_are_in_several_rows_and_no_boxes_overlap() -> None:
    names = {f"L10H{head}": 3 for head in range(30)}
    view = layered_graph({"in": 0, **names, "a_very_long_name": 4}, [])
    for svg, width in zip(re.findall(r"<svg class=.*?</svg>", view.body)[:2], (WIDE, NARROW), strict=True):
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, half in re.findall(r'translate\(([\d.]+) ([\d.]+)\)"><rect class="box" x="-([\d.]+)"', svg):
            rows.setdefault(float(y), []).append((float(x) - float(half), float(x) + float(half)))
        assert len(rows) == 2 + (4 if width == WIDE else 10)
        for boxes in rows.values():
            assert min(boxes)[0] >= 0
            assert max(boxes)[1] <= width
            assert all(before[1] < after[0] for before, after in pairwise(sorted(boxes)))


def test_edges_run_from_node_to_node_and_are_wide_where_scores_are_large() -> None:
    view = layered_graph(LEVELS, EDGES, SCORES, meanings=("raises <it>", "lowers it"))
    at = places(view)
    for i, points in curves(view).items():
        source, target, _ = EDGES[i]
        assert points[0] == (at[source][0], at[source][1] - BOX / 2)
        assert_close(points[-1], [at[target][0], at[target][1] + BOX / 2 + HEAD])
    looks = {}
    for edge in elements(view, "edge"):
        line = edge.findall(f"{SVG}path")[1]
        width, opacity = map(float, re.findall(r"[\d.]+", line.get("style")))
        looks[int(edge.get("data-edge"))] = width, opacity, line.get("class")
    assert [edge.get("data-edge") for edge in elements(view, "edge")] == [
        "2",
        "0",
        "3",
        "1",
        "4",
    ]  # the strongest on top
    assert looks[4] == (THICK, 1.0, "line up")
    assert looks[1] == (THICK, 1.0, "line down")
    assert looks[4][0] > looks[3][0] > looks[0][0] > looks[2][0]
    assert [(edge.find(f"{SVG}title").text) for edge in elements(view, "edge")][-1] == "up  +4"
    said = re.findall(r"</svg>([^<]+)</span>", view.body)
    assert said == ["raises &lt;it&gt;", "lowers it", "width: square root of score, up to 4"]
    other = layered_graph(LEVELS, EDGES, SCORES, meanings=("raises it", "lowers it"), blue=-1)
    assert re.findall(r'<line class="line (\w+)"[^<]*</svg>([^<]+)</span>', other.body) == [
        ("up", "lowers it"),
        ("down", "raises it"),
    ]


def test_edges_pass_beside_the_boxes_between_their_ends() -> None:
    names = {f"L1H{head}": 1 for head in range(6)} | {f"m{level}": level for level in range(2, 6)}
    levels = {"in": 0, **names, "out": 6}
    edges = [(name, "out", name) for name in ("in", *names)] + [("in", name, name) for name in names]
    view = layered_graph(levels, edges, ports=["" if name == "out" else "v" for _, name, _ in edges])
    at = places(view)
    boxes = {
        box.get("data-node"): float(box.find(f"{SVG}rect[@class='box']").get("width")) / 2
        for box in elements(view, "node")
    }
    assert len(curves(view)) == len(edges)
    for i, points in curves(view).items():
        for name, (x, y) in at.items():
            if name not in edges[i][:2]:
                inside = [p for p in points if abs(p[0] - x) < boxes[name] and y - BOX / 2 < p[1] < y + BOX / 2]
                assert not inside, (edges[i], name)


def test_inputs_of_a_node_are_ports_at_which_edges_end() -> None:
    edges = [("in", "h", "a"), ("in", "h", "b"), ("in", "h", "c"), ("h", "out", "d")]
    view = layered_graph({"in": 0, "h": 1, "out": 2}, edges, ports=["v", "q", "k", ""])
    ports = {text.text: float(text.get("x")) for text in elements(view, "port") if text.text}
    assert sorted(ports, key=ports.__getitem__) == ["k", "q", "v"]
    (x, y), ends = places(view)["h"], curves(view)
    for i, name in enumerate("vqk"):
        assert_close(ends[i][-1], [x + ports[name], y + BOX / 2 + PORT + HEAD])
    assert len(elements(view, "head")) == 4


def test_edges_that_are_not_drawn_are_listed() -> None:
    edges = [("in", "out", "a"), ("in", "elsewhere", "b"), ("in", "out", "c")]
    view = layered_graph({"in": 0, "out": 1}, edges, torch.tensor([3.0, -2.0, 1.0]), n_drawn=1)
    found = re.search(r'class="data">(.*?)</script>', view.body)
    assert found
    assert json.loads(found[1])["edges"] == [
        ["in", "out", "", "+3", True],
        ["in", "elsewhere", "", "\N{MINUS SIGN}2", False],
        ["in", "out", "", "+1", False],
    ]
    assert [edge.get("class") for edge in elements(view, "edge")] == ["edge weak", "edge up"]
    assert len(elements(view, "head")) == 1
    with pytest.raises(ValueError, match="ends at 'elsewhere'"):
        layered_graph({"in": 0, "out": 1}, edges, n_drawn=2)


def test_edges_without_scores_are_alike(tmp_path: Path) -> None:
    view = layered_graph(LEVELS, EDGES, subtitle="all <5> edges")
    assert {edge.get("class") for edge in elements(view, "edge")} == {"edge alike"}
    assert "all &lt;5&gt; edges" in view.body
    assert re.search(r'class="legend"></p>', view.body)
    assert not elements(layered_graph({}, []), "node")
    down = layered_graph({"top": 1, "low": 0}, [("top", "low", "")])
    (points,), at = curves(down).values(), places(down)
    assert points[0][1] > at["top"][1]
    assert points[-1][1] < at["low"][1]
    assert view.write_svg(tmp_path / "graph.svg").read_text(encoding="utf-8") == view.svg
    assert "var(" not in view.svg
    long = layered_graph(LEVELS, EDGES, subtitle="many words " * 30)
    texts = [text.text for text in elements(long, "below")]
    assert "".join(f"{text} " for text in texts) == "many words " * 30
    assert len(texts) > 2
    assert max(map(len, texts)) < WIDE / 6


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="2 scores for 5 edges"):
        layered_graph(LEVELS, EDGES, torch.ones(2))
    with pytest.raises(ValueError, match="1 ports for 5 edges"):
        layered_graph(LEVELS, EDGES, ports=["q"])
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
