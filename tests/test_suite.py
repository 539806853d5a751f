"""Rules that the suite itself keeps."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.norms.norm import root_mean_square
from tests.core import CORE, IMAGES, thinned
from tests.families import CASES, VISION_CASES
from tests.unchecked import unchecked

TESTS = Path(__file__).parent
COMPARISONS = re.compile(
    r"testing\.assert_close|\ballclose\(|\bisclose\(|assert_allclose|\bapprox\(|\b[ar]tol\b|torch\.testing import"
)
EXEMPT = {"close.py": "compares for all others", "test_suite.py": "names what is not used"}


def comparisons_of_their_own(folder: Path) -> list[str]:
    lines = (
        (file, i, line)
        for file in sorted(folder.rglob("*.py"))
        for i, line in enumerate(file.read_text().splitlines(), 1)
    )
    return [
        f"{file.relative_to(folder)}:{i}"
        for file, i, line in lines
        if COMPARISONS.search(line) and file.name not in EXEMPT
    ]


def test_numbers_are_compared_in_one_way() -> None:
    """Tolerances that are tuned test by test hold on the processor that they were tuned on: see tests/close.py."""
    assert comparisons_of_their_own(TESTS) == [], "use tests.close: assert_close, assert_near, assert_apart"


@pytest.mark.parametrize(
    "line",
    [
        "torch.testing.assert_close(a, b)",
        "assert torch.allclose(a, b, atol=1e-4)",
        "from torch.testing import assert_close",
        "assert a == pytest.approx(b, rel=1e-3)",
        "np.testing.assert_allclose(a, b)",
        "same(a, b, rtol=1e-3)",
    ],
)
def test_another_way_is_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "test_a.py").write_text(f"from tests.close import assert_close\n\nassert_close(a, b)\n{line}\n")
    assert comparisons_of_their_own(tmp_path) == ["test_a.py:4"]


@pytest.mark.slow
def test_a_group_of_tests_has_one_worker(tmp_path: Path) -> None:
    """Else each worker builds the models of every case, and tests that must not run beside each other do."""
    group = 'pytest.param(i, marks=pytest.mark.xdist_group(f"group {i % 3}"))'
    (tmp_path / "test_groups.py").write_text(
        f"import pytest\n\n\n@pytest.mark.parametrize('i', [{group} for i in range(12)])\n"
        "def test_nothing(i: int, worker_id: str) -> None:\n    print(f'{i % 3} on {worker_id}')\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-rP", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    assert len(set(re.findall(r"^\d on gw\d$", done.stdout, flags=re.M))) == 3


def test_folders_mirror_the_package() -> None:
    """A test is in the folder of what it tests; at the top are tests of top-level modules and of the whole repository."""
    package = TESTS.parent / "hooked_lm"
    folders = {str(file.parent.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")} - {"."}
    others = {"browser", "clients", "gpu", "compat/against", "benchmarks"}
    assert [folder for folder in sorted(folders - others) if not (package / folder).is_dir()] == []
    modules = {file.stem for file in package.glob("*.py")}
    about_the_repository = {
        "words",
        "benchmarks",
        "close",
        "docs",
        "floors",
        "habits",
        "environment",
        "mutants",
        "readme",
        "public_surface",
        "rounding",
        "suite",
        "verbs",
    }
    named = {file.stem.removeprefix("test_") for file in TESTS.glob("test_*.py")}
    assert sorted(named - modules - about_the_repository) == []


def test_families_that_stand_for_all_are_in_the_table() -> None:
    assert set(CORE) <= {case.family for case in CASES}
    assert set(IMAGES) <= {case.family for case in VISION_CASES}


def test_rows_that_do_not_stand_for_others_are_slow() -> None:
    first, second, third = thinned(["a", "b", "c"], keep=["b"])
    assert second == "b"
    assert [(row.values, [mark.name for mark in row.marks]) for row in (first, third)] == [
        (("a",), ["slow"]),
        (("c",), ["slow"]),
    ]
    with pytest.raises(AssertionError, match="nothing would be left"):
        thinned(["a"], keep=["b"])


# ---- annotations are checked -----------------------------------------------------------------------------------------

checked = jaxtyping.jaxtyped(typechecker=None)  # as `annotation_checks.py` has it


@checked
def added(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return (a + b)[: 2 if len(a) == 3 else None]


@checked
def added_in_quotes(a: "Float[Tensor, ' n']", b: "Float[Tensor, ' n']", c: "ForTypeCheckers" = None) -> "Tensor":
    return (a + b) if len(a) < 3 else len(a)


def added_inside(a: Tensor, b: Tensor) -> Any:
    size = 2

    @checked
    def inner(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return (a + b)[: size if len(a) == 3 else None]

    return inner(a, b)


@checked
@dataclass
class Added:
    a: Float[Tensor, " n"]
    b: Float[Tensor, " n"]
    c: int = 0


def added_numbers(a: Tensor, b: Tensor) -> Any:
    size = len(a)

    @checked
    def inner(a: Tensor, b: int) -> Tensor:
        return a if size < 3 else b

    return inner(a, len(b) if len(a) == len(b) else b)


@pytest.mark.parametrize("kind", [added, added_in_quotes, added_inside, added_numbers, Added])
def test_annotations_are_checked(kind: Any) -> None:
    for _ in range(2):  # the checks of functions in functions are kept
        kind(torch.ones(2), torch.ones(2))
        with pytest.raises(jaxtyping.TypeCheckError, match=r"parameter b|argument"):
            kind(torch.ones(2), torch.ones(1))
        with pytest.raises(jaxtyping.TypeCheckError):
            Added(torch.ones(3), torch.ones(3), "3") if kind is Added else kind(torch.ones(3), torch.ones(3))
        with unchecked():
            kind(torch.ones(2), torch.ones(1))


def test_annotations_of_the_package_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        root_mean_square(torch.ones(2, 3, dtype=torch.long), 1e-5)


@checked
def halved(share: float) -> float:
    return share / 2


def test_a_float_may_be_an_int_as_for_type_checkers() -> None:
    assert halved(1) == 0.5
    with pytest.raises(jaxtyping.TypeCheckError):
        halved("1")
