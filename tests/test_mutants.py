"""The list of mutants fits the package, and a run of it names those that no test notices."""

import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants import mutant
from tests.mutants.mutant import ROOT, Mutant, install
from tests.mutants.running import Outcome, outcomes
from tests.mutants.table import MUTANTS

ORDER = "-self.id if prepend else self.id"
PREPEND = "hooks/test_point.py::prepend"
NOTICED = Mutant("a prepended hook runs last", "hooks/hook.py", ORDER, "self.id", PREPEND)
HARMLESS = Mutant("no fault", "hooks/hook.py", ORDER, f"0 + ({ORDER})", PREPEND)


def test_each_mutant_has_a_place_and_tests() -> None:
    for each in MUTANTS:
        text, changed = each.sources()
        assert text.split() != changed.split(), each.name
        paths = [name.partition("::")[0] for name in each.tests.split()]
        assert paths, each.name
        assert [path for path in paths if not (ROOT / "tests" / path).exists()] == [], each.name


def test_every_folder_has_mutants() -> None:
    assert [name for name, n in Counter(each.name for each in MUTANTS).items() if n > 1] == []
    folders = {path.parent.name for path in (ROOT / "hooked_lm").glob("*/__init__.py")}
    assert folders - {Path(each.file).parts[0] for each in MUTANTS} == set()


@pytest.mark.parametrize(
    ("original", "why"),
    [
        ("no such text", "occurs 0 times in hooks/hook.py, not once"),
        ("self.is_permanent", "occurs 2 times in hooks/hook.py, not once"),
        ("import itertools", "is not in the body of a function"),
    ],
)
def test_a_fault_without_a_place_is_refused(original: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"mutant 'a fault': '{original}' {why}"):
        install(Mutant("a fault", "hooks/hook.py", original, "import re", ""))


MODULE = """from functools import wraps


def checked(function):
    @wraps(function)
    def call(x):
        return function(x)

    return call


@checked
def twice(x):
    return 2 * x


class Part:
    def thrice(self, x):
        return 3 * x
"""


def test_a_fault_is_where_a_function_was_imported_and_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hooked_lm" / "part.py"
    file.parent.mkdir()
    file.write_text(MODULE)
    spec = spec_from_file_location("hooked_lm.part", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hooked_lm.part", module)
    monkeypatch.setattr(mutant, "ROOT", tmp_path)
    spec.loader.exec_module(module)
    twice, part = module.twice, module.Part()
    bytecode = {path: path.read_bytes() for path in tmp_path.rglob("*.pyc")}
    install(Mutant("a fault", "part.py", "return 3 * x", "return 4 * x", ""))
    assert (twice(5), part.thrice(5)) == (10, 20)
    install(Mutant("another", "part.py", "return 2 * x", "x = x + 1\n    return 2 * x", ""))
    assert (twice(5), part.thrice(5)) == (12, 20)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pyc")} == bytecode
    assert file.read_text() == MODULE


def test_a_mutant_that_is_not_noticed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found, missed = Outcome(["tests/hooks/test_point.py::test_a"], n_run=3), Outcome(n_run=5)
    assert command.shown([(NOTICED, found)]) == 0
    assert "1 of 1 mutants are noticed" in capsys.readouterr().out
    assert command.shown([(NOTICED, found), (HARMLESS, missed)]) == 1
    printed = capsys.readouterr().out
    assert "hooks/test_point.py::test_a\n" in printed
    assert "NOT NOTICED by 5 tests" in printed
    assert "1 of 2 mutants are noticed" in printed
    assert command.shown([(NOTICED, Outcome(["tests/a"], trouble="pytest ended with 2"))]) == 1


@pytest.mark.slow
def test_tests_notice_a_fault_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(ROOT.glob("hooked_lm/hooks/__pycache__/*"))
    found = dict(outcomes([None, NOTICED, HARMLESS], [PREPEND], "fast", jobs=1))
    assert found[NOTICED].noticed
    assert found[NOTICED].failed[0].startswith("tests/hooks/test_point.py::test_registration_order_prepend")
    for other in (None, HARMLESS):
        assert (found[other].failed, found[other].trouble) == ([], "")
        assert found[other].n_run > 0
    assert sorted(ROOT.glob("hooked_lm/hooks/__pycache__/*")) == before
