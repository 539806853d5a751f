"""A view is a document of its own, in a frame of a notebook, in a file and in a page."""

import base64
import gzip
import html
import sys
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from hooked_lm.viz import Section, View, report
from hooked_lm.viz.theme import (
    ANYWHERE,
    COLOURS,
    DARK_DIVERGING,
    DARK_FALLING,
    DIVERGING,
    FALLING,
    MISSING,
    css,
    dark_colours,
    light_colours,
)
from hooked_lm.viz.view import as_json, packed

EVIL = "</script><script>alert('x')</script>"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_document_loads_nothing_and_escapes_its_title():
    page = View(EVIL, "<p>text</p>", script=f"const text = {as_json(EVIL)};").to_html()
    assert EVIL not in page
    assert f"<title>{html.escape(EVIL)}</title>" in page
    [policy] = [attrs["content"] for tag, attrs in Tags(page).found if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert not [attrs for _, attrs in Tags(page).found if {"src", "href"} & attrs.keys()]


def test_a_notebook_shows_it_in_a_frame_of_its_own():
    view = View('A "view"', f"<p>{html.escape(EVIL)}</p>", height=300)
    (_, (tag, attrs), _) = found = Tags(view._repr_html_()).found
    assert [name for name, _ in found] == ["style", "iframe", "script"]
    assert (tag, attrs["sandbox"], attrs["title"]) == ("iframe", "allow-scripts", 'A "view"')
    assert attrs["srcdoc"] == view.to_html()
    assert "height:300px" in attrs["style"]
    assert ">To see this view, run the cell or trust the notebook.</iframe><script>" in view._repr_html_()


def test_a_terminal_shows_one_line():
    assert repr(View("T", "", text="24 layers")).splitlines() == [
        "View('T', 24 layers; .show() opens it in a browser, .write_html(path) saves it)"
    ]


def test_it_is_written_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    view = View("T", "<p>é中🙂</p>")
    assert view.write_html(tmp_path / "view.html").read_text(encoding="utf-8") == view.to_html()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        view.write_html(tmp_path / "nowhere" / "view.html")
    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or False)
    view.show()
    [path] = tmp_path.glob("hooked_lm-*.html")
    assert opened == [path.as_uri()]
    assert capsys.readouterr().out == f"no browser was found; the page is in {path}\n"


def test_a_notebook_needs_no_browser(monkeypatch: pytest.MonkeyPatch):
    shown: list[View] = []
    display = SimpleNamespace(display=shown.append)
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    view = View("T", "")
    view.show()
    assert shown == [view]


def test_a_page_holds_views(tmp_path: Path):
    view = View("T", "<p>text</p>")
    page = report("P", [Section("S", view)], tmp_path / "page.html").read_text(encoding="utf-8")
    assert view.frame() in page
    assert 'id="plotly"' not in page


def test_packing_depends_on_the_bytes_alone():
    data = b"abc" * 1000
    assert packed(data) == packed(data.decode())
    assert len(packed(data)) < 100
    assert gzip.decompress(base64.b64decode(packed(data))) == data


def test_every_colour_of_a_figure_has_a_dark_counterpart():
    dark = dark_colours()
    assert all(dark[light] == other for light, other in COLOURS.values())
    for light, darks in ((DIVERGING, DARK_DIVERGING), (FALLING, DARK_FALLING)):
        assert [dark[f"{place:g} {colour}"] for place, colour in light] == darks
    assert MISSING in dark
    assert set(light_colours()) == set(ANYWHERE.values()) <= set(dark)
    assert f"--ink: {COLOURS['ink'][1]}" in css().split("@media")[1]


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize(
    ("name", "ratio"), [("ink", 7), ("soft", 7), ("faint", 4.5), ("focus", 3), ("up", 3), ("down", 3)]
)
def test_colours_are_legible_on_their_paper(name: str, ratio: float, i: int):
    """The contrast of WCAG 2.1, as text (4.5, or 7) or as a mark (3); of colours for any paper it is 4 on white and black."""

    def light(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    one, other = sorted(light(COLOURS[of][i]) for of in (name, "paper"))
    assert other / one >= ratio
    for paper in ("#ffffff", "#111111") if name in ANYWHERE else ():
        one, other = sorted((light(ANYWHERE[name]), light(paper)))
        assert other / one >= 4
