"""The attention view: heads by mouse and by keyboard, and the numbers of tokens."""

import time
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.viz.attention_view import attention
from hooked_lm.viz.view import document
from tests.browser.conftest import PHONE, WIDE, Browser
from tests.close import assert_near

PROMPT = "When Mary and John went to the store, John gave a drink to"
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def run() -> tuple[list[str], list[torch.Tensor]]:
    model = HookedTransformer.from_pretrained("demo")
    _, cache = model.run_with_cache(PROMPT)
    return model.to_str_tokens(PROMPT), [cache["pattern", layer][0] for layer in range(model.cfg.n_layers)]


def opened(browser: Browser, view: Any, **how: Any) -> Browser:
    browser.open(view.to_html(), **how).wait(".attention[data-ready]")
    return browser


def listed(browser: Browser, kind: str) -> list[tuple[int, str]]:
    """The positions and numbers of a list."""
    items = browser.all(f"ol.{kind} li:not(.none)")
    return [
        (int(item.find_element("css selector", "small").text), item.find_element("css selector", "b").text)
        for item in items
    ]


def largest(weights: torch.Tensor) -> list[tuple[int, str]]:
    best = weights.argsort(descending=True)[:8].tolist()
    return [(i, f"{weights[i]:.3f}") for i in best if weights[i] >= 5e-4]


@pytest.mark.parametrize(
    ("name", "scheme", "size"), [("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "dark", PHONE)]
)
def test_the_view_opens(browser: Browser, run: Any, name: str, scheme: str, size: tuple[int, int]) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns, tokens), scheme=scheme, size=size).wait(".attention[data-thumbnails]")
    assert browser.sideways() == 0
    browser.all("[role=radio][aria-label=L1H7]")[0].click()
    browser.screenshot(f"attention-{name}", whole=True)


def test_a_token_shows_where_it_looks_and_who_looks_at_it(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns, tokens))
    browser.find("[role=radio][aria-label=L1H7]").click()
    token = 10
    browser.hover(f".text [data-i='{token}']")
    assert browser.text("h2.looks") == f"·{tokens[token].strip()} ({token}) looks at"
    assert listed(browser, "forward") == largest(patterns[1][7][token])
    assert listed(browser, "backward") == largest(patterns[1][7][:, token])


def test_the_first_head_and_cell_show_something(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns, tokens))
    assert browser.text(".name") == "L0H6"  # each token looks at the one before
    assert browser.text(".reading") == f"L0H6: ·to (14) \u2192 ·drink (13): {patterns[0][6][-1, -2]:.3f}"
    browser.find("[role=radio][aria-label=L1H0]").click()
    assert browser.text(".reading") == f"L1H0: ·to (14) \u2192 ·Mary (2): {patterns[1][0][-1, 2]:.3f}"


def rows_of_heads(browser: Browser) -> list[int]:
    """The number of heads in each row of the first layer."""
    buttons = "[...document.querySelectorAll('.layer')[0].querySelectorAll('button')]"
    tops = browser.js(f"return {buttons}.map(each => each.offsetTop)")
    return [tops.count(top) for top in sorted(set(tops))]


def test_heads_are_in_even_rows(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    for size, rows in (((1000, 900), [4, 4]), (PHONE, [8])):
        opened(browser, attention(patterns, tokens), size=size)
        assert rows_of_heads(browser) == rows


def test_heads_cells_and_tokens_are_reached_by_keyboard(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns, tokens))
    browser.find("[role=radio][aria-label=L0H0]").click()
    browser.js("document.querySelector('[role=radio][aria-checked=true]').focus()")
    browser.press("ARROW_UP", "ARROW_RIGHT", "ARROW_RIGHT")  # layer 0 is at the bottom
    assert browser.text(".name") == "L1H2"
    assert browser.js("return document.activeElement.getAttribute('aria-label')") == "L1H2"
    assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.js("document.querySelector('canvas[role=application]').focus()")
    q, k = len(tokens) - 2, min(int(patterns[1][2][-1, 1:].argmax()) + 2, len(tokens) - 1)  # from the strongest key
    browser.press("ARROW_UP", "ARROW_RIGHT")
    assert browser.text(".reading").endswith(f": {patterns[1][2][q, k]:.3f}")
    browser.js("document.querySelector('.text [aria-selected=true]').focus()")
    browser.press("HOME", "ARROW_RIGHT")
    assert browser.text("h2.looks").startswith("When (1)")
    assert listed(browser, "forward") == largest(patterns[1][2][1])


