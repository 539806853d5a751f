"""What coloured text refuses, and its numbers."""

import re

import pytest
import torch

from hooked_lm import viz
from hooked_lm.viz.token_views import token_grid


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ([1.0], None, "2 tokens for 1 values"),
        (torch.zeros(2, 3), None, "2 tokens for 3 values"),
        (torch.zeros(2, 2), ["a"], "1 names for 2 values"),
        (torch.zeros(1, 2, 2), None, "values are [token] or [value, token]"),
        ({"a": [1.0, 2.0]}, ["b"], "names of its own"),
        ({}, None, "values are [token] or [value, token]"),
    ],
)
def test_what_is_refused(values, names, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        viz.tokens(["a", "b"], values, names)


def test_each_value_has_its_scale_unless_there_is_a_limit() -> None:
    body = viz.tokens(["a", "b"], torch.tensor([[1.0, 2.0], [10.0, 5.0]]), ["x", "x"]).body
    assert re.findall(r"--s: ([\d.]+)", body) == ["0.500", "1.000", "1.000", "0.500"]
    body = viz.tokens(["a", "b"], torch.tensor([[1.0, 2.0], [10.0, 5.0]]), limit=10.0).body
    assert re.findall(r"--s: ([\d.]+)", body) == ["0.100", "0.200", "1.000", "0.500"]


def test_the_largest_value_has_the_strongest_colour_of_its_sign() -> None:
    def strengths(values: list[float]) -> list[tuple[str, str]]:
        return re.findall(r'class="(up|down)" style="--s: ([\d.]+)', viz.tokens(["a"] * len(values), values).body)

    assert strengths([-4.0, 2.0, 0.0]) == [("down", "1.000"), ("up", "0.500"), ("up", "0.000")]
    assert strengths([-0.1, 4.0]) == [("up", "0.000"), ("up", "1.000")]
    assert strengths([10.0, 10.5, 11.0]) == [("up", "0.000"), ("up", "0.500"), ("up", "1.000")]
    body = viz.tokens(["a", "b"], [-3.0, -1.0]).body
    assert "\N{MINUS SIGN}3<span" in body
    assert "</span>0</p>" in body
    assert "var(--up)" not in body


def test_text_is_escaped_and_lines_break() -> None:
    body = viz.tokens(['"<b>&"\n', "</span>"], [1.0, float("nan")], title="a < b").body
    assert "<b>" not in body
    assert body.count("</span>") == 3  # two tokens and the legend's ramp
    assert body.count("<br>") == 1
    assert "no value" in body


@pytest.mark.parametrize(("columns", "shown"), [(2, "·extraordin…"), (15, "·extra…"), (60, "")])
def test_tokens_of_a_grid_are_cut_to_their_cells_and_whole_on_hover(columns: int, shown: str) -> None:
    figure = token_grid(torch.rand(1, columns), [[" extraordinarily"] * columns])
    cells = figure.data[0]
    assert cells.text[0][0] == shown
    assert cells.hovertext[0][0] == "·extraordinarily"
    assert "%{hovertext}" in cells.hovertemplate
