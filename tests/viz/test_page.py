"""A report is one file that loads nothing, and in which nothing that it shows is read as markup."""

import base64
import gzip
import html
import inspect
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch

from hooked_lm.viz import CaptionedFigure, KeyFigures, Section, TokenRow, View, heatmap, report, write_html
from hooked_lm.viz.parts import part_html

EVIL = "</script><script>alert('x')</script>"


class Reader(HTMLParser):
    """The tags of a page with their attributes, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text.append(data)


@pytest.fixture
def page(tmp_path: Path) -> str:
    table = pd.DataFrame({"head": ["2.3", "a & b"], "restored": [0.12345, -1.0], "n": [3, 4]})
    sections = [
        Section(
            "First & <foremost>", "Some `x < y` text.", CaptionedFigure(heatmap(torch.eye(2)), "A <caption>."), table
        ),
        Section(
            "Second",
            heatmap(torch.ones(1, 2), x_labels=[EVIL, EVIL], title=EVIL),
            TokenRow("clean", ["When", " Mary", EVIL], [1]),
            KeyFigures({"pairs": "8", "gap": "2"}, {"gap": f"1 to 3 {EVIL}"}),
            EVIL,
        ),
    ]
    path = report(f"Title {EVIL}", sections, tmp_path / "page.html", lead="A lead.")
    assert path == tmp_path / "page.html"
    return path.read_text(encoding="utf-8")


def test_nothing_is_loaded(page: str):
    tags = Reader(page).tags
    loading = {"src", "href", "srcset", "data", "action", "background"}
    assert not [(tag, attrs) for tag, attrs in tags if loading & attrs.keys()]
    assert not {"link", "iframe", "img", "object", "base"} & {tag for tag, _ in tags}
    [policy] = [attrs["content"] for tag, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style


def test_plotly_is_there_once_and_compressed(page: str):
    [library] = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', page)
    assert b"plotly.js v" in gzip.decompress(base64.b64decode(library))[:100]
    assert len(page) < 3_000_000


def test_a_page_without_figures_is_small(tmp_path: Path):
    assert report("Text", [Section("Only text", "Few words.")], tmp_path / "page.html").stat().st_size < 20_000


def test_figures_lie_in_the_page_as_data(page: str):
    figures = re.findall(r'<script type="application/json" id="(figure-\d-\d)-data">([^<]*)</script>', page)
    assert [name for name, _ in figures] == ["figure-1-2", "figure-2-1"]
    assert json.loads(figures[1][1])["layout"]["title"]["text"] == html.escape(EVIL, quote=False)


def test_figures_have_names_of_their_own(page: str):
    names = [attrs["id"] for tag, attrs in Reader(page).tags if tag == "div" and "id" in attrs]
    assert names == ["figure-1-2", "figure-2-1"]


def test_text_is_escaped(page: str):
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert not [script for script in scripts if script.startswith("alert")]
    assert EVIL not in page
    text = "".join(Reader(page).text)
    for shown in (
        "First & <foremost>",
        "x < y",
        "A <caption>.",
        "a & b",
        "0.123",
        "\N{MINUS SIGN}1.000",
        "·Mary",
        EVIL,
        "A lead.",
    ):
        assert shown in text


def test_parts_are_set_as_what_they_are(page: str):
    assert '<td class="number">0.123</td><td class="number">3</td>' in page
    assert '<span class="token">When</span><span class="token marked">·Mary</span>' in page
    assert "<dt>pairs</dt><dd>8</dd></div>" in page
    assert '<dt>gap</dt><dd>2</dd><dd class="note">1 to 3 &lt;/script&gt;' in page
    assert "<code>x &lt; y</code>" in page


def test_one_picture_has_a_small_page(tmp_path: Path):
    path = write_html(heatmap(torch.eye(2), title="One"), tmp_path / "one.html")
    page = path.read_text(encoding="utf-8")
    assert len(page) < 2_500_000
    assert re.findall(r'data-figure="([^"]*)"', page) == ["figure-1-data"]
    assert "prefers-color-scheme: dark" in page
    view = View("T", "<p>text</p>")
    assert write_html(view, tmp_path / "view.html").read_text(encoding="utf-8") == view.to_html()
    with pytest.raises(TypeError, match="a page is made of"):
        write_html(3, tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists()


def test_something_that_is_no_part():
    with pytest.raises(TypeError, match=r"a page is made of text, tables.*got int"):
        part_html(3, "figure-1")


def test_sections_of_another_type_are_refused(tmp_path: Path):
    unchecked_report = inspect.unwrap(report)
    with pytest.raises(TypeError, match=r"sections are Section\(title, \*parts\), got str"):
        unchecked_report("Title", ["a section"], tmp_path / "page.html")


def test_a_report_replaces_an_older_one(tmp_path: Path):
    path = tmp_path / "page.html"
    report("Old", [], path)
    report("New", [], path)
    assert "Old" not in path.read_text(encoding="utf-8").split("</head>")[1]
