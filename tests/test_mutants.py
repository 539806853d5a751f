"""The list of mutants fits the package, and the run of them says which ones no test notices."""

import ast
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants import mutant as loading
from tests.mutants.mutant import ROOT, Mutant, install
from tests.mutants.running import Outcome, outcomes
from tests.mutants.table import MUTANTS

NOTICED = Mutant(
    "a prepended hook runs last", "hooks/hook.py", "-self.id if prepend else self.id", "self.id", "hooks/test_point.py::prepend"
)
SAME = Mutant("no fault", "hooks/hook.py", "-self.id if prepend", "-self.id if prepend ", "hooks/test_point.py::prepend")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_another_program(mutant: Mutant) -> None:
    changed, text = mutant.source(), mutant.path.read_text(encoding="utf-8")
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    for name in mutant.tests.split():
        path, _, word = name.partition("::")
        file = ROOT / "tests" / path
        assert file.exists()
        assert not word or file.is_dir() or word in file.read_text(encoding="utf-8"), f"{path} has no test {word}"


def test_names_are_different_and_every_folder_has_mutants() -> None:
    assert [name for name, n in Counter(mutant.name for mutant in MUTANTS).items() if n > 1] == []
    folders = {path.parent.name for path in (ROOT / "hooked_lm").glob("*/__init__.py")}
    assert folders - {mutant.path.relative_to(ROOT / "hooked_lm").parts[0] for mutant in MUTANTS} == set()


@pytest.mark.parametrize(("original", "times"), [("no such text", 0), ("self", 2)])
def test_a_text_that_does_not_occur_once_is_refused(original: str, times: int) -> None:
    with pytest.raises(ValueError, match=rf"'a fault'.* occurs ({times}|\d\d) times in hooks/hook.py, not once"):
        Mutant("a fault", "hooks/hook.py", original, "", "").source()


def test_a_fault_is_compiled_without_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("get_data", "path_stats"):
        monkeypatch.setattr(SourceFileLoader, name, getattr(SourceFileLoader, name))
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    (tmp_path / "hooked_lm").mkdir()
    for file in ("one", "other"):
        (tmp_path / "hooked_lm" / f"{file}.py").write_text("x = 1\n")
    mutant = Mutant("a fault", "one.py", "x = 1", "x = 2", "")
    loaded = install(mutant)
    values = {}
    for file in ("one", "other"):
        exec(SourceFileLoader(file, str(tmp_path / "hooked_lm" / f"{file}.py")).get_code(file), found := {})
        values[file] = found["x"]
    assert values == {"one": 2, "other": 1}
    assert loaded == [str(mutant.path)]
    assert [path.stem.split(".")[0] for path in tmp_path.rglob("*.pyc")] in ([], ["other"])


def test_a_mutant_that_is_not_noticed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found, missed = Outcome(["tests/hooks/test_point.py::test_a"], n_run=3), Outcome(n_run=5)
    assert command.shown([(NOTICED, found)]) == 0
    assert "1 of 1 mutants are noticed" in capsys.readouterr().out
    assert command.shown([(NOTICED, found), (SAME, missed)]) == 1
    printed = capsys.readouterr().out
    assert "hooks/test_point.py::test_a\n" in printed
    assert "NOT NOTICED by 5 tests" in printed
    assert "1 of 2 mutants are noticed" in printed
    assert command.shown([(NOTICED, Outcome(["tests/a"], trouble="the tests do not import the file"))]) == 1


@pytest.mark.slow
def test_tests_notice_a_fault_and_nothing_else() -> None:
    found = dict(outcomes([None, NOTICED, SAME], ["hooks/test_point.py::prepend"], "fast", jobs=1))
    assert found[NOTICED].noticed
    assert found[NOTICED].failed[0].startswith("tests/hooks/test_point.py::test_registration_order_prepend")
    for other in (None, SAME):
        assert (found[other].failed, found[other].trouble) == ([], "")
        assert found[other].n_run > 0
