"""Turns of a conversation as bands above heat maps, and beside tokens on pages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import analysis, viz
from hooked_lm.hooks.token_labels import TokenLabel
from hooked_lm.viz.bands import OF_ROLES, ROOM, TEMPLATE
from tests.results.test_turns import RIGHT, WRONG, chat, model, swept

pytestmark = pytest.mark.filterwarnings("ignore::hooked_lm.engine.study.SwapWarning")

TEMPLATES = [TokenLabel(-1, "template", "marker")]
USER = [TokenLabel(0, "user", "content")] * 5
THOUGHT, ANSWER = [TokenLabel(1, "assistant", "thinking")] * 8, [TokenLabel(1, "assistant", "content")] * 6
TURNS = [*TEMPLATES, *USER, *TEMPLATES, *THOUGHT, *ANSWER]


def bands(figure: Any) -> list[tuple[float, float, str]]:
    return [(shape.x0, shape.x1, shape.fillcolor) for shape in figure.layout.shapes]


def names(figure: Any) -> list[str]:
    return [note.hovertext for note in figure.layout.annotations if note.hovertext]


def test_a_band_is_over_the_columns_of_its_turn():
    figure = viz.heatmap(torch.randn(2, len(TURNS)), x_turns=TURNS, title="Effects")
    colours = [TEMPLATE, OF_ROLES["user"], TEMPLATE, OF_ROLES["assistant"], OF_ROLES["assistant"]]
    edges = [(0, 1), (1, 6), (6, 7), (7, 15), (15, 21)]
    assert bands(figure) == [(a - 0.45, b - 0.55, colour) for (a, b), colour in zip(edges, colours, strict=True)]
    assert names(figure) == ["template", "0 user", "template", "1 assistant, thinking", "1 assistant"]
    assert [note.text for note in figure.layout.annotations][1::2] == ["0 user", "1 assistant, thinking"]
    plain = viz.heatmap(torch.randn(2, len(TURNS)), title="Effects")
    assert figure.layout.margin.t == plain.layout.margin.t + ROOM
    assert not plain.layout.shapes


def test_narrow_bands_have_their_names_on_hover():
    n = 200
    turns = [TokenLabel(i // 4, ("user", "assistant")[i // 4 % 2], "content") for i in range(n)]
    figure = viz.heatmap(torch.randn(2, n), x_turns=turns)
    assert len(bands(figure)) == n // 4
    assert {note.text for note in figure.layout.annotations} == {"&nbsp;"}
    assert names(figure)[:2] == ["0 user", "1 assistant"]


def test_each_panel_has_bands_below_its_title():
    figure = viz.heatmap(torch.randn(3, 2, len(TURNS)), x_turns=TURNS, panels=["a", "b", "c"])
    assert len(bands(figure)) == 3 * 5
    assert {shape.xref for shape in figure.layout.shapes} == {"x", "x2", "x3"}
    assert {shape.yref for shape in figure.layout.shapes} == {"y domain", "y2 domain", "y3 domain"}
    titles = figure.layout.annotations[:3]
    assert [title.text for title in titles] == ["a", "b", "c"]
    assert all(title.yshift > shape.y1 for title in titles for shape in figure.layout.shapes)


def test_equal_first_columns_keep_a_common_turn():
    values = torch.randn(2, len(TURNS))
    values[:, :6] = 0.0
    figure = viz.heatmap(values, x_turns=TURNS)
    assert figure.layout.xaxis.ticktext[0] == "6 equal columns"
    assert names(figure) == ["template", "1 assistant, thinking", "1 assistant"]
    assert bands(figure)[0][:2] == (1 - 0.45, 2 - 0.55)
    figure = viz.heatmap(values[:, 1:], x_turns=TURNS[1:])
    assert names(figure)[0] == "0 user"


def test_a_column_without_a_turn_has_no_band():
    figure = viz.heatmap(torch.randn(2, 3), x_turns=[USER[0], None, USER[0]])
    assert [band[:2] for band in bands(figure)] == [(0 - 0.45, 1 - 0.55), (2 - 0.45, 3 - 0.55)]
    with pytest.raises(ValueError, match="2 turns for 3 columns"):
        viz.heatmap(torch.randn(2, 3), x_turns=[None, None])


@pytest.mark.parametrize(
    "draw",
    [
        lambda: swept().plot(),
        lambda: swept().mean_by("turn").plot(),
        lambda: analysis.logit_lens(model(), chat()).plot(),
        lambda: analysis.saliency(model(), chat(), max_new_tokens=2).plot(),
        lambda: analysis.source_attribution(model(), chat(), RIGHT, WRONG).plot(),
    ],
    ids=["sweep", "means", "lens", "saliency", "sources"],
)
def test_results_of_conversations_have_bands(draw: Any):
    figure = draw()
    by_turn = "turn" in str(figure.layout.xaxis.title.text)
    assert ("2 user" in names(figure)) is not by_turn


def test_pages_show_whose_tokens_are(tmp_path: Path):
    row = viz.TokenRow("clean", ["<u>", "Hi", "</u>"], [1], [TEMPLATES[0], USER[0], TEMPLATES[0]])
    page = viz.report("A page", [viz.Section("Prompts", row)], tmp_path / "page.html").read_text()
    assert page.count('<span class="turn ') == 3
    assert (
        '<span class="turn user">0 user</span><span class="tokens"><span class="token marked">Hi</span></span>' in page
    )
    assert "&lt;u&gt;" in page
    with pytest.raises(ValueError, match="1 turns for 2 tokens"):
        viz.TokenRow("clean", ["a", "b"], (), [None])
