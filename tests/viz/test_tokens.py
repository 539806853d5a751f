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
