"""Figures hold exactly the numbers they were given, and labels are read as text."""

import math
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

import hooked_lm
from hooked_lm.viz import (
    attention_patterns,
    bars,
    contributions,
    feature_maps,
    heatmap,
    image_heat_map,
    lines,
    points,
    token_label,
    visible,
)
from hooked_lm.viz.theme import DOWN, FAINT, UP
from tests.close import assert_close

PACKAGE = Path(hooked_lm.__file__).parent
TOKENS = [" Mary", " Mary", "<b>", "\n"]


def test_a_heatmap_holds_the_numbers():
    values = torch.randn(3, 4)
    figure = heatmap(values, TOKENS, ["a", "b", "c"], title="T", x_title="X", y_title="Y", value_name="V")
    [trace] = figure.data
    assert torch.equal(torch.from_numpy(trace.z), values)
    assert figure.layout.title.text == "T"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("X", "Y")
    assert trace.colorbar.title.text == "V"
    assert figure.layout.yaxis.range == (2.5, -0.5)  # row 0 is at the top


def test_values_that_need_gradients_or_other_types_are_drawn():
    values = torch.randn(2, 2, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(torch.from_numpy(heatmap(values).data[0].z), values.detach().float())


@pytest.mark.parametrize(
    ("values", "how", "expected", "white"),
    [
        ([0.0, -3.0, 1.0, 2.0], {}, (-3.0, 3.0), 0.0),
        ([0.0, -3.0, 1.0, 2.0], {"limit": 1.0}, (-1.0, 1.0), 0.0),
        ([-0.1, 3.0], {}, (0.0, 3.0), 0.0),
        ([-3.0, 0.1], {}, (-3.0, 0.0), 0.0),
        ([-0.2, 3.0], {}, (-3.0, 3.0), 0.0),
        ([0.0, torch.nan], {}, (0.0, 1.0), 0.0),
        ([torch.nan, 0.25], {}, (0.0, 0.25), 0.0),
        ([torch.nan, -0.25], {}, (-0.25, 0.0), 0.0),
        ([0.2, 0.7, torch.inf], {"limit": 1.0}, (0.0, 1.0), 0.0),
        ([5.0, 6.0], {}, (5.0, 6.0), 5.0),
        ([5.0, 6.0], {"centre": 0.0}, (0.0, 6.0), 0.0),
        ([-5.0, -6.0], {}, (-6.0, -5.0), -5.0),
        ([2.0, 4.0], {"centre": 3.0}, (2.0, 4.0), 3.0),
        ([2.0, 2.5], {"centre": 3.0}, (2.0, 3.0), 3.0),
        ([torch.nan], {}, (0.0, 1.0), 0.0),
    ],
)
def test_colours_cover_the_sides_that_have_values(values: list, how: dict, expected: tuple, white: float):
    trace = heatmap(torch.tensor([values]), **how).data[0]
    assert_close((trace.zmin, trace.zmax), expected)
    place = (white - expected[0]) / (expected[1] - expected[0])
    assert dict(trace.colorscale)[place] == "#ffffff"


def test_missing_cells_are_hatched_and_say_so():
    values = torch.ones(3, 4)
    values[1, 1:3] = values[2, 3] = torch.nan
    cells, holes, hatch = heatmap(values, y_title="layer").data
    assert torch.from_numpy(holes.z).isnan().equal(~values.isnan())
    assert holes.hovertemplate.startswith("layer %{y}<br>%{x}<br>no value")
    assert hatch.fillpattern.shape == "/"
    assert (hatch.x.count(None), hatch.y.count(None)) == (2, 2)  # two runs of cells
    assert len(cells.z) == 3
    assert len(heatmap(torch.ones(2, 2)).data) == 1


def test_long_labels_are_cut_on_the_axis_and_whole_on_hover():
    long = ["blocks.10.attn.hook_result of the second model", "a"]
    figure = heatmap(torch.eye(2), long, ["r", "s"], x_title="site")
    assert figure.layout.xaxis.ticktext == ("blocks.10.attn.hook_result of the s…", "a")
    assert figure.data[0].hovertext[0][0] == f"r<br>site {long[0]}"
    assert bars(torch.ones(2), long).data[0].hovertext[0] == long[0]
    assert heatmap(torch.eye(2), ["blocks.10.attn.hook_result", "a"]).data[0].hovertext is None
    names = [f"a feature with a very long description, number {i}" for i in range(8)]
    for figure in (feature_maps(torch.ones(8, 3, 3), names), heatmap(torch.ones(8, 3, 3), panels=names)):
        for name, title in zip(names, figure.layout.annotations, strict=True):
            assert title.text.endswith("…")
            assert title.hovertext == name


def test_contributions_are_sorted_by_sign_and_size():
    values = torch.tensor([0.5, -0.25, 0.01, torch.nan, 2.0, -0.02])
    names = ["<a>", "b", "c", "d", "e", "f"]
    figure = contributions(values, names, (values - 1, values + 2), n=3, subtitle="S")
    [trace] = figure.data
    assert trace.orientation == "h"
    assert_close(torch.tensor(trace.x), [2.0, 0.5, -0.25])
    assert figure.layout.yaxis.ticktext == ("e", "&lt;a&gt;", "b")
    assert_close(
        (torch.tensor(trace.error_x.arrayminus), torch.tensor(trace.error_x.array)),
        (torch.ones(3), torch.full((3,), 2.0)),
    )
    said = figure.layout.title.subtitle.text
    assert said == "S; 3 of 6 parts; the others add up to \N{MINUS SIGN}0.01; 1 of 6 without a value"
    assert contributions(values[:2]).layout.title.subtitle.text is None


def test_equal_labels_stay_apart():
    axis = heatmap(torch.zeros(1, 4), TOKENS).layout.xaxis
    assert axis.tickvals == (0, 1, 2, 3)
    assert axis.ticktext == ("·Mary", "·Mary", "&lt;b&gt;", "↵")


def test_numbers_in_cells_leave_out_zeros_and_those_without_a_value():
    figure = heatmap(torch.tensor([[0.0, 0.001, -0.254, 1.0, torch.nan]]), show_values=True)
    assert [list(row) for row in figure.data[0].text] == [["", "0.00", "\N{MINUS SIGN}0.25", "1.00", ""]]
    assert heatmap(torch.zeros(1, 1)).data[0].text is None


@pytest.mark.parametrize(("x", "y"), [(["a"], None), (None, ["a", "b", "c"])])
def test_the_wrong_number_of_labels(x: list | None, y: list | None):
    with pytest.raises(ValueError, match=r"[13] labels for 2 (columns|rows)"):
        heatmap(torch.zeros(2, 2), x, y)


def test_intervals_are_shown_where_one_points():
    values = torch.randn(2, 3)
    [trace] = heatmap(values, interval=(values - 1, values + 2)).data
    assert torch.equal(torch.from_numpy(trace.customdata), torch.stack([values - 1, values + 2], -1))
    assert "%{customdata[0]:.3f} to %{customdata[1]:.3f}" in trace.hovertemplate
    [plain] = heatmap(values).data
    assert plain.customdata is None
    assert "customdata" not in plain.hovertemplate


def test_bars_reach_from_the_lowest_to_the_highest_value():
    values, low, high = torch.tensor([0.5, -0.2]), torch.tensor([0.25, -0.3]), torch.tensor([1.0, 0.1])
    figure = bars(values, [" a", "<b>"], (low, high), title="T", x_title="X", y_title="Y")
    [trace] = figure.data
    assert_close(torch.from_numpy(trace.y - trace.error_y.arrayminus), low)
    assert_close(torch.from_numpy(trace.y + trace.error_y.array), high)
    assert (figure.layout.xaxis.ticktext, figure.layout.xaxis.tickvals) == (("·a", "&lt;b&gt;"), (0, 1))
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("X", "Y")
    assert trace.marker.color[0] != trace.marker.color[1]  # up and down


def test_bars_without_intervals():
    [trace] = bars(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).data
    assert trace.error_y.array is None
    assert trace.y.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 3, 3), "got [1, 2, 3, 3]: draw a part, such as values[0]"),
        ((3,), "got [3]: bars and lines draw one axis"),
    ],
)
def test_values_that_are_no_matrices(shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        heatmap(torch.zeros(shape))


def test_what_does_not_go_with_bars():
    with pytest.raises(ValueError, match="1 labels for 2 bars"):
        bars(torch.zeros(2), ["a"])
    with pytest.raises(ValueError, match=r"an interval of \[3\] for values \[2\]"):
        bars(torch.zeros(2), interval=(torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match=r"an interval of \[2, 1\] for values \[2, 2\]"):
        heatmap(torch.zeros(2, 2), interval=(torch.zeros(2, 1), torch.zeros(2, 2)))


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5])
def test_patterns_stand_in_panels(n_heads: int):
    pattern = torch.randn(n_heads, 4, 4).softmax(-1)
    labels = [f"{head}<i>" for head in range(n_heads)]
    figure = attention_patterns(pattern, TOKENS, labels, columns=2)
    assert len(figure.data) == n_heads
    for head, trace in enumerate(figure.data):
        assert torch.equal(torch.from_numpy(trace.z), pattern[head])
        assert figure.layout.annotations[head].text == f"{head}&lt;i&gt;"
        across, down = (trace[axis].replace(axis[0], axis[0] + "axis") for axis in ("xaxis", "yaxis"))
        assert figure.layout[across].ticktext == figure.layout[down].ticktext == tuple(map(token_label, TOKENS))
        assert figure.layout[down].range == (3.5, -0.5)
        # the tokens are written below the lowest panel of each column, and left of the first of each row
        assert figure.layout[across].showticklabels == (head + 2 >= n_heads)
        assert figure.layout[down].showticklabels == (head % 2 == 0)
    assert {(trace.zmin, trace.zmax) for trace in figure.data} == {(0, 1)}


