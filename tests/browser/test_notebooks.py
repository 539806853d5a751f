"""Views in the pages that notebooks become: one below the other, far down the page, with nothing around them but HTML."""

import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
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


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *_: Any) -> None: ...


def test_a_frame_around_the_output_learns_the_height_and_gives_the_theme(browser: Browser, tmp_path: Path) -> None:
    """marimo shows an output with a script as a file of its own in a frame, of which it reads the scroll height."""
    view = viz.attention(torch.rand(2, 5, 5).tril(), TOKENS)
    (tmp_path / "output.html").write_text(view._repr_html_(), encoding="utf-8")
    page = "<!DOCTYPE html><html style='color-scheme: dark'><link rel='icon' href='data:,'><iframe src='output.html' height=100>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.driver.get(f"http://127.0.0.1:{server.server_port}/page.html")
        root = "document.querySelector('iframe').contentDocument.documentElement"
        browser.until(lambda: browser.js(f"return {root}.scrollHeight") > 300)
        assert browser.js(f"return {root}.clientHeight") == 100
        browser.driver.switch_to.frame(browser.find("iframe"))
        assert (
            browser.js("return getComputedStyle(document.documentElement).colorScheme") == "light dark"
        )  # no white border
        assert inside(browser, "return matchMedia('(prefers-color-scheme: dark)').matches") == [True]
        server.shutdown()
