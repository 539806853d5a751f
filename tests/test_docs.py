"""Generated pages are as the code would write them now."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_sites_is_fresh():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "sites.md").read_text() == generate["page"](), "run `make docs`"