def test_patterns_name_their_heads():
    figure = attention_patterns(torch.eye(4)[None], TOKENS)
    assert [annotation.text for annotation in figure.layout.annotations] == ["head 0"]

    layer = torch.eye(4).expand(1, 8, 4, 4)  # a batch of one, as in a cache
    for pattern, heads, named in (
        (layer, [0, 7], ["head 0", "head 7"]),
        ({1: layer}, [7, "L1H0"], ["L1H7", "L1H0"]),
        ([layer, layer[0]], "L1H2", ["L1H2"]),
    ):
        figure = attention_patterns(pattern, TOKENS, heads=heads)
        assert [annotation.text for annotation in figure.layout.annotations] == named


def test_patterns_are_those_of_the_chosen_heads():
    every = torch.randn(2, 3, 4, 5).softmax(-1)
    keys = [*TOKENS, " end"]
    figure = attention_patterns(list(every), TOKENS, key_tokens=keys, heads=["L1H2", "L0H1"])
    for trace, weights in zip(figure.data, (every[1, 2], every[0, 1]), strict=True):
        assert torch.equal(torch.from_numpy(trace.z), weights)
    assert figure.layout.xaxis.ticktext == tuple(map(token_label, keys))
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("key", "query")


@pytest.mark.parametrize(("n_heads", "n_tokens", "across"), [(8, 4, 4), (5, 4, 3), (8, 12, 2), (3, 12, 2), (1, 12, 1)])
def test_rows_of_panels_are_even(n_heads: int, n_tokens: int, across: int):
    figure = attention_patterns(torch.zeros(n_heads, n_tokens, n_tokens), ["a"] * n_tokens)
    assert len({trace.xaxis for trace in figure.data}) == n_heads
    assert sum(figure.layout[f"yaxis{i or ''}"].showticklabels for i in [0, *range(2, n_heads + 1)]) == -(
        -n_heads // across
    )


