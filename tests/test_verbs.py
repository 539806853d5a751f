"""The verbs that every result has: one line of text, HTML for notebooks, a table, a picture, a file and back.

`RESULTS` in `notebook_repr.py` has every public result; where one lacks a picture, the reason is beside it. Whatever else is
public shows itself in notebooks too, or is listed below.
"""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import isabstract, isclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

import hooked_lm
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.viz import View
from hooked_lm.viz.view import FRAMES
from tests.shown import HOSTILE, RESULTS, SHOWN, TEXT, model, scores, steering

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hooked_lm"
LONGEST = 160
OPTIONAL = ("pandas", "plotly")


# Results of classes that others list, and why they are not made here.
ELSEWHERE = {
    "Alignment": "tests/analysis/alignment",
    "Estimate": "of a run that is still to come, without a file: tests/models/caches/test_estimate.py",
    "Evaluation": "a Scores: tests/analysis/circuits",
    "FeatureReport": "tests/analysis/reading/test_feature_report.py",
    "PairTable": "a folder of shards, which is its file, of any size: tests/studies",
    "LayerProbes": "the base class of both kinds of probes: tests/analysis/test_probes.py",
    "Tabular": "the base class of results",
}


# Public classes that a notebook shows as text, which says all there is, and why.
TEXT_IS_ENOUGH = {
    "a setting or an entry of a list": {
        "Slice",
        "Row",
        "Edit",
        "Rewrite",
        "Location",
        "Part",
        "SitePart",
        "TrainingConfig",
        "Metric",
        "Match",
        "BackwardRules",
    },
    "data of a few strings and numbers": {
        "Acting",
        "Control",
        "Example",
        "Pair",
        "Picture",
        "PromptPair",
        "Question",
        "SyntheticSample",
        "Work",
    },
    "an operation of a program": {"Average", "Combine", "Find", "Map", "Operation", "Position", "StartShare", "Token"},
    "the parts of a planted model before it has prompts": {"CompiledProgram"},
    "a part of a page, which `viz.report` writes": {"KeyFigures", "CaptionedFigure", "Section", "TokenRow"},
    "runs things, and keeps no result": {
        "Activations",
        "BertNextSentencePrediction",
        "Checkpoint",
        "Experiment",
        "Job",
        "LocallyOverridenDefaults",
        "Runner",
        "Blueprint",
        "SVDInterpreter",
        "Sweep",
    },
}
# Shown by a method of their own, which tests elsewhere call.
SHOWN_ELSEWHERE = {
    "FeatureReport": "tests/analysis/reading/test_feature_report.py",
    "MaxActivating": "tests/analysis/reading",
    "PairTable": "tests/studies",
    "Result": "tests/demo",
    "Shards": "the base class of harvests and tables of studies",
    "CircuitStudy": "tests/reports",
    "View": "tests/viz/test_view.py",
    "GraphView": "tests/viz/test_graphs.py",
}


def classes_with_a_table() -> set[str]:
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        each.name
        for each in classes
        if not each.name.startswith("_")
        and any(isinstance(part, ast.FunctionDef) and part.name == "to_dataframe" for part in each.body)
    }


@cache
def made(name: str) -> Any:
    return RESULTS[name].make() if name in RESULTS else SHOWN[name]()


def drawn(result: Any) -> str:
    """What the picture of a result holds."""
    picture = result.plot()
    return str(picture.to_json() if isinstance(picture, go.Figure) else picture.to_html())


@pytest.mark.slow
def test_every_result_is_listed() -> None:
    assert classes_with_a_table() - RESULTS.keys() == ELSEWHERE.keys()


