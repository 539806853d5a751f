"""Views in the pages that notebooks become: one below the other, far down the page, with nothing around them but HTML."""

import time
from typing import Any

import torch

from hooked_lm import viz
from tests.browser.conftest import Browser

TOKENS = ["When", " Mary", " and", " John", " left"]
PAGE = (
    "<!DOCTYPE html><body style='margin: 0'><div style='height: 4000px'>cells</div>{}<div style='height: 2000px'></div>"
)


def inside(browser: Browser, code: str) -> list[Any]:
    """What a piece of JavaScript returns in the frame of each view."""
    found = []
    for frame in browser.all("iframe.view"):
        browser.driver.switch_to.frame(frame)
        found.append(browser.js(code))
        browser.driver.switch_to.default_content()
    return found


def test_views_out_of_sight_have_their_heights_and_are_drawn_in_sight(browser: Browser) -> None:
    pattern = torch.rand(2, 5, 5).tril()
    views = [viz.attention([pattern, pattern], TOKENS), viz.tokens(TOKENS, torch.rand(5))]
    browser.open(PAGE.format("".join(f"<div>{view._repr_html_()}</div>" for view in views)))
    browser.until(lambda: all(inside(browser, "return !document.querySelector('.opening')")))

    def differences() -> list[float]:
        bodies = inside(browser, "return document.body.getBoundingClientRect().height")
        frames = [frame.size["height"] for frame in browser.all("iframe.view")]
        return [abs(frame - body) for frame, body in zip(frames, bodies, strict=True)]

    browser.until(lambda: max(differences()) < 2)
    browser.js("document.querySelector('iframe.view').scrollIntoView()")
    time.sleep(0.3)
    browser.screenshot("view-in-notebook-page")
    map_of = "document.querySelector('canvas[role=application]')"
    ink = (
        f"const map = {map_of}; if (!map) return null; "
        "const cells = map.getContext('2d').getImageData(0, 0, map.width, map.height).data; "
        "return [...cells].some((part, i) => i % 4 === 0 && cells[i + 3] && part < 200)"
    )
    assert inside(browser, ink) == [True, None]
    assert max(differences()) < 2