def test_patterns_with_the_wrong_number_of_labels():
    with pytest.raises(ValueError, match="a batch of 2 prompts, and a picture shows one"):
        attention_patterns(torch.zeros(2, 3, 4, 4), TOKENS)
    with pytest.raises(
        ValueError, match="there is no head L1H7: there are H0 to H1; give the whole layer with its number"
    ):
        attention_patterns(torch.zeros(2, 4, 4), TOKENS, heads=["L1H7"])
    with pytest.raises(ValueError, match="1 head labels for 2 heads"):
        attention_patterns(torch.zeros(2, 4, 4), TOKENS, ["a"])
    with pytest.raises(ValueError, match="3 tokens for 4 queries"):
        attention_patterns(torch.zeros(2, 4, 4), TOKENS[:3])


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" a", "·a"),
        ("a  ", "a··"),
        ("a b", "a b"),
        ("a  b", "a··b"),
        ("\t\r\n\u00a0", "⇥␍↵⍽"),
        ("", "∅"),
        ("x" * 40, "x" * 15 + "…"),
        ("é中🙂", "é中🙂"),
    ],
)
def test_tokens_are_visible(token: str, shown: str):
    assert visible(token) == token_label(token) == shown


def test_no_figure_needs_webgl():
    """Traces such as scattergl are blank in browsers without WebGL, and in many virtual machines."""
    names = dir(go)
    assert {"Scattergl", "Surface"} <= set(names)
    needing = {name for name in names if name.endswith(("gl", "gl2d"))} | {"Surface", "Scatter3d", "Mesh3d", "Volume"}
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    found = {f"{path.name}: {name}" for path in sources for name in needing if f"go.{name}(" in path.read_text("utf-8")}
    assert found == set()
    large = torch.randn(24, 512)
    figures = [
        heatmap(large),
        bars(large[0]),
        contributions(large[0]),
        lines(range(5000), {"loss": torch.rand(5000)}),
        feature_maps(large.view(2, 64, 96)),
        image_heat_map(torch.rand(2, 2), torch.rand(3, 4, 4)),
    ]
    drawn = {trace.type for figure in figures for trace in figure.data}
    assert drawn == {"heatmap", "bar", "scatter", "image"}


