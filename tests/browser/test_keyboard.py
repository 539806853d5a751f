"""Figures are reached by keyboard: arrow keys move among their values, which are shown and said."""

import time
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer, viz
from hooked_lm.analysis import circuits, feature_report
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.interventions.dictionaries import TopK
from tests.browser.conftest import PHONE, WIDE, Browser

MODES = [("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "light", PHONE)]


def said(browser: Browser, figure: str) -> str:
    """What the figure says, when it has drawn it."""
    time.sleep(0.25)
    return browser.js(f"return document.querySelector('#{figure} + .said').textContent")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.nan, 6.0]])
    figures = [
        viz.heatmap(values, ["a", "b", "c"], y_title="layer", upwards=True),
        viz.heatmap(torch.stack([values, -values]), panels=["first", "second"]),
        viz.bars(torch.tensor([1.0, 9.0, -2.0]), ["x", "y", "z"]),
        viz.contributions(torch.tensor([1.0, 9.0, -2.0]), ["x", "y", "z"]),
        viz.lines([0, 1, 2], {"low": torch.tensor([1.0, 9.0, 1.0]), "high": torch.tensor([10.0, 11.0, 12.0])}),
    ]
    return viz.report("Keys", [viz.Section("All", *figures)], tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.parametrize(
    ("figure", "keys", "text"),
    [
        ("figure-1-1", ["ARROW_DOWN"], "layer 0, a, 1.000"),
        ("figure-1-1", ["HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_UP"], "layer 1, c, 6.000"),
        ("figure-1-1", ["HOME", "ARROW_RIGHT", "ARROW_UP", "ARROW_LEFT"], "layer 1, a, 4.000"),
        ("figure-1-1", ["END"], "layer 1, b, no value"),
        ("figure-1-2", ["HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT"], "second, 0, 0, -1.000"),
        ("figure-1-3", ["HOME", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT"], "y, 9.000"),
        ("figure-1-4", ["HOME", "ARROW_DOWN", "ARROW_DOWN"], "z, \N{MINUS SIGN}2.000"),
        ("figure-1-5", ["HOME", "ARROW_RIGHT", "ARROW_UP"], "high, 1, 11.00"),
    ],
)
def test_arrow_keys_move_among_values(browser: Browser, page: Path, figure: str, keys: list[str], text: str) -> None:
    browser.open(page).wait("[data-drawn='5']")
    browser.js(f"document.getElementById('{figure}').focus()")
    for key in keys:
        browser.press(key)
    assert said(browser, figure) == text
    assert browser.find(f"#{figure} .hoverlayer .hovertext").is_displayed()
    browser.press("ESCAPE")


@pytest.fixture(scope="module")
def circuit() -> circuits.Circuit:
    graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    edges = [("input", "m0"), ("m0", "L1H2<q>"), ("m0", "L1H2<v>"), ("L1H2", "m2"), ("m2", "logits"), ("m0", "logits")]
    found = circuits.Circuit.of(graph, [*edges, ("input", "L3H1<k>"), ("L3H1", "logits")])
    scores = torch.zeros(found.edges.shape)
    for i, place in enumerate([*edges, ("input", "L3H1<k>"), ("L3H1", "logits")]):
        scores[graph.edge(*place)] = (i - 8.0) * (1 if i != 3 else -1)
    return circuits.Circuit(graph, found.edges, scores, about={"method": "eap", "metric": "logit difference"})


@pytest.mark.parametrize(("name", "scheme", "size"), MODES)
def test_nodes_of_a_circuit_are_chosen_with_a_click_or_enter(
    browser: Browser, circuit: circuits.Circuit, tmp_path: Path, name: str, scheme: str, size: tuple[int, int]
) -> None:
    path = viz.write_html(circuit.plot("A circuit", n_edges=6), tmp_path / "circuit.html")
    browser.open(path, scheme, size).wait(".node[aria-pressed]")
    assert browser.sideways() == 0
    drawing = "svg.narrow" if size == PHONE else "svg.wide"
    assert [svg.is_displayed() for svg in browser.all(".drawn > svg")] == [size != PHONE, size == PHONE]
    boxes = browser.js(f"""return [...document.querySelectorAll('{drawing} .node')].map(node => {{
        const [label, box] = ['.name', '.box'].map(part => node.querySelector(part).getBoundingClientRect());
        return label.left >= box.left && label.right <= box.right && label.top >= box.top && label.bottom <= box.bottom;
    }})""")
    assert len(boxes) == 5
    assert all(boxes)

    def edges(css: str) -> set[str]:
        code = f"return [...document.querySelectorAll('{drawing} .edge{css} title')].map(title => title.textContent)"
        return {text.partition("  ")[0] for text in browser.js(code)}

    assert len(edges("")) == 6
    panel = browser.text(".chosen")
    assert "Click a node" in panel
    browser.all(f"{drawing} .node[data-node=L1H2]")[0].click()
    assert edges(".on") == {"m0 → L1H2<q>", "m0 → L1H2<v>", "L1H2 → m2"}
    minus = "\N{MINUS SIGN}"
    assert browser.text(".chosen").split("\n") == [
        "L1H2",
        "reads, with effect on the logit difference",
        f"m0 into q {minus}7",
        f"m0 into v {minus}6",
        "writes, with effect on the logit difference",
        "m2 +5",
    ]
    browser.screenshot(f"circuit-{name}", whole=True)
    browser.press("ESCAPE")
    assert browser.text(".chosen") == panel
    browser.press("ARROW_DOWN", "ENTER")
    assert browser.js("return document.activeElement.getAttribute('aria-label')") == "m0: reads 1 edge, writes 3 edges"
    assert edges(".on") == {"input → m0", "m0 → L1H2<q>", "m0 → L1H2<v>", "m0 → logits"}
    browser.press("ARROW_DOWN", "ENTER")  # input, which also writes a weaker edge to a node that is not drawn
    lines = browser.text(".chosen").split("\n")
    assert lines[:3] == ["input", "writes, with effect on the logit difference", f"m0 {minus}8"]
    assert lines[3:] == [f"L3H1 its k {minus}2", "Grey: weaker edges, drawn only here."]
    browser.press("ENTER")
    assert browser.text(".chosen") == panel


@pytest.mark.parametrize(("name", "scheme", "size"), MODES)
def test_a_feature_page_is_shown_and_reached(
    browser: Browser, tmp_path: Path, name: str, scheme: str, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = HookedTransformer.from_pretrained("demo")
    texts = ["When Mary and John went to the store, John gave a drink to", "The capital of France is Paris"]
    report = feature_report(model, TopK(TopK.Config(d_in=128, d_sae=16, k=8)), 3, texts, site=("resid_post", 1), k=3)
    browser.open(report.plot().to_html(), scheme, size)
    assert browser.sideways() == 0
    browser.press("TAB", "ARROW_RIGHT")
    token = browser.js("return document.activeElement")
    label = token.get_attribute("aria-label")
    assert label == report.examples.snippets()[0][1][1].replace(" ", "·", 1) + f": {token.get_attribute('data-value')}"
    browser.screenshot(f"feature-{name}", whole=True)
