"""The report of the bundled model's experiment."""

from pathlib import Path

import pytest

from hooked_lm import HookedTransformer
from hooked_lm.demo import experiment
from tests.browser.conftest import PHONE, WIDE, Browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = experiment.run(HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(2))
    return experiment.write_report(result, tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize(
    ("name", "scheme", "size"), [("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "light", PHONE)]
)
def test_the_report_opens(browser: Browser, page: Path, name: str, scheme: str, size: tuple[int, int]) -> None:
    browser.open(page, scheme, size).wait(".js-plotly-plot .heatmaplayer image")
    assert browser.sideways() == 0
    browser.screenshot(f"demo-report-{name}")


def test_on_a_phone_each_heat_map_shows_its_first_values_at_once(browser: Browser, page: Path) -> None:
    """Of a sweep over tokens the first columns say nothing: values must not begin outside of the window."""
    browser.open(page, "light", PHONE).wait("[data-drawn]")
    code = """return [...document.querySelectorAll('.js-plotly-plot')].flatMap(place => {
      const {_fullLayout: {xaxis}, _fullData: [{type, z}]} = place, left = place.getBoundingClientRect().left;
      if (type !== 'heatmap') return [];
      const first = Math.min(...[...z].map(row => [...row].findIndex(value => Math.abs(value) > 0.001)).filter(i => i >= 0));
      return [left + xaxis._offset + xaxis.d2p(first + 0.5)];
    })"""
    ends = browser.js(code)
    assert len(ends) > 4
    assert max(ends) < PHONE[0]


def test_a_heat_map_shows_a_value_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.open(page).wait(".js-plotly-plot .heatmaplayer image")
    browser.hover(".js-plotly-plot .nsewdrag", 0.3, 0.4)
    assert "0." in browser.wait(".hoverlayer .hovertext").text


def test_an_error_in_the_console_is_seen(browser: Browser) -> None:
    browser.open("<!doctype html><link rel=icon href='data:,'><script>throw new Error('broken')</script>")
    assert any("broken" in complaint for complaint in browser.complaints())