def test_first_columns_that_are_equal_are_one():
    values = torch.randn(3, 10)
    values[:, :6] = torch.tensor([[0.0], [2.0], [torch.nan]])
    figure = heatmap(values, TOKENS + TOKENS + ["a", "b"], x_title="position (of some)", interval=(values, values + 1))
    cells, axis = figure.data[0], figure.layout.xaxis
    assert torch.equal(torch.from_numpy(cells.z).nan_to_num(), values[:, 5:].nan_to_num())
    assert torch.equal(torch.from_numpy(cells.customdata[..., 1]).nan_to_num(), (values + 1)[:, 5:].nan_to_num())
    assert axis.ticktext == ("6 equal positions", "&lt;b&gt;", "↵", "a", "b")
    assert axis.range == (-0.5, 4.5)
    assert heatmap(values, every_cell=True).data[0].z.shape == (3, 10)
    values[0, 2] = 1.0  # so that two are equal, which are no fold
    assert heatmap(values).data[0].z.shape == (3, 10)
    assert heatmap(torch.zeros(2, 9)).data[0].z.shape == (2, 9)  # all of them say something
    panels = torch.stack([torch.zeros(2, 9), torch.randn(2, 9)])
    assert heatmap(panels).data[0].z.shape == (2, 9)  # a column is equal in all panels, or not at all


def test_of_more_cells_than_pixels_the_largest_of_each_block_is_drawn():
    values = torch.zeros(1300, 700)
    values[1234, 567] = -3.0
    values[0, 0] = torch.nan
    labels = [f"word{i}" for i in range(1300)]
    figure = heatmap(values, labels[:700], labels, interval=(values - 1, values + 1))
    cells = torch.from_numpy(figure.data[0].z)
    assert cells.shape == (434, 350)
    assert (cells[411, 283], cells.nan_to_num().abs().sum()) == (-3.0, 3.0)
    assert figure.data[0].customdata[411, 283].tolist() == [-4.0, -2.0]
    assert not cells.isnan().any()  # a block has no value only if none of its cells has one
    assert figure.layout.xaxis.labelalias["283"] == "word566 … word567"
    assert figure.layout.title.subtitle.text == "1 of 910000 without a value; each cell is the largest of 3 x 2"
    assert len(figure.to_json()) < 5_000_000
    assert heatmap(values, every_cell=True).data[0].z.shape == (1300, 700)


def test_each_panel_has_the_scale_of_its_limit():
    figure = heatmap(torch.eye(3).expand(2, 3, 3), limit=[1.0, 0.5], columns=2)
    assert [(trace.zmax, trace.showscale) for trace in figure.data] == [(1.0, False), (0.5, False)]
    assert all(trace.showscale for trace in heatmap(torch.eye(3).expand(2, 3, 3), limit=[1.0, 0.5]).data)
    with pytest.raises(ValueError, match="1 limits for 2 panels"):
        heatmap(torch.eye(3).expand(2, 3, 3), limit=[1.0])


def test_patterns_over_long_texts_have_colours_that_end_at_what_rows_look_at():
    scores = torch.randn(1, 100, 100).masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf)
    scores[..., 0] = 8.0  # the first key takes almost all
    figure = attention_patterns(scores.softmax(-1), ["a"] * 100)
    most = scores.softmax(-1)[0, 1:, 1:].amax(-1)
    assert float(most.median()) < figure.data[0].zmax < float(most.max())
    assert figure.layout.annotations[0].text.startswith("head 0, colours to 0.0")
    assert attention_patterns(torch.eye(7)[None], ["a"] * 7).data[0].zmax == 1.0