def test_the_heat_map_shows_the_value_under_the_pointer(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns[2], tokens, heads=[3]))
    browser.hover("canvas[role=application]", 0.2, 0.6)
    assert browser.text(".name") == "H3"
    tip = browser.text(".tip")
    q, k = (int(part.split(")")[0]) for part in tip.split("(")[1:3])
    assert tip.endswith(f": {patterns[2][3][q, k]:.3f}")


def test_the_first_token_can_be_hidden(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    opened(browser, attention(patterns, tokens))
    browser.find("[role=radio][aria-label=L0H0]").click()
    browser.find(".hide-first").click()
    weights = patterns[0][0][-1].clone()
    weights[0] = 0
    assert listed(browser, "forward") == largest(weights)


def test_what_is_missing_or_no_distribution_is_shown_as_it_is(browser: Browser) -> None:
    pattern = torch.tensor([[[0.5, torch.nan, 0.9], [2.0, 0.25, 0.0], [0.0, torch.inf, 0.0]]])
    opened(browser, attention(pattern, ["<b>a</b>", " b\n", "</script>"]))
    browser.hover(".text [data-i='0']")
    assert listed(browser, "forward") == [(2, "0.900"), (0, "0.500")]
    assert browser.text("ol.forward .none") == "1 without a value"
    assert "2 cells have no value" in browser.text(".notes")
    assert browser.text(".text [data-i='0']") == "<b>a</b>"
    browser.screenshot("attention-missing", whole=True)


def test_cells_without_a_value_are_hatched(browser: Browser) -> None:
    code = "const canvas = document.querySelector('canvas[role=application]');"
    code += "return Math.min(...canvas.getContext('2d').getImageData(300, 300, 20, 20).data)"
    darkest = {}
    for value in (0.0, torch.nan):
        opened(browser, attention(torch.full((1, 12, 12), value), [" token"] * 12))
        darkest[value] = browser.js(code)
    assert darkest[torch.nan] < 150 < 200 < darkest[0.0]  # diagonal lines; the pale ones of the grid


@pytest.mark.parametrize("style", ["display: none", "width: 9px; overflow: hidden"])
def test_a_view_that_was_hidden_is_drawn_when_it_is_shown(browser: Browser, run: Any, style: str) -> None:
    tokens, patterns = run
    browser.open(
        document("Two views", f'<div id="box" style="{style}">{attention(patterns * 8, tokens)._repr_html_()}</div>')
    )
    time.sleep(0.5)
    browser.js("document.getElementById('box').style = ''")
    frame = browser.find("iframe.view")
    browser.driver.switch_to.frame(frame)
    browser.wait(".attention[data-ready]")
    browser.until(lambda: browser.find("canvas[role=application]").size["height"] > 200)
    assert rows_of_heads(browser) == [8]
    bottoms = "['[aria-checked=true]', '.heads'].map(css => document.querySelector(css).getBoundingClientRect().bottom)"
    chosen, box = browser.js(f"return {bottoms}")
    assert 0 < chosen < box + 2  # the list is at the chosen head
    height = browser.js("return document.body.getBoundingClientRect().height")
    browser.driver.switch_to.default_content()
    browser.until(lambda: height <= frame.size["height"] < height + 2)


def test_a_frame_has_the_theme_and_the_height_that_its_notebook_gives(browser: Browser, run: Any) -> None:
    tokens, patterns = run
    view = attention(patterns, tokens)
    for theme, dark in (("false", True), ("true", False)):
        page = document("A notebook", f'<div data-jp-theme-light="{theme}">{view._repr_html_()}</div>')
        browser.open(page, scheme="light" if dark else "dark")
        frame = browser.find("iframe.view")
        browser.driver.switch_to.frame(frame)
        browser.wait(".attention[data-ready]")
        assert browser.js("return matchMedia('(prefers-color-scheme: dark)').matches") is dark
        height = browser.js("return document.body.getBoundingClientRect().height")
        assert abs(height - view.height) < 0.15 * height  # the estimate
        browser.driver.switch_to.default_content()
        browser.until(lambda height=height, frame=frame: height <= frame.size["height"] < height + 2)


def test_scores_with_negative_values_have_signs(browser: Browser, run: Any) -> None:
    scores = torch.tensor([[[0.5, -torch.inf], [-1.25, 0.25]]])
    opened(browser, attention(scores, ["a", "b"]))
    assert listed(browser, "forward") == [(0, f"{MINUS}1.250"), (1, "0.250")]


def test_cross_attention_has_two_texts(browser: Browser) -> None:
    pattern = torch.rand(2, 2, 4).softmax(-1)
    opened(browser, attention({5: pattern}, ["un", "deux"], ["one", "two", "three", "four"], heads="L5H1"))
    browser.hover(".texts .text:nth-of-type(1) [data-i='0']")
    assert listed(browser, "forward") == largest(pattern[1][0])
    browser.hover(".texts .text:nth-of-type(2) [data-i='2']")
    assert listed(browser, "backward") == largest(pattern[1][:, 2])
    browser.screenshot("attention-cross", whole=True)


def test_a_long_text_with_many_heads_is_small_and_opens_soon(browser: Browser) -> None:
    n = 512
    mask = torch.ones(n, n).tril().bool()
    layer = (2 * torch.randn(16, n, n)).masked_fill(~mask, -torch.inf).softmax(-1).half()
    page = attention([layer] * 24, [f" token{i}" for i in range(n)]).to_html()
    assert len(page) < 5_000_000
    start = time.perf_counter()
    browser.open(page).wait(".attention[data-ready]")
    browser.find(".heads [aria-label=L23H15]").click()
    assert browser.text(".name") == "L23H15"
    assert time.perf_counter() - start < 5
    browser.hover(".text [data-i='500']")
    numbers, weights = listed(browser, "forward"), layer[15][500].sort(descending=True).values
    assert_near(
        torch.tensor([float(number) for _, number in numbers]),
        weights[: len(numbers)].float(),
        0.008 / float(weights[0]),
        "two digits of values that are kept in steps of 1/255",
    )
    assert "are kept, so that the page stays small" in browser.text(".notes")
    browser.wait(".attention[data-thumbnails]")
    browser.screenshot("attention-long", whole=True)


def test_a_part_of_a_long_text_can_be_enlarged(browser: Browser) -> None:
    scores = torch.zeros(1, 600, 600).masked_fill(torch.ones(600, 600).triu(1).bool(), -torch.inf)
    scores[0, 400:, 123] = 9.0
    scores[..., 0] = 7.0
    opened(browser, attention(scores.softmax(-1), [f" t{i}" for i in range(600)]))
    canvas = browser.find("canvas[role=application]")
    code = """const {data} = arguments[0].getContext('2d').getImageData(100, 300, 200, 300), dark = Array(200).fill(0);
    for (let i = 0; i < data.length; i += 4) dark[i / 4 % 200] += data[i] < 100;
    return Math.max(...dark);"""
    assert browser.js(code, canvas) > 50  # the column of the key is seen, right of that of the first
    before = browser.js("return arguments[0].toDataURL()", canvas)
    for _ in range(4):
        browser.find(".closer").click()
    assert browser.js("return arguments[0].toDataURL()", canvas) != before
    browser.hover(canvas)
    row = int(browser.text(".tip").split("(")[1].split(")")[0])
    assert abs(row - 580) < 20  # around the marked cell, that of the last token
    for _ in range(4):
        browser.find(".wider").click()
    browser.hover(canvas, 0.2, 0.2)
    assert int(browser.text(".tip").split("(")[1].split(")")[0]) < 150  # the whole text is there again
