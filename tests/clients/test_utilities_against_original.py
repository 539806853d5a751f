"""Helpers, evals and training against those of TransformerLens 3.9.0: the same calls, each package in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import utilities_calls
from tests.close import is_close

ROOT = Path(__file__).parents[2]
ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0"
GROUPS = ("tensors", "numbers", "texts", "machines", "programs", "evaluations", "training")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("answers") / "theirs.json"
    script = ROOT / "tests" / "clients" / "utilities_calls.py"
    done = subprocess.run(
        [sys.executable, str(script), str(ORIGINAL), str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return json.loads(json.dumps(utilities_calls.plain(utilities_calls.answers())))


def differing(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two answers are not equal, numbers of order one up to rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(found) != list(expected):
            return [f"{place}: {list(found)} and {list(expected)}"]
        return [line for name in expected for line in differing(found[name], expected[name], f"{place}/{name}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} and {len(expected)} entries"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (one, other) in pairs for line in differing(one, other, f"{place}/{i}")]
    if isinstance(expected, float) and isinstance(found, float):
        return [] if is_close(found, expected, scale=1.0) else [f"{place}: {found} and {expected}"]
    return [] if found == expected and type(found) is type(expected) else [f"{place}: {found!r} and {expected!r}"]


@pytest.mark.parametrize("group", GROUPS)
def test_the_same_answers(ours: dict[str, Any], theirs: dict[str, Any], group: str) -> None:
    assert len(ours[group]) > 5
    assert differing(ours[group], theirs[group], group) == []


def test_a_difference_would_be_seen(theirs: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(theirs["tensors"]))
    changed["transpose"][1][2][0] += 0.01
    changed["sites"][0] = "hook_embed"
    changed["prefix"]["more"] = 1
    assert [line.split(":")[0] for line in differing(changed, theirs["tensors"])] == [
        "/transpose/1/2/0",
        "/prefix",
        "/sites/0",
    ]


def test_their_mistakes(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """What they do otherwise, and why we do not."""
    assert {name: (theirs["differences"][name], answer) for name, answer in ours["differences"].items()} == {
        "steps of max_steps=2": (3, 2),  # a limit is a limit
        "the process's seed is changed": (True, False),  # whatever else draws from it would change with a training
        "checkpoints of two epochs": (  # of the first epoch nothing is left
            ["model_0.pt", "model_3.pt"],
            ["model_0.pt", "model_3.pt", "model_6.pt"],
        ),
        "losses of truncate=2": (3, 2),
        "options for the hub": ([], ["revision", "token"]),  # a revision that is asked for is silently another
        "BOS in a sentence": (2, 1),  # of a tokenizer that puts one in front itself
        "BOS in a name": (1, 0),  # "the first differing token" is then still right, the length of the prefix is not
        "rows and columns": ("row mismatch: [0]\n", "row mismatch: [0]\ncolumn mismatch: [0]\n"),
    }
