"""The verbs that every result has: one line of text, HTML for notebooks, a table, a picture, a file and back.

`RESULTS` lists every public result; where one lacks a verb, the reason is beside it.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from hooked_lm import HookedTransformer, analysis, interventions
from hooked_lm.analysis import circuits
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.interventions import GradientReport
from hooked_lm.interventions.dictionaries import Settings, TopK, Vectors, train_on
from hooked_lm.interventions.top_examples import Examples
from hooked_lm.results import Scores
from hooked_lm.viz import View

PACKAGE = Path(__file__).parents[1] / "hooked_lm"
HOSTILE = "<img src=x onerror=alert(1)>"
TEXT = "The capital of France is"
LONGEST = 160


@lru_cache
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


def scores() -> Scores:
    return Scores(torch.tensor([[0.5, 1.0], [0.0, 2.0]]), {"token": [HOSTILE, "b"]})


def circuit() -> circuits.Circuit:
    graph = Graph.of(model())
    return circuits.Circuit.of(graph, [("input", "m0"), ("input", "logits"), ("m0", "logits")])


def comparison() -> Any:
    graph = Graph.of(model())
    return circuit().compare(circuits.Circuit.of(graph, [("input", "m1"), ("input", "logits")]))


def gradients() -> GradientReport:
    report = GradientReport("blocks.*.hook_resid_post")
    with model().hooks([report]):
        model()(TEXT, return_type="loss").backward()
    return report


def steering() -> interventions.SteeringVectors:
    women, men = ["Mary was ill, so", "Anna slept late because"], ["Tom was ill, so", "Paul slept late because"]
    return interventions.steering_vectors(model(), women, men, layers=[1, 2])


def examples() -> Examples:
    ids = torch.zeros(2, 1, dtype=torch.long)
    return Examples(torch.ones(2, 1), ids, ids, torch.ones(2, 1, 3, dtype=torch.long))


def trained() -> Any:
    rows = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    return train_on(Vectors(rows), TopK.Config(d_in=16, d_sae=32, k=4), Settings(steps=5, vectors_per_step=50))


@dataclass(frozen=True)
class Result:
    """A result on the bundled model, and the reasons for the verbs that it lacks."""

    make: Callable[[], Any]
    no_plot: str = ""
    no_file: str = ""


RESULTS = {
    "Scores": Result(scores),
    "Circuit": Result(circuit),
    "Comparison": Result(comparison),
    "GradientReport": Result(gradients, no_file="a hook that is filled by runs; its table is what one keeps"),
    "Saliency": Result(lambda: analysis.saliency(model(), TEXT, max_new_tokens=1)),
    "Lens": Result(lambda: analysis.logit_lens(model(), TEXT)),
    "MaxActivating": Result(
        lambda: analysis.max_activating_examples(model(), [TEXT], site=("post", 1), neuron=5, k=2, context=2)
    ),
    "Patchscope": Result(
        lambda: analysis.patchscope(model(), TEXT, "The capital of Spain is", source_layers=[1], max_new_tokens=1)
    ),
    "SteeringVectors": Result(steering),
    "Trained": Result(trained, no_file="its parts have files: `sae.save`, `losses.save`, `figures.save`"),
    "Examples": Result(examples, no_plot="`max_activating_examples` has the texts that a picture needs"),
}
# Results of classes that others list, and why they are not made here.
ELSEWHERE = {
    "Alignment": "tests/analysis/alignment",
    "Attribution": "a SweepResult, which is a Scores: tests/analysis/attribution",
    "Evaluation": "a Scores: tests/analysis/circuits",
    "FeatureReport": "tests/analysis/reading/test_feature_report.py",
    "PairTable": "a folder of shards, which is its file, of any size: tests/studies",
    "Probes": "a Scores: tests/analysis/test_probes.py",
    "LayerProbes": "the base class of both kinds of probes",
    "Saliency": "tests/analysis/reading/test_saliency.py",
    "Tabular": "the base class of results",
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


def test_every_result_is_listed() -> None:
    assert classes_with_a_table() == RESULTS.keys() | ELSEWHERE.keys()


@pytest.fixture(params=RESULTS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def result(name: str) -> Any:
    return RESULTS[name].make()


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
    assert "<script" not in html


def test_a_picture(result: Any, name: str) -> None:
    assert hasattr(result, "plot") == (not RESULTS[name].no_plot)
    if not RESULTS[name].no_plot:
        assert isinstance(result.plot(), go.Figure | View)


def test_a_file_and_back(result: Any, name: str, tmp_path: Path) -> None:
    if RESULTS[name].no_file:
        return
    result.save(tmp_path / "result")
    again = type(result).load(tmp_path / "result")
    assert type(again) is type(result)
    assert repr(again) == repr(result)
    assert again.to_dataframe().equals(result.to_dataframe())


@pytest.mark.parametrize("make", [scores, lambda: replace(steering(), site=HOSTILE)], ids=["Scores", "SteeringVectors"])
def test_html_escapes_what_it_shows(make: Callable[[], Any]) -> None:
    html = make()._repr_html_()
    assert HOSTILE not in html
    assert "&lt;img src=x" in html


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