def test_bars_with_many_long_labels_are_below_each_other():
    names = [f"L1H{i} to m2" for i in range(40)]
    values = torch.randn(40)
    figure = bars(values, names, (values - 1, values + 2), "T", "edge", "effect", {"clean": 0.5})
    [trace], axis = figure.data, figure.layout.yaxis
    assert trace.orientation == "h"
    assert_close(torch.tensor(trace.x), values - 0.5)
    assert (axis.range, axis.ticktext, axis.title.text) == ((39.5, -0.5), tuple(names), "edge")
    assert_close(torch.tensor(trace.error_x.array), torch.full((40,), 2.0))
    assert [note.text for note in figure.layout.annotations] == ["clean 0.5"]
    assert bars(values, range(40)).data[0].orientation is None  # short labels fit


def test_what_is_compared_with_is_grey():
    figure = lines([0, 1], {"random": torch.zeros(2), "a": torch.ones(2), "b": torch.ones(2)}, references=["random"])
    assert [(line.line.color, line.line.dash) for line in figure.data] == [
        (FAINT, "dot"),
        (UP, "solid"),
        (DOWN, "solid"),
    ]
    assert bars(torch.ones(2), ["a", "random"], references=["random"]).data[0].marker.color == (UP, FAINT)
    every = lines([0, 1], {str(i): torch.zeros(2) for i in range(12)})
    assert len({(line.line.color, line.line.dash) for line in every.data}) == 12
    assert FAINT not in {line.line.color for line in every.data}


def test_the_buttons_of_a_figure_do_not_hide_its_title():
    for figure in (heatmap(torch.eye(2), title="T"), bars(torch.ones(2), title="T")):
        assert figure.layout.modebar.bgcolor == "rgba(0, 0, 0, 0)"  # that of plotly is half black on such paper


def test_points_that_are_close_have_no_labels_of_their_own():
    figure = lines([0, 9, 99, 999], {"a": torch.zeros(4), "b": torch.ones(4)}, logarithmic=True, baselines={"all": 1.0})
    zero, *others = figure.layout.xaxis.tickvals
    assert_close(others, [math.log(n) for n in (9, 99, 999)])
    assert zero < others[0]
    assert figure.layout.xaxis.ticktext == ("0", "9", "99", "999")
    assert figure.data[0].customdata == (0, None, 9, 99, 999)  # the line is broken where the axis is
    assert figure.data[0].y == (0.0, None, 0.0, 0.0, 0.0)
    level, broken = figure.layout.annotations
    assert broken.text == "//"
    assert zero < broken.x < others[0]
    assert "//" not in lines([1, 10], {"a": torch.zeros(2)}, logarithmic=True).to_json()
    assert (level.text, level.x, level.xanchor) == ("all<br>1", 1, "left")  # beside the lines, not on top of them
    with pytest.raises(ValueError, match="begins at 0, and a point is at -1"):
        lines([-1, 0], {"a": torch.zeros(2)}, logarithmic=True)
    assert lines([0, 1, 2, 4, 8, 62, 64], {"a": torch.zeros(7)}).layout.xaxis.tickvals == (0, 4, 8, 64)
    assert lines(range(25), {"a": torch.zeros(25)}).layout.xaxis.tickvals == tuple(range(25))


@pytest.mark.parametrize("labels", [list(range(31)), [f"without {i}" for i in range(3)]])
def test_labels_are_turned_only_where_they_do_not_fit(labels: list[object]) -> None:
    for figure in (heatmap(torch.rand(2, len(labels)), labels), bars(torch.rand(len(labels)), labels)):
        across = figure.layout.xaxis
        assert (across.tickangle, across.autotickangles) == (None, (0, -45))
    assert heatmap(torch.rand(2, 2)).layout.yaxis.tickangle == 0


def test_points_hold_the_numbers_and_escape_their_names():
    x, y = torch.tensor([3.0, 200.0]), torch.tensor([0.5, 0.25])
    figure = points(x, y, ["<b>", "exact"], (y - 0.1, y + 0.2), x_title="passes", logarithmic=True)
    [trace] = figure.data
    assert (list(trace.x), list(trace.y), list(trace.text)) == (x.tolist(), y.tolist(), ["&lt;b&gt;", "exact"])
    assert_close(torch.tensor(trace.error_y.arrayminus), torch.full((2,), 0.1))
    assert figure.layout.xaxis.type == "log"
    with pytest.raises(ValueError, match="each point has two coordinates and a label"):
        points(x, y, ["one"])
    with pytest.raises(ValueError, match="a logarithmic axis has positive numbers alone, and a point is at 0"):
        points([0, 1], y, ["a", "b"], logarithmic=True)
