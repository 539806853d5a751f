"""What figures do with values that cannot be drawn: they are missing and said, or refused in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hooked_lm.results import Scores
from hooked_lm.viz import (
    attention,
    attention_patterns,
    bars,
    contributions,
    feature_maps,
    heatmap,
    image_heat_map,
    layered_graph,
    lines,
    tokens,
    visible,
)
from tests.close import assert_close
from tests.unchecked import unchecked

INFINITE, MISSING = torch.inf, torch.nan
SAID = "1 of 4 without a value; 2 of 4 infinite"
VALUES = torch.tensor([1.0, INFINITE, -INFINITE, MISSING])


def said(figure: Any) -> str:
    return figure.layout.title.subtitle.text


@pytest.mark.parametrize(
    "figure",
    [
        lambda: heatmap(VALUES.view(2, 2)),
        lambda: bars(VALUES),
        lambda: contributions(VALUES),
        lambda: lines(range(4), {"a": VALUES}),
        lambda: feature_maps(VALUES.view(1, 2, 2)),
        lambda: image_heat_map(VALUES.view(2, 2)),
        lambda: attention_patterns(VALUES.view(1, 2, 2), ["a", "b"]),
        lambda: Scores(VALUES.view(2, 2, 1), {"layer": [0, 1], "head": [0, 1]}).plot(),
    ],
)
def test_infinite_values_are_missing_and_said(figure: Callable[[], Any]) -> None:
    assert said(figure()) == SAID


def test_infinite_cells_are_hatched_and_say_so() -> None:
    _, missing, _, infinite, hatch = heatmap(VALUES.view(2, 2)).data
    assert "<br>no value<" in missing.hovertemplate
    assert "<br>infinite<" in infinite.hovertemplate
    assert torch.from_numpy(infinite.z).isnan().tolist() == [[True, False], [False, True]]
    assert hatch.fillpattern.shape == "/"
    assert heatmap(VALUES.view(2, 2), show_values=True).data[0].text[0][1] == ""


def test_infinite_parts_are_not_summed() -> None:
    figure = contributions(torch.tensor([4.0, 2.0, INFINITE, 1.0]), n=1)
    assert said(figure) == "1 of 4 parts; the others add up to 3; 1 of 4 infinite"
    assert_close(torch.tensor(figure.data[0].x), [4.0])


def test_a_baseline_without_a_value_is_no_middle() -> None:
    level = {"clean": MISSING, "corrupted": 0.5}
    plain = heatmap(torch.eye(2)).data[0]
    centred = heatmap(torch.eye(2), centre=MISSING, marks={"clean": MISSING})
    assert (centred.data[0].zmin, centred.data[0].zmax) == (plain.zmin, plain.zmax)
    assert said(centred) == "clean without a value"
    for figure in (bars(torch.ones(2), baselines=level), lines([0, 1], {"a": torch.ones(2)}, baselines=level)):
        assert said(figure) == "clean without a value"
        assert len(figure.layout.shapes) == 1
    assert bars(torch.ones(2), baselines=level).data[0].base == 0.5


def test_lists_and_arrays_are_drawn_as_tensors() -> None:
    values = torch.rand(2, 2)
    drawn: dict[Callable[[Any], Any], torch.Tensor] = {
        heatmap: values,
        bars: values[0],
        contributions: values[0],
        feature_maps: values[None],
        lambda line: lines([0, 1], {"a": line}, {"a": (line, line)}): values[0],
        lambda pattern: attention_patterns(pattern, ["a", "b"]): values[None],
    }
    for draw, given in drawn.items():
        assert draw(given.numpy()).to_json() == draw(given).to_json()
        if draw is not list(drawn)[-1]:  # a list of patterns is a list of layers
            assert draw(given.tolist()).to_json() == draw(given).to_json()
    assert attention(values[None].numpy(), ["a", "b"]) == attention(values[None], ["a", "b"])


REFUSED: dict[str, Callable[[], Any]] = {
    r"no values to draw: they are \[0, 3\]": lambda: heatmap(torch.zeros(0, 3)),
    r"no values to draw: they are \[0, 3, 3\]": lambda: heatmap(torch.zeros(0, 3, 3)),
    r"maps are \[channel, height, width\], got \[2, 2\]": lambda: feature_maps(torch.zeros(2, 2)),
    r"maps are \[channel, height, width\], got \[0, 2, 2\]": lambda: feature_maps(torch.zeros(0, 2, 2)),
    r"bars have one axis, got \[2, 2\]: heatmap draws two": lambda: bars(torch.zeros(2, 2)),
    "n is the number of parts that are drawn, from 1, got 0": lambda: contributions(torch.ones(2), n=0),
    "2 centres for 3 panels": lambda: heatmap(torch.rand(3, 2, 2), centre=[0.0, 1.0]),
    r"a finite number above 0, got -1\.0": lambda: heatmap(torch.eye(2), limit=-1.0),
    "a finite number above 0, got nan": lambda: tokens(["a"], [1.0], limit=MISSING),
    r"the line 'a' has values of shape \[2, 2\], and there are 2 points": lambda: lines([0, 1], {"a": torch.eye(2)}),
    r"an interval of \[3\] for values \[2\]": lambda: lines([0, 1], {"a": [1, 2]}, {"a": ([0, 0, 0], [1, 1, 1])}),
    "an interval of 'b', but no such line: there are 'a'": lambda: lines(
        [0, 1], {"a": [1, 2]}, {"b": ([0, 0], [1, 1])}
    ),
    "1 of 1 scores are NaN or infinite": lambda: layered_graph(
        {"a": 0, "b": 1}, [("a", "b", "")], torch.tensor([INFINITE])
    ),
    "tokens is one text: give a list": lambda: tokens("ab", [1.0, 2.0]),
    r"values are \[token\] or \[value, token\], got \[\]": lambda: tokens(["a"], 1.0),  # type: ignore[arg-type]
}


@pytest.mark.every_parameter
@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_drawn_is_refused(message: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_complex_values_and_texts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"values are complex .* draw values.abs\(\)"):
        heatmap(torch.eye(2) * 1j)
    with unchecked(), pytest.raises(TypeError, match="lists of numbers, got list"):
        bars(["a", "b"])


def test_control_characters_and_halves_of_characters_are_visible(tmp_path: Any) -> None:
    assert visible("a\x00\x1b[31m\x07") == "a␀␛[31m␇"
    assert visible("\ud83d") == "\N{REPLACEMENT CHARACTER}"
    tokens(["\ud83d", "\x00"], [1.0, 2.0]).write_html(tmp_path / "page.html")
    assert "\N{REPLACEMENT CHARACTER}" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_no_values_are_said() -> None:
    assert said(bars(torch.zeros(0))) == said(lines([], {})) == "no values"
