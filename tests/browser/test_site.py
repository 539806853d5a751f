"""The theme of the documentation around two small pages: the search without a server, and the page for missing ones."""

import shutil
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.browser.conftest import ROOT, Browser
from tests.browser.test_notebooks import Quiet


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    docs, built = folder / "docs", folder / "built" / "hooked_lm"
    shutil.copytree(ROOT / "docs" / "assets", docs / "assets")
    (docs / "assets" / "figures.js").write_text("")
    for name in ("index", "getting-started"):
        (docs / f"{name}.md").write_text(f"# The page {name}\n\nA word: aardvark.\n")
    nav = ["index.md", "getting-started.md"]
    plugins = ["search", "offline"]
    config = load_config(
        str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(built), nav=nav, hooks=[], plugins=plugins
    )
    build(config)
    return built


def n_found(browser: Browser) -> int:
    """How many pages the search finds for a word."""
    browser.js("document.querySelector('.md-search__input').focus()")
    browser.press(*"aardvark")
    browser.wait(".md-search-result__item")
    return len(browser.all(".md-search-result__item"))


def test_the_search_works_without_a_server(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    assert n_found(browser) == 2


class Missing(Quiet):
    """Shows 404.html in place of a missing page below /hooked_lm/, as servers of static pages do."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends the page."""
        page = Path(self.directory, "hooked_lm", "404.html").read_bytes() if "/hooked_lm/" in self.path else b""
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)


def test_the_page_for_missing_ones_works_in_any_folder_of_a_server(browser: Browser, site: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Missing, directory=str(site.parent))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}/hooked_lm/"
        browser.driver.get(f"{root}some/old/page.html")
        assert browser.text("#missing") == "/hooked_lm/some/old/page.html"
        assert (
            browser.find(".md-content a[href^=getting-started]").get_property("href") == f"{root}getting-started.html"
        )
        assert browser.js("return [...document.styleSheets].every(sheet => sheet.cssRules.length > 0)")
        assert n_found(browser) == 2
        assert all("status of 404" in complaint for complaint in browser.complaints())
        server.shutdown()
