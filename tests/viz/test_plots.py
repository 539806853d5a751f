"""Figures hold exactly the numbers they were given, and labels are read as text."""

import pytest
import torch

from hooked_lm.viz import attention_patterns, bars, heatmap, token_label, visible
from tests.close import assert_close

TOKENS = [" Mary", " Mary", "<b>", "\n"]


def test_a_heatmap_holds_the_numbers():
    values = torch.randn(3, 4)
    figure = heatmap(values, TOKENS, ["a", "b", "c"], title="T", x_title="X", y_title="Y", value_name="V")
    [trace] = figure.data
    assert torch.equal(torch.from_numpy(trace.z), values)
    assert figure.layout.title.text == "T"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("X", "Y")
    assert trace.colorbar.title.text == "V"
    assert figure.layout.yaxis.autorange == "reversed"


def test_values_that_need_gradients_or_other_types_are_drawn():
    values = torch.randn(2, 2, dtype=torch.bfloat16, requires_grad=True)
    assert torch.equal(torch.from_numpy(heatmap(values).data[0].z), values.detach().float())


@pytest.mark.parametrize(
    ("values", "limit", "expected"),
    [
        ([[0.0, -3.0], [1.0, 2.0]], None, 3.0),
        ([[0.0, -3.0], [1.0, 2.0]], 1.0, 1.0),
        ([[0.0, torch.nan]], None, 1.0),
        ([[torch.nan, 0.25]], None, 0.25),
    ],
)
def test_colours_are_centred_at_zero(values: list, limit: float | None, expected: float):
    trace = heatmap(torch.tensor(values), limit=limit).data[0]
    assert (trace.zmin, trace.zmax) == (-expected, expected)
    middle = dict(trace.colorscale)[0.5]
    assert middle == "#ffffff"


def test_equal_labels_stay_apart():
    axis = heatmap(torch.zeros(1, 4), TOKENS).layout.xaxis
    assert axis.tickvals == (0, 1, 2, 3)
    assert axis.ticktext == ("·Mary", "·Mary", "&lt;b&gt;", "↵")


def test_numbers_in_cells_leave_out_zeros():
    figure = heatmap(torch.tensor([[0.001, -0.254, 1.0, torch.nan]]), show_values=True)
    assert [list(row) for row in figure.data[0].text] == [["", "\N{MINUS SIGN}0.25", "1.00", ""]]
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
    figure = attention_patterns(pattern, TOKENS, labels)
    assert len(figure.data) == n_heads
    for head, trace in enumerate(figure.data):
        assert torch.equal(torch.from_numpy(trace.z), pattern[head])
        assert figure.layout.annotations[head].text == f"{head}&lt;i&gt;"
        across, down = (trace[axis].replace(axis[0], axis[0] + "axis") for axis in ("xaxis", "yaxis"))
        assert figure.layout[across].ticktext == figure.layout[down].ticktext == tuple(map(token_label, TOKENS))
        assert figure.layout[down].autorange == "reversed"
        # the tokens are written below the lowest panel of each column, and left of the first of each row
        assert figure.layout[across].showticklabels == (head + 2 >= n_heads)
        assert figure.layout[down].showticklabels == (head % 2 == 0)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)


def test_patterns_name_their_heads():
    figure = attention_patterns(torch.eye(4)[None], TOKENS)
    assert [annotation.text for annotation in figure.layout.annotations] == ["head 0"]


def test_patterns_with_the_wrong_number_of_labels():
    with pytest.raises(ValueError, match="1 head labels for 2 heads"):
        attention_patterns(torch.zeros(2, 4, 4), TOKENS, ["a"])
    with pytest.raises(ValueError, match="3 labels for 4 positions"):
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
