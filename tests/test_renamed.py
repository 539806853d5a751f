"""Former names of arguments warn with the present ones, and both together are refused."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, Pairs, patching
from hooked_lm.analysis import attribute, attribute_edges, attribute_nodes, circuits, metrics, patch_edges
from hooked_lm.analysis.circuits.acdc import acdc
from hooked_lm.analysis.circuits.minimality import minimality
from hooked_lm.harvest import harvest
from hooked_lm.interventions import HookObject, RecordOutput
from hooked_lm.renamed import GONE_IN, in_present_names, renamed
from hooked_lm.results import stored
from hooked_lm.results.measures import MetricScores
from hooked_lm.studies import study_pairs

CIRCUITS = (
    circuits.discover,
    circuits.evaluate,
    circuits.prune,
    circuits.train_masks,
    acdc,
    circuits.exact_effects,
    minimality,
    circuits.Runner,
)


@renamed(engine="executor", part="shard")
def run(data: str, executor: str = "processes", shard: str | None = None) -> tuple[str, str, str | None]:
    return data, executor, shard


def test_a_former_name_warns_and_means_the_present_one() -> None:
    assert run("a", "ray", "0/2") == ("a", "ray", "0/2")
    with pytest.warns(
        DeprecationWarning, match=f"run: engine= is now executor=; the former name goes in version {GONE_IN}"
    ):
        assert run("a", engine="ray") == ("a", "ray", None)
    with pytest.warns(DeprecationWarning, match="former name") as caught:
        assert run("a", engine="ray", part="1/2") == ("a", "ray", "1/2")
    assert len(caught) == 2
    assert caught[0].filename == __file__, "where it is called"
    with pytest.raises(TypeError, match="engine= is the former name of executor=; give executor= alone"):
        run("a", engine="ray", executor="ray")
    assert run.__name__ == "run"


@pytest.mark.parametrize(
    ("function", "former", "present"),
    [
        (patching.sweep, "checkpoint", "resume_file"),
        (patching.run_each, "checkpoint", "resume_file"),
        (patching.ablate, "checkpoint", "resume_file"),
        (patching.causal_trace, "checkpoint", "resume_file"),
        (patching.attention_knockout, "checkpoint", "resume_file"),
        (patching.path_patch, "checkpoint", "resume_file"),
        (harvest, "part", "shard"),
        (harvest, "engine", "executor"),
        (study_pairs, "part", "shard"),
        (study_pairs, "engine", "executor"),
        (patching.sweep, "source", "replace_with"),
        (patching.ablate, "method", "replace_with"),
        (attribute, "source", "replace_with"),
        (attribute_nodes, "source", "replace_with"),
        (attribute_edges, "source", "replace_with"),
        (patch_edges, "source", "replace_with"),
        *((function, "ablation", "replace_with") for function in CIRCUITS),
    ],
)
def test_functions_that_had_another_name(function, former: str, present: str) -> None:
    with pytest.raises(TypeError, match=f"{former}= is the former name of {present}="):
        function(HookedTransformer.from_pretrained("demo"), **{former: None, present: None})


@renamed(ablation=("replace_with", {"resample": "corrupted", "other": None}))
def lost(data: str, replace_with: str | None = "zero") -> str | None:
    return replace_with


def test_a_former_value_means_the_present_one() -> None:
    for former, present in (("resample", "corrupted"), ("other", None), ("mean", "mean")):
        with pytest.warns(DeprecationWarning, match="lost: ablation= is now replace_with="):
            assert lost("a", ablation=former) == present
    assert lost("a", replace_with="resample") == "resample", "a former value of the former name alone"


def test_options_in_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="lost: ablation= is now replace_with="):
        assert in_present_names(lost, {"data": "a", "ablation": "resample"}) == {
            "data": "a",
            "replace_with": "corrupted",
        }
    assert in_present_names(lost, {"replace_with": "mean"}) == {"replace_with": "mean"}
    assert in_present_names(len, {"ablation": 1}) == {"ablation": 1}


def test_former_words_compute_the_same() -> None:
    model = HookedTransformer.from_pretrained("demo")
    clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    answers = metrics.logit_difference(" Mary", " John", model=model)
    given: dict[str, Any] = {"metric": answers, "direction": "noise", "sites": "mlp_out", "positions": None}
    with pytest.warns(DeprecationWarning, match="source= is now replace_with="):
        former = patching.sweep(model, corrupted, clean, source="clean", **given)
    for word in (None, "corrupted"):
        assert torch.equal(former.values, patching.sweep(model, corrupted, clean, replace_with=word, **given).values)
    with pytest.warns(DeprecationWarning, match="Runner: ablation= is now replace_with="):
        assert circuits.Runner(model, corrupted, clean, answers, ablation="resample").replace_with == "corrupted"


@pytest.mark.parametrize(
    ("module", "former", "present"),
    [
        ("viz", "Facts", "KeyFigures"),
        ("viz", "Plate", "CaptionedFigure"),
        ("viz", "TokenStrip", "TokenRow"),
        ("interventions", "Output", "RecordOutput"),
        ("interventions.dictionaries", "Settings", "TrainingConfig"),
        ("interventions.dictionaries", "Trained", "TrainedDictionary"),
        ("interventions.dictionaries", "Vectors", "ActivationBatches"),
        ("reports.circuit", "Study", "CircuitStudy"),
        ("results.measures", "Measures", "MetricScores"),
    ],
)
def test_a_class_by_its_former_name(module: str, former: str, present: str) -> None:
    found = import_module(f"hooked_lm.{module}")
    with pytest.warns(DeprecationWarning, match=f"hooked_lm.{module}.{former} is now {present}; the former name goes"):
        assert getattr(found, former) is getattr(found, present)
    with pytest.raises(AttributeError, match=f"module 'hooked_lm.{module}' has no attribute 'Nothing'"):
        found.Nothing  # noqa: B018


def test_files_of_former_types_load(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    scores = MetricScores(torch.ones(2, 3), {"metric": ["loss", "accuracy"]}, [False, True])
    for former in ("hooked_lm.Measures", "hooked_lm.MetricScores"):
        stored.write(
            path, former, {"values": scores.values}, {"axes": list(scores.axes.items()), "shares": scores.shares}
        )
        assert stored.kind_of(path) == "MetricScores"
        assert torch.equal(MetricScores.load(path).values, scores.values)
    former = HookObject.from_dict({**RecordOutput().to_dict(), "kind": "Output"})
    assert type(former) is RecordOutput


def test_warnings_point_to_the_code_of_the_user(tmp_path: Path) -> None:
    """Python shows deprecations in the user's own code alone."""
    model = HookedTransformer.from_pretrained("demo")
    pairs = Pairs("When Mary and John left, John", "When Mary and John left, Mary", " Mary", " John")
    options = {"source": "zero", "positions": None}
    with pytest.warns(DeprecationWarning, match="sweep: source= is now replace_with=") as caught:
        study_pairs(model, pairs, "sweep", tmp_path / "study", options=options, progress=False)
    assert {warning.filename for warning in caught if warning.category is DeprecationWarning} == {__file__}
