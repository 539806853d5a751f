"""One name for one thing: arguments in all functions that are ours, and classes in the whole package.

docs/glossary.md and the docstrings use the same names.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hooked_lm.interventions import HookObject
from hooked_lm.shards import Shards

MODULES = (
    "patching", "interventions", "interventions.dictionaries", "analysis", "analysis.circuits", "analysis.metrics",
    "results", "viz", "reports.circuit", "demo.experiment",
    "harvest", "studies", "planted", "planted.rasp",
    *(f"cli.{command}" for command in ("attention", "cache", "circuit", "demo", "harvest", "lens", "patch")),
)  # fmt: skip
INSTEAD = {
    "positions": ("pos", "position", "pos_slice", "source_position", "target_position"),
    "heads": ("head", "head_index"),
    "sites or components": ("what", "hook_name", "hook_names", "act_name", "activation_name", "site_name"),
    "prompts": ("data", "text", "texts", "seq", "seqs", "dataset", "input_tokens"),
    "corrupted and clean": ("corrupted_tokens", "clean_tokens", "clean_cache"),
    "answers": ("right", "correct", "correct_tokens", "right_answers"),
    "wrong_answers": ("wrong", "incorrect_tokens", "foils"),
    "max_memory": ("memory", "budget", "n_bytes"),
    "k, or top(n)": ("top_k", "topk", "n_top"),
    "progress": ("verbose", "show_progress", "tqdm", "bar"),
    "replace_with": ("ablation",),
    "resume_file": ("checkpoint",),
    "executor": ("engine",),
}
OF_THE_INTERFACE = (
    "generic_activation_patch", "get_act_patch_", "make_df_from_ranges", "_patch_setter", "detect_head", "SVDInterpreter.",
    "Sweep",
)  # fmt: skip
PACKAGE = Path(__file__).parents[1] / "hooked_lm"
DEFAULTS = {"progress": None, "max_memory": "auto"}


def functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a module, and the public methods of its public classes."""
    found = import_module(f"hooked_lm.{module}")
    own = [name for name, item in vars(found).items() if getattr(item, "__module__", "") == found.__name__]
    for name in getattr(found, "__all__", [name for name in own if not name.startswith("_")]):
        item = getattr(found, name)
        if inspect.isfunction(item):
            yield name, item
        elif inspect.isclass(item):
            members = {member: getattr(item, member) for member in vars(item) if member[0] != "_"}
            methods = {member: of for member, of in members.items() if callable(of) and not inspect.isclass(of)}
            yield from ((f"{name}.{method}", of) for method, of in methods.items())


@pytest.mark.parametrize("module", MODULES)
def test_arguments_have_the_names_of_the_library(module: str) -> None:
    mistakes, n_seen = [], 0
    for name, function in functions(module):
        if any(part in name for part in OF_THE_INTERFACE):
            continue
        for argument in inspect.signature(function).parameters.values():
            n_seen += 1
            mistakes += [f"{name}({argument.name}) is {good}" for good, bad in INSTEAD.items() if argument.name in bad]
            if argument.name in DEFAULTS and argument.default not in (DEFAULTS[argument.name], inspect.Parameter.empty):
                mistakes.append(f"{name}({argument}): the default is {DEFAULTS[argument.name]!r}")
    assert n_seen
    assert not mistakes


def test_a_name_of_another_library_is_found() -> None:
    assert any(name == "sweep" for name, _ in functions("patching"))
    assert "pos" in INSTEAD["positions"]
    assert not {name for bad in INSTEAD.values() for name in bad} & {*INSTEAD, *DEFAULTS}


@pytest.mark.parametrize(
    "module", [module for module in MODULES if not module.startswith(("viz", "reports", "demo", "cli"))]
)
def test_results_are_saved_and_loaded_alike(module: str) -> None:
    """Classes with a table have `x.save(path)` and `Class.load(path)`.

    Not so hook objects, which are saved in `Hooks`, what training gave, whose parts are saved, and shards, which are files.
    """
    found = import_module(f"hooked_lm.{module}")
    classes = [item for name in found.__all__ if inspect.isclass(item := getattr(found, name))]
    for item in classes:
        if (
            hasattr(item, "to_dataframe")
            and item.__name__ != "TrainedDictionary"
            and not issubclass(item, (HookObject, Shards))
        ):
            assert list(inspect.signature(item.save).parameters) == ["self", "path"]
            assert list(inspect.signature(item.load).parameters) == ["path"]


def class_names(folder: Path) -> dict[str, list[str]]:
    """The files of every public class, by its name; `compat` has the names of another library.

    A class in another is read with it, as `Attention.Config`.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(folder)
        if where.parts[0] != "compat":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(where))
    return found


def test_a_class_name_means_one_thing() -> None:
    found = class_names(PACKAGE)
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Plan:\n    class Config: ...\n\nclass _Own: ...\n")
    assert class_names(tmp_path) == {"Plan": ["a.py", "b.py"]}
