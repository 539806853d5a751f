"""What users of Python packages expect: types, quiet, seeds, files of the repository that tools read."""

import ast
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hooked_lm"
SCRIPT = ROOT / "tests" / "typing" / "script.py"
PRINTS = {  # printing is what they are for
    "__main__.py: main": "says that the command line needs an extra",
    "cli/command.py: run": "the JSON of a command",
    "cli/command.py: _end": "the JSON of an error",
    "utils.py: _print_line": "of `test_prompt`, which prints its findings",
    "viz/view.py: show": "where the page is, if there is no browser",
}


# ---- types -----------------------------------------------------------------------------------------------------------


def test_the_script_of_a_user_runs(tmp_path: Path) -> None:
    spec = spec_from_file_location("script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert "(1, 8," in script.main(tmp_path)


@pytest.mark.slow
def test_mypy_accepts_the_script_of_a_user_strictly(tmp_path: Path) -> None:
    assert (PACKAGE / "py.typed").is_file()
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\n"
        f"mypy_path = {ROOT}\n"
        "[mypy-transformers.*,plotly.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", SCRIPT]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stdout


# ---- quiet -----------------------------------------------------------------------------------------------------------


def functions(file: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a file, with the name of the innermost function around it."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            yield name, child
            yield from inside(child, child.name if isinstance(child, ast.FunctionDef) else name)

    return inside(ast.parse(file.read_text(encoding="utf-8")), "")


def printing(package: Path) -> list[str]:
    """The functions that call `print`, outside of `compat`, which has those of another library."""
    return [
        f"{file.relative_to(package)}: {name}"
        for file in sorted(package.rglob("*.py"))
        if "compat" not in file.parts
        for name, node in functions(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


@pytest.mark.slow
def test_the_library_prints_nothing() -> None:
    assert set(printing(PACKAGE)) == PRINTS.keys()


def test_a_print_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    print(1)\n")
    assert printing(tmp_path) == ["a.py: f"]


def test_logging_is_silent_by_default() -> None:
    """Nothing reaches stderr by logging's handler of last resort; a program that configures logging sees it."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("hooked_lm").handlers)
    for file in PACKAGE.rglob("*.py"):
        if file in (PACKAGE / "__main__.py", PACKAGE / "extras.py"):  # they silence other libraries
            continue
        for name in re.findall(r"getLogger\((.*?)\)", file.read_text(encoding="utf-8")):
            assert name in ("__name__", '"hooked_lm"'), f"{file}: {name}"


# ---- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seeds_decide_and_the_global_seed_is_respected() -> None:
    model = HookedTransformer.from_pretrained("demo")

    def drawn(**options: object) -> object:
        return model.generate("Mary went to", max_new_tokens=12, verbose=False, **options)

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert drawn() == first
    assert second != first
    state = torch.random.get_rng_state()
    assert drawn(seed=5) == drawn(seed=5)
    assert torch.equal(torch.random.get_rng_state(), state), "a seed of its own leaves the global generator alone"


DRAWS = {"randn", "rand", "randint", "randperm", "multinomial", "normal_", "uniform_", "bernoulli_"}
GLOBAL = {"pretrained.py: sample_datapoint"}  # as its docstring says


@pytest.mark.slow
def test_whatever_draws_has_a_generator() -> None:
    """So that a seed of a function decides, and drawing does not change what others draw."""
    found = {
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name, node in functions(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DRAWS
        if not any(keyword.arg == "generator" for keyword in node.keywords)
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("random", "rng"))
    }
    assert found == GLOBAL


# ---- files of the repository -----------------------------------------------------------------------------------------


def test_the_oldest_transformers_is_one_that_is_tested() -> None:
    """Older versions compute some families differently, and lack fields of others."""
    oldest = re.findall(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    tested = re.findall(r"^transformers==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
    assert oldest == [min(tested, key=lambda version: [int(part) for part in version.split(".")])]


def test_every_version_says_what_changes_numbers_without_raising() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert versions
    for version in versions:
        assert version.count("### Changes numbers without raising\n") == 1, version.splitlines()[0]


def test_the_citation_has_the_version_of_the_project() -> None:
    version = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r"^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.M) == version


@pytest.mark.parametrize("name", ["tests.yml", "docs.yml", "nightly.yml"])
def test_workflows_run_targets_of_the_makefile_with_pinned_actions(name: str) -> None:
    workflow = (ROOT / ".github" / "workflows" / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = re.findall(r"\bmake ([a-z-]+)", workflow)
    assert called
    assert set(called) <= targets
    actions = re.findall(r"uses: *(\S+)", workflow)
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@v\d+(\.\d+)*|[\w./-]+@[0-9a-f]{40}", action) for action in actions)