@pytest.fixture(params=RESULTS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def result(name: str) -> Any:
    return made(name)


def test_one_line_of_text(result: Any, name: str) -> None:
    line = repr(result)
    assert name in line
    assert "\n" not in line
    assert len(line) < LONGEST


def test_a_table(result: Any) -> None:
    assert len(result.to_dataframe()) > 0


def test_html(result: Any) -> None:
    html = result._repr_html_()
    assert "<table" in html or "<p" in html
    assert "<script" not in html.replace(f"<script>{FRAMES}</script>", "")  # gives views their heights


def test_a_picture(result: Any, name: str) -> None:
    assert hasattr(result, "plot") == (not RESULTS[name].no_plot)
    if not RESULTS[name].no_plot:
        assert isinstance(result.plot(), go.Figure | View)


def test_a_file_and_back(result: Any, name: str, tmp_path: Path) -> None:
    result.save(tmp_path / "result")
    for load in (type(result).load, hooked_lm.load):
        again = load(tmp_path / "result")
        assert type(again) is type(result)
        assert repr(again) == repr(result)
        assert again.to_dataframe().equals(result.to_dataframe())
    if not RESULTS[name].no_plot:
        assert drawn(again) == drawn(result)


@pytest.mark.parametrize("make", [scores, lambda: replace(steering(), site=HOSTILE)], ids=["Scores", "SteeringVectors"])
def test_html_escapes_what_it_shows(make: Callable[[], Any]) -> None:
    html = make()._repr_html_()
    assert HOSTILE not in html
    assert "&lt;img src=x" in html


# ---- what notebooks show ---------------------------------------------------------------------------------------------


def public_classes() -> dict[str, type]:
    """The classes of the API reference by name."""
    sys.path.append(str(ROOT / "docs"))
    import api

    named = [
        (name, getattr(import_module(module), name)) for module in api.MODULES for name in api.public_names(module)
    ]
    return {name: kind for name, kind in named if isclass(kind) and not issubclass(kind, BaseException)}


@pytest.fixture(params=[*RESULTS, *SHOWN])
def shown(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def test_every_public_class_shows_itself_or_says_why_not() -> None:
    plain = {name for name, kind in public_classes().items() if not hasattr(kind, "_repr_html_")}
    assert plain == set().union(*TEXT_IS_ENOUGH.values())


def test_every_way_to_show_something_is_tried() -> None:
    """Each method that shows a public class is that of an object below."""

    def ways(kind: type) -> set[object]:
        return {
            getattr(kind, name, None) for name in ("_repr_html_", "_repr_line", "_repr_parts", "repr_table", "__repr__")
        }

    tried = set().union(*(ways(type(made(name))) for name in [*RESULTS, *SHOWN]))
    for name, kind in public_classes().items():
        if hasattr(kind, "_repr_html_") and not isabstract(kind) and name not in SHOWN_ELSEWHERE | ELSEWHERE:
            missing = ways(kind) - tried
            assert not missing, f"{name}: {missing}"


def test_a_notebook_shows_a_table_and_escapes_it(shown: Any) -> None:
    html = shown._repr_html_()
    assert HOSTILE not in html
    assert "<td" in html or "<iframe" in html or "<p" in html


def test_marimo_shows_modules_and_lists_as_jupyter_does() -> None:
    """It asks `_display_` first, then its own pictures of modules and lists, then `_repr_html_`."""
    for name in ("model", "SAE", "WrappedModule", "HookPoint", "hook_dict", "Hooks", "list_hooks"):
        assert made(name)._display_()._repr_html_() == made(name)._repr_html_()


def test_nothing_that_is_shown_needs_an_optional_package(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in OPTIONAL]:
        monkeypatch.setitem(sys.modules, module, None)
    assert repr(shown)
    assert repr(shown)[:20].split("(")[0] in shown._repr_html_() or "<t" in shown._repr_html_()


WITHOUT_THEM = """
import sys
sys.modules["pandas"] = sys.modules["plotly"] = None  # as if they were not installed
from tests.shown import RESULTS, SHOWN

for name, make in [*((name, result.make) for name, result in RESULTS.items()), *SHOWN.items()]:
    made = make()
    assert repr(made), name
    assert "<" in made._repr_html_(), name
print(len(RESULTS) + len(SHOWN))
"""


@pytest.mark.slow
def test_everything_is_made_and_shown_without_the_optional_packages() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_THEM], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-1] == str(len(RESULTS) + len(SHOWN))


# ---- models, configs, caches -----------------------------------------------------------------------------------------


def test_a_config() -> None:
    cfg = replace(model().cfg, model_name=HOSTILE)
    lines = repr(cfg).splitlines()
    assert lines[0].startswith("HookedTransformerConfig(model_name=")
    assert max(map(len, lines)) < LONGEST
    assert "n_layers=4" in repr(cfg)
    assert "use_attn_result" not in repr(cfg)
    assert "at their defaults: cfg.to_dict())" in repr(cfg)
    html = cfg._repr_html_()
    assert HOSTILE not in html
    assert "&lt;img" in html
    assert "use_attn_result" in html


def test_a_model() -> None:
    html = model()._repr_html_()
    n = sum(p.numel() for p in model().parameters())
    for shown in ("demo", f"{n:,}", "fold_ln", "blocks.{0-3}.attn.hook_z", "batch pos head d_head", "on demand"):
        assert shown in html


def test_a_cache() -> None:
    _, cache = model().run_with_cache(TEXT)
    line, *rows = repr(cache).splitlines()
    assert line.startswith(f"ActivationCache({len(cache)} tensors, ")
    assert any(row.split() == ["blocks.{0-3}.attn.hook_q", "[1,", "6,", "8,", "16]", "float32"] for row in rows)
    assert len(rows) < len(cache) / 2
    html = cache._repr_html_()
    assert "batch pos head d_head" in html
    assert "float32" in html
    few = type(cache)({HOSTILE: torch.zeros(1, 2)}, model())
    assert HOSTILE not in few._repr_html_()
    assert "&lt;img" in few._repr_html_()


def classes_that_show_a_table() -> list[type]:
    """Every class of the package that has a table for notebooks and shows it as all do."""
    found: list[type] = [NotebookRepr]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each not in found]
    return [each for each in found if each._repr_html_ is NotebookRepr._repr_html_]


def test_a_table_of_its_own_is_what_a_notebook_shows() -> None:
    """`_repr_html_` calls the method that the classes define, by its name."""

    class Box(NotebookRepr):
        def repr_table(self) -> Table:
            return Table(("side", "length"), [("a", 2)])

    assert ">side</th>" in Box()._repr_html_()
    assert len([kind for kind in classes_that_show_a_table() if "repr_table" in vars(kind)]) > 15
    lone = [kind.__name__ for kind in classes_that_show_a_table() if not hasattr(kind, "repr_table")]
    assert not lone
    verified = model().verify()
    assert all(f">{column}</th>" in verified._repr_html_() for column in verified.repr_table().columns)
