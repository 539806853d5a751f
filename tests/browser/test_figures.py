"""A page with every kind of figure: drawn in light, dark and at phone width, with the numbers under the pointer."""

import time
from pathlib import Path

import pytest
import torch

from hooked_lm import viz
from hooked_lm.results import Scores
from tests.browser.conftest import PHONE, WIDE, Browser

TOKENS = ["When", " Mary", " and", " John", " left", ",", " Mary"]
POSITIONS = [f"{i} {token}" for i, token in enumerate(TOKENS)]


@pytest.fixture(scope="module")
def grid() -> torch.Tensor:
    return torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def page(grid: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    holed = grid.clone()
    holed[1, 2] = torch.nan
    figures = [
        Scores(grid, {"layer": range(4), "position": POSITIONS}).plot("Layers and tokens"),
        Scores(holed, {"layer": range(4), "position": POSITIONS}).plot(show_values=True),
        Scores(grid[0], {"head": [f"L1H{i}" for i in range(7)]}).plot("Bars"),
        Scores(grid[:, 0], {"layer": range(4)}).plot("A line"),
        Scores(torch.stack([grid] * 3), {"site": ["q", "k", "v"], "layer": range(4), "position": POSITIONS}).plot(
            "Panels"
        ),
        viz.attention_patterns(torch.eye(7).expand(3, 7, 7), TOKENS),
        viz.image_heat_map(
            grid[..., 0],
            torch.rand(3, 40, 70),
            title="A title that is longer than the window of a telephone is wide, above panels that are moved sideways",
        ),
        viz.feature_maps(grid),
        viz.View("A view", "<p id='inside'>Hello</p><div style='height:333px'></div>"),
    ]
    return viz.report("Figures", [viz.Section("All", *figures)], tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.parametrize(
    ("name", "scheme", "size"), [("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "dark", PHONE)]
)
def test_every_figure_is_drawn(browser: Browser, page: Path, name: str, scheme: str, size: tuple[int, int]) -> None:
    browser.open(page, scheme, size).wait("[data-drawn='8']")
    assert len(browser.all(".js-plotly-plot .main-svg")) >= 8
    assert browser.sideways() == 0
    paper = browser.js("return document.querySelector('.js-plotly-plot')._fullLayout.paper_bgcolor")
    assert paper == {"light": "#ffffff", "dark": "#14181f"}[scheme]
    code = (
        "return Math.max(...document.querySelector('#figure-1-7')._fullData.find(each => each.meta.pale).z.flat()[0])"
    )
    assert (browser.js(code) <= 122) == (scheme == "dark")  # the pixels of an image below values
    titles = "[...document.querySelectorAll('.gtitle, .gtitle-subtitle')]"
    right = browser.js(f"return Math.max(...{titles}.map(each => each.getBoundingClientRect().right))")
    assert right <= size[0]  # the titles of wide figures too
    browser.screenshot(f"figures-{name}", whole=True)


def test_a_cell_shows_its_token_and_value(browser: Browser, page: Path, grid: torch.Tensor) -> None:
    browser.open(page).wait("[data-drawn='8']")
    browser.hover("#figure-1-1 .nsewdrag", 1.5 / 7, 0.5 / 4)  # the second token, the top row: the last layer
    shown = browser.wait("#figure-1-1 .hoverlayer .hovertext").text
    assert "·Mary (1)" in shown
    assert f"{grid[3, 1].mean():.3f}".replace("-", "\N{MINUS SIGN}") in shown
    assert "mean of 3 prompts" in shown


def test_a_colour_bar_has_a_number_besides_zero(browser: Browser, tmp_path: Path) -> None:
    highest = [1.0, 1.6, 2.1, 3.0, 4.1, 4.5, 4.9, 5.2, 7.7, 9.9]
    figures = [viz.heatmap(torch.tensor([[high, low]])) for high in highest for low in (-1.0, 0.0)]
    browser.open(viz.report("Bars", [viz.Section("All", *figures)], tmp_path / "bars.html"))
    browser.wait(f"[data-drawn='{len(figures)}']")
    bars = "[...document.querySelectorAll('.js-plotly-plot')].map(each => each.querySelectorAll('.cbaxis text').length)"
    assert min(browser.js(f"return {bars}")) > 1


def test_a_missing_cell_says_so(browser: Browser, page: Path) -> None:
    browser.open(page).wait("[data-drawn='8']")
    browser.hover("#figure-1-2 .nsewdrag", 2.5 / 7, 2.5 / 4)
    assert "no value" in browser.wait("#figure-1-2 .hoverlayer .hovertext").text
    browser.hover("#figure-1-2 .nsewdrag", 1.5 / 7, 2.5 / 4)  # the cell beside it has one
    time.sleep(0.25)
    assert "mean of 3 prompts" in browser.text("#figure-1-2 .hoverlayer .hovertext")
    assert "1 of 28 without a value" in browser.find("#figure-1-2").get_attribute("aria-label")


def test_a_view_has_the_height_of_its_body(browser: Browser, page: Path) -> None:
    browser.open(page).wait("[data-drawn='8']")
    frame = browser.find("iframe.view")
    browser.driver.switch_to.frame(frame)
    assert browser.wait("#inside").text == "Hello"
    height = browser.js("return document.body.getBoundingClientRect().height")
    browser.driver.switch_to.default_content()
    assert height > 340
    browser.until(lambda: height <= frame.size["height"] < height + 2)  # which a message sets


def test_a_browser_without_decompression_says_so(browser: Browser, page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(
        "<script>\nasync", "<script>\ndelete window.DecompressionStream;\nasync", 1
    )
    browser.open(text)
    assert "too old for the pictures of this page" in browser.wait("#figure-1-1").text


def test_many_layers_and_tokens(browser: Browser, tmp_path: Path) -> None:
    values = torch.randn(24, 512, 1)
    labels = [f"{i}  word{i}" for i in range(512)]
    figure = Scores(values, {"layer": range(24), "position": labels}).plot()
    path = viz.report("Large", [viz.Section("24 x 512", figure)], tmp_path / "large.html")
    assert path.stat().st_size < 4_000_000
    browser.open(path).wait("[data-drawn='1']")
    browser.hover("#figure-1-1 .nsewdrag", 101.5 / 512, 0.5 / 24)
    assert "word10" in browser.wait("#figure-1-1 .hoverlayer .hovertext").text
    browser.screenshot("figures-large")
