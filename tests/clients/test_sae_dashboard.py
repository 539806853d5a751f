"""sae-dashboard: pages of SAE features, from hooks that keep values in the points' `ctx` and runs that stop at a layer."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import sae_dashboard_run
from tests.clients.sae_dashboard_run import CASES, FEATURES
from tests.close import GRADIENT, tolerance

Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """What the same program writes with the shim, and with TransformerLens itself.

    Each in a process of its own: it draws examples from generators of the process, as the checks of shapes do here.
    """
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    program, original = sae_dashboard_run.__file__, Path(sys.prefix) / "transformer-lens-3.9.0"
    for arguments in (["-m", "hooked_lm.compat", program, ours], [program, theirs, original]):
        subprocess.run([sys.executable, *map(str, arguments)], check=True, capture_output=True)
    return ours, theirs


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What stands at the ends of nested dicts and lists, and where."""
    if isinstance(found, (dict, list)):
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, found


@pytest.mark.parametrize(("name", "site"), CASES)
def test_as_with_the_original(name: str, site: str, pages: Folders) -> None:
    """Every number and every word of the page: tables, histograms, sequences, logits, and what heads contribute."""
    file = f"{name}-{site.replace('.', '-')}"
    read = [json.loads((folder / f"{file}.json").read_text()) for folder in pages]
    assert list(map(int, read[0]["feature_data_dict"])) == FEATURES
    found, expected = (dict(leaves(page)) for page in read)
    assert found.keys() == expected.keys()
    numbers = [key for key, value in expected.items() if isinstance(value, float)]
    assert len(numbers) > 3000
    a, b = (torch.tensor([page[key] for key in numbers]) for page in (found, expected))
    last_digit = 1.01e-4  # of some numbers four digits are written
    assert (a - b).abs().max() <= last_digit + tolerance(a, b, depth=GRADIENT)
    for key in expected.keys() - set(numbers):
        assert found[key] == expected[key], key
    assert (pages[0] / f"{file}.html").stat().st_size > 100_000
