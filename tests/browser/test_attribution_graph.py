"""The page of an attribution graph: edges of a node, pins, supernodes, the slider, the keyboard, and how it looks."""

from dataclasses import replace
from pathlib import Path

import pytest

from hooked_lm.analysis.graphs.page import graph_page
from hooked_lm.viz.attribution_graph import GraphNode, attribution_graph_view
from hooked_lm.viz.features import feature_card
from tests.analysis.graphs.small import random_graph
from tests.browser.conftest import PHONE, WIDE, Browser

MODES = [("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "light", PHONE)]
TOKENS = ["The", " cat", " sat"]
NODES = [
    GraphNode("The@0", "token", None, 0, "The", influence=0.1),
    GraphNode(" cat@1", "token", None, 1, " cat", influence=0.3),
    GraphNode(" sat@2", "token", None, 2, " sat", influence=0.2),
    GraphNode(
        "L0F7@1",
        "feature",
        0,
        1,
        label="animals",
        share=0.4,
        influence=0.5,
        activation=2.0,
        total=3.0,
        bias=0.5,
        card=0,
    ),
    GraphNode("L0F8@2", "feature", 0, 2, share=0.7, influence=0.3, activation=1.0, total=1.0),
    GraphNode("L1E@2", "error", 1, 2, share=0.9, influence=0.1),
    GraphNode("L1F3@2", "feature", 1, 2, share=0.8, influence=0.2, activation=1.0, total=1.0),
    GraphNode("on", "target", None, 2, "' on'", probability=0.6, total=4.0),
]
EDGES = [(1, 3, 2.5), (0, 3, -0.5), (2, 4, 1.0), (3, 6, 1.5), (4, 6, -0.5), (5, 7, 0.25), (6, 7, 2.0), (3, 7, 1.0)]
CARD = feature_card({"density": "5%"}, [("a text", ["The", " cat"], [0.0, 2.0], 1)], {"promoted": [(" cat", 1.0)]})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    view = attribution_graph_view(NODES, EDGES, TOKENS, cards=[CARD], title="A cat")
    return view.write_html(tmp_path_factory.mktemp("page") / "small.html")


def node(name: str) -> str:
    """The selector of a node by its name."""
    names = [each.name for each in NODES]
    return f".scroll [data-unit='n{names.index(name)}']"


def inputs(browser: Browser) -> list[tuple[str, str]]:
    """The names and numbers in the lists of the panel."""
    rows = browser.all(".panel li button")
    return [(row.get_attribute("title"), row.find_element("css selector", "b").text) for row in rows]


def test_a_node_shows_its_edges(browser: Browser, small: Path) -> None:
    browser.open(small).wait(".scroll .unit")
    assert len(browser.all(".near .edge")) == 0
    browser.hover(node("L0F7@1"))
    browser.until(lambda: browser.text(".panel h3") == "L0F7@1")
    assert len(browser.all(".near .edge")) == 4
    assert len(browser.all(".near .edge.down")) == 1
    assert browser.text(".panel .said-label") == "animals"
    assert "edges, bias +0.500 and others" in browser.text(".panel .sum")
    assert [number for _, number in inputs(browser)] == ["+2.50", "\N{MINUS SIGN}0.500", "+1.50", "+1.00"]
    assert browser.text(".card caption") == "promoted"
    browser.hover(".panel h3")
    browser.until(lambda: browser.text(".panel h3") == "No node is chosen")


def test_a_click_keeps_a_node_and_a_row_leads_on(browser: Browser, small: Path) -> None:
    browser.open(small).wait(".scroll .unit")
    browser.find(node("L1F3@2")).click()
    browser.hover(".bar")
    assert browser.text(".panel h3") == "L1F3@2"
    assert browser.find(node("L1F3@2")).get_attribute("aria-pressed") == "true"
    browser.find(".panel li button[title='L0F7@1']").click()
    assert browser.text(".panel h3") == "L0F7@1"
    assert browser.js("return document.activeElement.dataset.unit") == "n3"


def test_the_slider_hides_nodes_of_little_influence(browser: Browser, small: Path) -> None:
    browser.open(small).wait(".scroll .unit")
    assert browser.text(".count") == "4 of 4 nodes, 8 edges"
    browser.js(
        "const range = document.querySelector('.share'); range.value = 720; range.dispatchEvent(new Event('input'))"
    )
    assert browser.text(".bar output") == "72%"
    assert browser.text(".count") == "2 of 4 nodes, 4 edges"
    assert not browser.all(node("L1F3@2"))
    assert browser.all(node("on"))


def test_pins_make_a_subgraph_and_a_supernode(browser: Browser, small: Path) -> None:
    browser.open(small).wait(".scroll .unit")
    for name in ("L0F7@1", "L1F3@2"):
        browser.find(node(name)).click()
        browser.find(".panel .actions button").click()
    assert browser.find(node("L0F7@1")).get_attribute("aria-label").endswith("pinned")
    browser.find(".only").click()
    assert not browser.all(node("L0F8@2"))
    assert browser.text(".count") == "2 of 4 nodes, 5 edges"
    browser.find(".only").click()
    browser.find(".group-name").send_keys("says on")
    browser.find(".group-pins").click()
    assert browser.text(".panel h3") == "says on"
    assert not browser.all(node("L0F7@1"))
    into = [number for _, number in inputs(browser)]
    assert into[:4] == ["+2.50", "\N{MINUS SIGN}0.500", "\N{MINUS SIGN}0.500", "+3.00"]  # 2 + 1 to the output
    browser.find(".collapse").click()
    assert browser.all(node("L0F7@1"))
    browser.find(".collapse").click()
    browser.find(".scroll .unit.group").click()
    browser.js("[...document.querySelectorAll('.panel .actions button')].at(-1).click()")
    assert browser.all(node("L0F7@1"))


def test_the_keyboard_reaches_everything(browser: Browser, small: Path) -> None:
    """One stop of the Tab key; arrows move, i and o follow edges, Enter keeps, p pins, Escape lets go."""
    browser.open(small).wait(".scroll .unit")
    stops = browser.js("return document.querySelectorAll('.scroll .unit[tabindex=\"0\"]').length")
    assert stops == 1
    browser.js("document.querySelector('.scroll .unit[tabindex=\"0\"]').focus()")
    at = "return document.activeElement.dataset.unit"
    browser.press("i")
    assert browser.js(at) == "n6"
    browser.press("i")
    assert browser.js(at) == "n3"
    browser.press("ARROW_DOWN")
    assert browser.js(at) == "n1"
    browser.press("ARROW_RIGHT", "ARROW_LEFT", "o")
    assert browser.js(at) == "n3"
    browser.press("ENTER")
    assert browser.find(node("L0F7@1")).get_attribute("aria-pressed") == "true"
    assert browser.text(".live").startswith("feature L0F7@1 at ·cat, position 1; animals; 2 inputs, 2 outputs")
    browser.press("p")
    assert "pinned" in browser.find(node("L0F7@1")).get_attribute("class")
    assert browser.js(at) == "n3"
    browser.press("ESCAPE")
    assert browser.find(node("L0F7@1")).get_attribute("aria-pressed") == "false"


def test_every_control_has_a_name(browser: Browser, small: Path) -> None:
    browser.open(small).wait(".scroll .unit")
    controls = [each for each in browser.all(".traced button, .traced input, .scroll .unit") if each.is_displayed()]
    assert len(controls) > 12
    for control in controls:
        assert control.accessible_name, control.get_attribute("outerHTML")
    assert browser.find(".scroll svg").accessible_name == "Attribution graph: A cat, 8 nodes and 8 edges"


@pytest.mark.parametrize(("name", "scheme", "size"), MODES, ids=[mode[0] for mode in MODES])
def test_hundreds_of_nodes_stay_legible(
    browser: Browser, tmp_path: Path, name: str, scheme: str, size: tuple[int, int]
) -> None:
    """No node covers another one, and the page is no wider than the window."""
    graph = random_graph(n_layers=4, n_pos=12, each=8, n_targets=6)
    graph = replace(graph, supernodes={"a group": [0, 1, 2, 3]})
    page = graph_page(graph, nodes=1.0, edges=0.9, title="Hundreds").write_html(tmp_path / "large.html")
    browser.open(page, scheme, size).wait(".scroll .unit")
    assert len(browser.all(".scroll .unit")) > 300
    overlaps = browser.js(
        """
        const boxes = [...document.querySelectorAll('.scroll .unit .shape')].map(each => each.getBoundingClientRect());
        let found = 0;
        for (const [i, a] of boxes.entries()) for (const b of boxes.slice(i + 1))
          found += a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        return found;
        """
    )
    assert overlaps == 0
    assert browser.sideways() == 0
    browser.js(
        "document.querySelectorAll('.scroll .unit.feature')[200].dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert browser.all(".near .edge")
    assert browser.screenshot(f"attribution-graph-{name}", whole=True).stat().st_size > 20_000
