"""Controls: untrained twins, shuffled answers, random directions, edges, subspaces and labels beside what was found."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig, interventions, patching
from hooked_lm.analysis import (
    Attribution,
    attribute,
    attribute_edges,
    attribute_nodes,
    circuits,
    head_scores,
    metrics,
    patch_edges,
    train_alignment,
    train_probe,
)
from hooked_lm.analysis.attribution import edge_patching
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.random_edges import random_edges
from hooked_lm.demo import experiment
from hooked_lm.engine.result import SweepResult
from hooked_lm.models import twins
from hooked_lm.results.control import UNTRAINED, Control
from tests.close import assert_close

N = 8
PAIRS = experiment.prompt_pairs(N)
CLEAN, CORRUPTED, RIGHT, WRONG = (
    [getattr(pair, name) for pair in PAIRS] for name in ("clean", "corrupted", "answer", "wrong_answer")
)
ANSWERS = RIGHT, WRONG
HEADS = {"sites": "z", "positions": None, "heads": "each", "progress": False}
AS_WELL = "the control .* does about as well"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def random_model() -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "n_ctx": 8, "d_vocab": 50, "d_mlp": 32}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=0))


def pairs_of(seed: int, n: int = 48) -> tuple[torch.Tensor, torch.Tensor, metrics.Metric]:
    generator = torch.Generator().manual_seed(seed)
    clean, corrupted = torch.randint(50, (2, n, 5), generator=generator)
    right, wrong = torch.rand(n, 50, generator=generator).topk(2).indices.T
    return corrupted, clean, metrics.logit_difference(right, wrong)


# ---- the value -------------------------------------------------------------------------------------------------------


def test_a_control_warns_once_and_says_what_it_lacks():
    with pytest.warns(UserWarning, match="largest effect 0.4, here 0.5. So what was found need not be due to training"):
        Control.compared("untrained twin", "largest effect", 0.5, 0.4, "training").warn_if_as_well()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Control.compared("untrained twin", "largest effect", 0.5, 0.2, "training").warn_if_as_well()
    assert Control.compared("any", "cells", 0, 0, "training").does_as_well, "nothing was found"


@pytest.mark.parametrize(
    ("own", "other", "does_as_well"),
    [
        *[
            (1, 0.4, False),
            (1, -3, False),
            (1, 0.5, True),
            (-1, -2, True),
            (-1, 0, True),
            (-1, -0.4, True),
            (0, -1, True),
        ],
        *[(math.nan, 0, True), (math.nan, -1, True), (1, math.nan, True), (math.nan, math.nan, True)],
    ],
)
def test_only_a_positive_number_exceeds_a_control(own: float, other: float, does_as_well: bool):
    assert Control.compared("any", "faithfulness", own, other, "training").does_as_well is does_as_well


def test_a_control_is_metadata(model: HookedTransformer, tmp_path: Path):
    found = patching.sweep(model, CORRUPTED, CLEAN, answers=ANSWERS, **HEADS)
    assert found.control is not None
    found.save(tmp_path / "found.safetensors")
    assert SweepResult.load(tmp_path / "found.safetensors").control == found.control
    assert found.effects().control == found.control
    for layers in (1, [1, 2]):
        part = found.effects().select(layer=layers)
        assert part.control is None, "the control is of the largest effect, or of the significant cells, of the whole"
        assert part.about["model"] == found.about["model"]
        assert "control" not in repr(part)
    assert repr(found.control) in repr(found)
    assert repr(found.control) in found.plot().layout.title.subtitle.text.replace("<br>", " ")


# ---- shuffled answers ------------------------------------------------------------------------------------------------


def test_a_sweep_with_shuffled_answers_finds_nothing(model: HookedTransformer):
    found = patching.sweep(model, CORRUPTED, CLEAN, answers=ANSWERS, **HEADS)
    plain = patching.sweep(model, CORRUPTED, CLEAN, answers=ANSWERS, control=None, **HEADS)
    assert torch.equal(found.values, plain.values), "the control changes nothing"
    assert plain.control is None
    assert {name: found.about[name] for name in plain.about} == dict(plain.about)
    assert found.control is not None
    assert found.control.name == "shuffled answers"
    assert found.control.own == found.significant().n_significant > 10
    assert found.control.other <= 1


def test_shuffled_answers_of_a_random_model_do_as_well(random_model: HookedTransformer):
    corrupted, clean, metric = pairs_of(0)
    with pytest.warns(UserWarning, match=AS_WELL):
        found = patching.sweep(random_model, corrupted, clean, metric=metric, control="shuffled", **HEADS)
    assert found.control is not None
    assert "control (shuffled answers) does about as well" in repr(found)


def test_without_several_answers_there_is_no_control(model: HookedTransformer, tmp_path: Path):
    def control(n: int = N, **options: object) -> Control | None:
        options = {"answers": (" Mary", " John"), **options}
        return patching.sweep(model, CORRUPTED[:n], CLEAN[:n], **HEADS, **options).control

    assert control() is None, "all prompts have the same answers"
    assert control(3, answers=(RIGHT[:3], WRONG[:3])) is None, "too few prompts"
    assert control(metric=lambda logits: logits[:, -1, 0], answers=None) is None, "a function of one's own"
    assert control(answers=ANSWERS, resume_file=tmp_path / "file") is None, "it would be another sweep"
    assert control(3, answers=(RIGHT[:3], WRONG[:3]), control="shuffled").measure == "largest effect"
    with pytest.warns(UserWarning, match="there is no control: with shuffled answers every number is the same"):
        assert control(control="shuffled") is None
    with pytest.raises(ValueError, match="answers are shuffled among prompts, of one metric; got one prompt"):
        control(1, control="shuffled")
    with pytest.raises(ValueError, match=r"control must be 'auto', 'shuffled' .* or None, got 'untrained'"):
        control(control="untrained")


def test_answers_that_the_corrupted_run_does_not_tell_apart_have_a_control(model: HookedTransformer):
    """Every corrupted prompt has accuracy 0 whichever answer is asked for, and the clean ones tell answers apart. Numbers that
    are tiny throughout differ, too."""
    capitals = [("France", " Paris"), ("Japan", " Tokyo"), ("Italy", " Rome"), ("Spain", " Madrid")] * 2
    clean = [f"The capital of {country} is" for country, _ in capitals]
    corrupted = ["The capital of Egypt is"] * len(clean)
    metric = metrics.accuracy([answer for _, answer in capitals], model=model)
    found = patching.sweep(model, corrupted, clean, metric=metric, **HEADS)
    assert found.corrupted.tolist() == [0] * len(clean)
    assert found.clean.tolist() == [1] * len(clean)
    assert found.control is not None
    tiny = metrics.probability([answer for _, answer in capitals], model=model)
    options = {**HEADS, "control": "shuffled"}
    faint = patching.sweep(model, corrupted, clean, metric=lambda logits: 1e-12 * tiny(logits), **options)
    assert faint.control is not None


# ---- untrained twins -------------------------------------------------------------------------------------------------

EDGES = {"check": 40, "progress": False}


@pytest.mark.parametrize(("attributed", "options"), [(attribute, HEADS), (attribute_edges, EDGES)])
def test_the_twin_has_no_significant_effect(
    model: HookedTransformer, attributed: Callable[..., Attribution], options: dict[str, object]
):
    found = attributed(model, CORRUPTED, CLEAN, answers=ANSWERS, **options)
    control = found.control
    assert control is not None
    assert (control.name, control.measure) == (UNTRAINED, "significant cells")
    assert control.own == found.estimates.significant().n_significant > 4
    assert control.other <= control.own / 4
    assert not control.does_as_well
    one = attributed(model, CORRUPTED[:1], CLEAN[:1], answers=(RIGHT[:1], WRONG[:1]), **options).control
    assert one is not None
    assert one.measure == "largest effect"
    assert 0 < one.other < one.own / 10


def test_a_twin_of_a_twin_does_as_well(model: HookedTransformer):
    with pytest.warns(UserWarning, match=AS_WELL):
        found = attribute(model.untrained(3), CORRUPTED, CLEAN, answers=ANSWERS, **HEADS)
    assert "control (untrained twin) does about as well" in repr(found)


def test_the_number_of_the_twin_is_that_of_the_same_method(model: HookedTransformer):
    options = {**HEADS, "method": "ig-activations", "steps": 3, "answers": (RIGHT[:2], WRONG[:2])}
    found = attribute(model, CORRUPTED[:2], CLEAN[:2], **options)
    of_twin = attribute(model.untrained(), CORRUPTED[:2], CLEAN[:2], **options, check=False)
    assert found.control is not None
    assert_close(torch.tensor(found.control.other), of_twin.effects().mean.abs().max())
    assert_close(torch.tensor(found.control.own), found.effects().mean.abs().max())


def test_twins_are_run_where_they_are_cheap(model: HookedTransformer):
    def control(**options: object) -> Control | None:
        options = {"answers": (RIGHT[:1], WRONG[:1]), **options}
        return attribute(model, CORRUPTED[:1], CLEAN[:1], **HEADS, **options).control

    assert control(check=False) is None, "the estimates alone are cheaper"
    assert control(control=None) is None
    assert control(check=False, control="untrained") is not None
    assert control(replace_with=torch.zeros(8, 16)) is None, "the values may be those of the model"
    with (
        pytest.warns(UserWarning, match="a hook is open"),
        model.hooks([("blocks.0.attn.hook_z", lambda value, hook: value)]),
    ):
        assert control(check=20) is None, "the twin has no hooks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "MOST_PARAMETERS", 100)
        assert control() is None
        assert control(control="untrained") is not None
    with pytest.raises(ValueError, match=r"control must be 'auto', 'untrained' .* or None, got 'random'"):
        control(control="random")


NAMED = [("L2H1", "logits"), ("L3H5", "logits"), ("L1H7", "logits")]


def test_exact_effects_of_a_few_edges_have_a_twin(model: HookedTransformer):
    options = {"answers": (RIGHT[:1], WRONG[:1]), "progress": False}
    found = patch_edges(model, CORRUPTED[:1], CLEAN[:1], edges=NAMED, **options)
    of_twin = patch_edges(model.untrained(), CORRUPTED[:1], CLEAN[:1], edges=NAMED, **options, control=None)
    assert found.control is not None
    assert (found.control.name, found.control.measure) == (UNTRAINED, "largest effect")
    assert_close(found.control.own, float(found.effects().mean.abs().nan_to_num().max()))
    assert_close(found.control.other, float(of_twin.effects().mean.abs().nan_to_num().max()))
    assert 0 < found.control.other < found.control.own / 10
    assert repr(found.control) in repr(found)
    with pytest.warns(UserWarning, match=AS_WELL):
        again = patch_edges(model.untrained(3), CORRUPTED[:1], CLEAN[:1], edges=NAMED, **options)
    assert "does about as well" in repr(again)


def test_exact_effects_of_many_edges_have_none_by_default(random_model: HookedTransformer):
    def control(n: int, **options: object) -> Control | None:
        edges = list(graph.named(graph.is_edge))[:n]
        return patch_edges(random_model, *pairs, edges=edges, progress=False, **options).control

    graph, (corrupted, clean, metric) = Graph.of(random_model), pairs_of(0, 2)
    pairs, options = (corrupted, clean), {"metric": metric}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_patching, "FEW", 5)
        assert control(6, **options) is None
        assert control(5, **options) is not None
        assert control(6, **options, control="untrained") is not None
    assert control(3, **options, control=None) is None
    assert control(3, metric={"one": metric, "two": metric}) is None
    with pytest.raises(ValueError, match=r"control must be 'auto', 'untrained' .* or None, got 'shuffled'"):
        control(3, **options, control="shuffled")


def test_the_exact_check_of_estimates_has_no_twin_of_its_own(model: HookedTransformer):
    runs: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_patching, "with_untrained_twin", lambda model, found, *rest: runs.append(rest[2]) or found)
        attribute_edges(model, CORRUPTED[:1], CLEAN[:1], answers=(RIGHT[:1], WRONG[:1]), **EDGES)
    assert runs == [None]


def test_an_interrupt_of_the_twin_keeps_what_was_measured(model: HookedTransformer):
    calls = []

    def interrupted(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > n_own:
            raise KeyboardInterrupt
        return logits[:, -1, 3]

    def measured(control: str | None) -> SweepResult:
        return patch_edges(
            model, CORRUPTED[:1], CLEAN[:1], metric=interrupted, edges=NAMED, progress=False, control=control
        )

    n_own = 1000
    own = measured(None)
    n_own = len(calls)
    calls.clear()
    with pytest.raises(patching.SweepInterrupted) as caught:
        measured("untrained")
    assert torch.equal(caught.value.result.mean.isnan(), own.mean.isnan())
    assert torch.equal(caught.value.result.mean.nan_to_num(), own.mean.nan_to_num())


def test_nodes_have_controls_from_one_run_of_the_twin(model: HookedTransformer):
    options = {"answers": (RIGHT[:1], WRONG[:1]), "sites": ["z", "mlp_out"], "progress": False}
    runs: list[int] = []
    counting = twins.twin_of(model).register_forward_pre_hook(lambda module, given: runs.append(1))
    try:
        found = attribute_nodes(model, CORRUPTED[:1], CLEAN[:1], check=10, **options)
        n_runs = len(runs)
        of_twin = attribute_nodes(twins.twin_of(model), CORRUPTED[:1], CLEAN[:1], check=False, **options)
    finally:
        counting.remove()
    assert len(runs) == 2 * n_runs > 0, "as many runs as one call of its own"
    for site, one in found.items():
        assert one.control is not None
        assert one.control.name == UNTRAINED
        assert_close(one.control.other, float(of_twin[site].effects().mean.abs().nan_to_num().max()))
        assert one.control.other < one.control.own / 4
    unchecked = attribute_nodes(model, CORRUPTED[:1], CLEAN[:1], check=False, **options)
    assert [one.control for one in unchecked.values()] == [None, None]


def test_a_twin_is_made_once_for_each_seed(model: HookedTransformer):
    assert twins.twin_of(model) is twins.twin_of(model)
    assert twins.twin_of(model, 1) is not twins.twin_of(model)
    assert torch.equal(twins.twin_of(model, 1).W_E, model.untrained(1).W_E)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_heads_of_the_twin_look_at_nothing(model: HookedTransformer):
    found = head_scores(model, n_prompts=2, length=8)
    of_twin = head_scores(model.untrained(), n_prompts=2, length=8, control=None)
    assert of_twin.control is None
    assert found.control is not None
    assert (found.control.name, found.control.measure) == (UNTRAINED, "largest score above chance")
    assert_close(found.control.own, float(found.above_chance().mean.max()))
    assert_close(found.control.other, float(of_twin.above_chance().mean.max()))
    assert 0 < found.control.other < found.control.own / 10
    assert repr(found.control) in repr(found)
    assert found.select(kind="induction").control == found.control
    assert torch.equal(found.values, head_scores(model, n_prompts=2, length=8, control=None).values)


def test_heads_of_an_untrained_model_are_no_more_than_those_of_its_twin(random_model: HookedTransformer):
    with pytest.warns(UserWarning, match="largest score above chance .* need not be due to training"):
        found = head_scores(random_model, n_prompts=4, length=3)
    assert "does about as well" in repr(found)


def test_twins_look_where_they_are_small(model: HookedTransformer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "MOST_PARAMETERS", 100)
        assert head_scores(model, n_prompts=1, length=3).control is None
        assert head_scores(model, n_prompts=1, length=3, control="untrained").control is not None
    with model.hooks([("blocks.0.attn.hook_z", lambda value, hook: value)]):
        assert head_scores(model, n_prompts=1, length=3).control is None, "the twin has no hooks"
    with pytest.raises(ValueError, match=r"control must be 'auto', 'untrained' .* or None, got 'shuffled'"):
        head_scores(model, control="shuffled")


# ---- others ----------------------------------------------------------------------------------------------------------


def test_random_directions_of_the_same_norm(model: HookedTransformer):
    women, men = ["Mary was ill, so", "Anna slept late because"], ["Tom was ill, so", "Paul slept late because"]
    vectors = interventions.steering_vectors(model, women, men, layers=[1, 2])
    options = {"answers": (" she", " he"), "coefficients": [-2, 2], "progress": False}
    found = interventions.sweep_steering(model, vectors, "Lucy was ill, so", **options)
    assert found.control is not None
    assert found.control.name == "random direction of the same norm"
    assert_close(found.control.own, float(found.effects().mean.abs().max()))
    assert 0 < found.control.other < found.control.own / 2
    assert interventions.sweep_steering(model, vectors, "Lucy was ill, so", **options, control=None).control is None
    other = interventions.sweep_steering(model, vectors, "Lucy was ill, so", **options, seed=1)
    assert other.control is not None
    assert other.control.other != found.control.other
    with pytest.raises(ValueError, match=r"control must be 'auto', 'random' .* or None, got 'twin'"):
        interventions.sweep_steering(model, vectors, "Lucy was ill, so", **options, control="twin")


def test_several_metrics_have_no_control(model: HookedTransformer):
    """Their largest effect would be that of the metric with the largest units."""
    right, wrong = model.to_single_token(" she"), model.to_single_token(" he")
    both = {"difference": metrics.logit_difference(right, wrong), "probability": metrics.probability(right)}
    vectors = interventions.steering_vectors(model, ["Mary was", "Anna slept"], ["Tom was", "Paul slept"], layers=[1])
    steering = {"metric": both, "coefficients": [2], "progress": False}
    assert interventions.sweep_steering(model, vectors, "Lucy was ill, so", **steering).control is None
    assert attribute(model, CORRUPTED[:1], CLEAN[:1], metric=both, **HEADS).control is None
    with pytest.raises(ValueError, match="control='random' compares numbers of one metric, and 2 are given"):
        interventions.sweep_steering(model, vectors, "Lucy was ill, so", **steering, control="random")
    with pytest.raises(ValueError, match="control='untrained' compares numbers of one metric, and 2 are given"):
        attribute(model, CORRUPTED[:1], CLEAN[:1], metric=both, **HEADS, control="untrained")


def test_random_edges(model: HookedTransformer):
    circuit = circuits.discover(model, CORRUPTED, CLEAN, answers=ANSWERS, method="eap", n_edges=80, check=False)
    found = circuits.evaluate(model, circuit, CORRUPTED, CLEAN, answers=ANSWERS, progress=False)
    assert found.control is not None
    assert found.control.name == "as many random edges"
    assert_close(found.control.own, float(found.faithfulness[0]))
    assert_close(found.control.other, float(found.random_faithfulness.mean()))
    alone = circuits.evaluate(model, circuit, CORRUPTED, CLEAN, answers=ANSWERS, n_random=0, progress=False)
    assert alone.control is None


def test_circuits_that_are_no_better_than_random_ones_say_so(model: HookedTransformer):
    graph = Graph.of(model)
    edges = random_edges(graph, [1400], torch.Generator().manual_seed(5))[1400]
    drawn = circuits.Circuit(graph, edges)
    with pytest.warns(UserWarning, match="as many random edges. does about as well"):
        found = circuits.evaluate(model, drawn, CORRUPTED, CLEAN, answers=ANSWERS, progress=False)
    assert "need not" not in repr(found)
    assert "does about as well" in repr(found)


def test_random_subspaces(model: HookedTransformer):
    candidates = [[right, wrong] for right, wrong in zip(*ANSWERS, strict=True)]
    settings = {"site": ("resid_pre", 1), "positions": 10, "candidates": candidates, "progress": False}
    found = train_alignment(model, CORRUPTED, CLEAN, RIGHT, size=16, steps=40, learning_rate=0.02, **settings)
    assert found.control is not None
    nothing, random = (found.accuracy.select(exchanged=name).mean for name in ("nothing", "random subspace"))
    assert_close(found.control.own, float(found.accuracy.mean[0] - nothing))
    assert_close(found.control.other, float(random - nothing))
    assert repr(found.control) in repr(found)
    assert train_alignment(model, CORRUPTED, CLEAN, RIGHT, size=0, **settings).control is None


def test_random_labels():
    vectors = {0: torch.randn(40, 6, generator=torch.Generator().manual_seed(0))}
    labels = (vectors[0][:, 0] > 0).tolist()
    good = train_probe(vectors, labels, progress=False)
    assert good.control.name == "shuffled labels"
    assert not good.control.does_as_well
    assert_close(good.control.own, float(good.accuracy[0]))
    bad = train_probe(vectors, [i % 2 == 0 for i in range(40)], progress=False)
    assert bad.control.does_as_well
    assert "no better than shuffled labels" in repr(bad)
