"""Coloured text: a value on hover and focus, a chooser among several, escaping."""

import torch

from hooked_lm import HookedTransformer, viz
from hooked_lm.analysis import saliency
from tests.browser.conftest import PHONE, Browser

PROMPT = "When Mary and John went to the store, John gave a drink to"


def said(browser: Browser, css: str) -> str:
    """The text that hover or focus adds to an element."""
    return browser.js("return getComputedStyle(document.querySelector(arguments[0]), '::after').content", css).strip(
        '"'
    )


def test_one_value_is_shown_on_hover_and_on_focus(browser: Browser) -> None:
    tokens = ["<script>throw 1</script>", " cat\n", " sat", ' "on"']
    browser.open(viz.tokens(tokens, [0.5, -1.25, float("nan"), 0.0], title="<i>").to_html())
    assert browser.text("h2") == "<i>"
    assert browser.all("input") == []
    assert said(browser, ".text span:nth-of-type(2)") == "none"
    browser.hover(".text span:nth-of-type(2)")
    assert said(browser, ".text span:nth-of-type(2)") == "\N{MINUS SIGN}1.25"
    browser.press("TAB")
    assert said(browser, ".text span:nth-of-type(1)") == "0.5"
    assert "no value (1)" in browser.text(".legend")
    assert browser.text(".text").count("\n") == 1
    browser.screenshot("tokens-one")


def test_one_of_several_values_is_chosen_by_keyboard(browser: Browser) -> None:
    values = {"loss": torch.rand(40), "norm": torch.rand(40) - 0.5}
    browser.open(viz.tokens([f" token{i}" for i in range(40)], values).to_html(), "dark", PHONE)
    assert browser.sideways() == 0
    assert [panel.is_displayed() for panel in browser.all(".panel")] == [True, False]
    browser.press("TAB", "ARROW_RIGHT")
    assert [panel.is_displayed() for panel in browser.all(".panel")] == [False, True]
    browser.screenshot("tokens-several-phone-dark", whole=True)


def test_saliency_of_a_generated_token(browser: Browser) -> None:
    model = HookedTransformer.from_pretrained("demo")
    found = saliency(model, PROMPT, continuation=" Mary and", of="logit difference", contrast=[" John", " the"])
    browser.open(found.view().to_html())
    browser.screenshot("saliency", whole=True)
    browser.find("label[for=value-1]").click()
    token = ".panel-1 .text span:nth-of-type(11)"
    browser.hover(token)
    assert said(browser, token) == f"{found.signed[1, 10]:.3g}".replace("-", "\N{MINUS SIGN}")
