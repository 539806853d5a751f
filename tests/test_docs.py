"""Generated pages are as the code would write them now."""

import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hooked_lm.families import CLASSES, supported
from tests.families import CASES, VISION_CASES

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.slow
def test_the_page_of_sites_is_fresh(generate: dict[str, Any]):
    assert (DOCS / "sites.md").read_text() == generate["page"](), "run `make docs`"


@pytest.mark.slow
def test_the_page_of_models_is_fresh(generate: dict[str, Any]):
    """But for the last digits of what was measured."""
    number = re.compile(r"\d\.\de-\d\d")
    shown, now = (DOCS / "models.md").read_text(), generate["models_page"]()
    assert number.sub("#", shown) == number.sub("#", now), "run `make docs`"


def test_the_page_of_config_fields_is_fresh(generate: dict[str, Any]):
    assert (DOCS / "config.md").read_text() == generate["config_page"](), "run `make docs`"


def test_every_family_was_measured():
    parity = json.loads((DOCS / "parity.json").read_text())
    rows = Counter(case.family for case in (*CASES, *VISION_CASES))
    configs = {name: rows[name] for name in sorted(supported(*CLASSES.values())) if name in rows or name in supported()}
    assert {name: found["configs"] for name, found in parity.items()} == configs, "run `make docs`"
    assert [name for name, found in parity.items() if not found["largest"] <= 1e-4] == []
