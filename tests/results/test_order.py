"""Transformations of results commute: effects, normalisation, parts and chance, in any order and any number of times."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.circuits import Evaluation
from hooked_lm.analysis.reading.heads import ChanceScores
from hooked_lm.engine.result import SweepResult
from hooked_lm.results import Scores
from tests.close import assert_close

Step = Callable[[Any], Any]
SEEDS = st.integers(0, 2**32)
N_PROMPTS = 3
AXES = {"metric": ["difference", "probability"], "layer": [0, 1, 2]}
PARTS: dict[str, Step] = {
    "metrics": lambda found: found.select(metric=["probability", "difference"]),
    "layers": lambda found: found.select(layer=[2, 0]),
    "layer": lambda found: found.select(layer=-1),
}
STEPS: dict[str, Step] = {
    "effects": lambda found: found.effects(),
    "normalized": lambda found: found.normalized(),
    "metric": lambda found: found.select(metric="probability"),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, N_PROMPTS, generator=torch.Generator().manual_seed(seed))


def swept(seed: int, base: str) -> SweepResult:
    clean = drawn(seed + 2, 2) + torch.tensor([8.0, -20.0])[:, None]
    return SweepResult(drawn(seed, 2, 3), AXES, drawn(seed + 1, 2), clean, base=base)


def estimated(seed: int, base: str) -> Attribution:
    of = swept(seed, base)
    return Attribution(of.values, of.axes, of.corrupted, of.clean, base=base, exact=drawn(seed + 3, 2, 3))


def assert_same(one: Scores, other: Scores, order: tuple[str, ...]) -> None:
    assert one.axes == other.axes, order
    assert one.about == other.about, order
    assert one._tensors() == other._tensors()
    for name in one._tensors():
        assert_close(getattr(one, name), getattr(other, name), msg=f"{name} of {order}", scale=1.0)


def applied(found: Any, steps: dict[str, Step], order: tuple[str, ...]) -> Any:
    for name in order:
        found = steps[name](found)
    return found


def assert_commutes(found: Any, steps: dict[str, Step]) -> None:
    orders = list(permutations(steps))
    first = applied(found, steps, orders[0])
    for order in orders[1:]:
        assert_same(applied(found, steps, order), first, order)


@settings(max_examples=3, deadline=None)
@given(seed=SEEDS, base=st.sampled_from(["clean", "corrupted"]), part=st.sampled_from(sorted(PARTS)))
@pytest.mark.parametrize("make", [swept, estimated])
def test_sweeps(make: Callable[[int, str], SweepResult], seed: int, base: str, part: str) -> None:
    found = make(seed, base)
    assert_commutes(found, {**STEPS, part: PARTS[part]} if part != "metrics" else {**STEPS, "metric": PARTS[part]})
    for step in (STEPS["effects"], STEPS["normalized"]):
        assert_same(step(step(found)), step(found), ("twice",))


@settings(max_examples=3, deadline=None)
@given(seed=SEEDS, base=st.sampled_from(["clean", "corrupted"]), part=st.sampled_from(sorted(PARTS)))
@pytest.mark.parametrize("make", [swept, estimated])
def test_what_is_restored(make: Callable[[int, str], SweepResult], seed: int, base: str, part: str) -> None:
    """The means of `normalized`, and the paired differences of `effects().normalized()`, from 0 or from 1."""
    found = make(seed, base)
    restored = found.restored()
    assert_close(restored.mean, found.normalized().mean, scale=1.0)
    start = 0.0 if base == "corrupted" else 1.0
    assert_close(restored.values, found.effects().normalized().values + start, scale=1.0)
    assert restored.clean is not None
    assert_close(restored.corrupted.mean(-1), torch.zeros(2), scale=1.0)
    assert_close(restored.clean.mean(-1), torch.ones(2), scale=1.0)
    for same in (restored.restored(), restored.normalized(), found.normalized().restored(), found.effects().restored()):
        assert_same(same, restored, ("again",))
    assert_same(restored.effects(), found.effects().normalized(), ("effects",))
    assert_same(PARTS[part](restored), PARTS[part](found).restored(), ("part",))


@pytest.mark.parametrize("base", ["clean", "corrupted"])
def test_a_cell_without_effect_is_0_in_any_order(base: str) -> None:
    """The control: a normalisation that forgets that its values are changes shows 1."""
    found = swept(0, base)
    idle = replace(found, values=found.unchanged[:, None].expand(2, 3, N_PROMPTS))
    for other in (idle.effects().normalized(), idle.normalized().effects()):
        assert_close(other.mean, torch.zeros(2, 3), scale=1.0)
    forgetful = replace(idle.effects(), about={}).normalized()
    assert_close(forgetful.mean, torch.full((2, 3), 1.0 if base == "clean" else 0.0), scale=1.0)


def test_the_colour_bar_says_what_the_numbers_are() -> None:
    names = {
        base: [
            found._pictured()["value_name"] for found in (one.normalized(), one.effects(), one.effects().normalized())
        ]
        for base in ("corrupted", "clean")
        for one in [swept(0, base).select(metric="probability")]
    }
    assert names["corrupted"] == ["restored", "change of probability", "restored"]
    assert names["clean"] == ["kept", "change of probability", "change of the share kept"]


def test_titles_name_the_sites_the_metric_and_the_direction() -> None:
    titles = {"corrupted": [], "clean": []}
    for base, found in titles.items():
        one = swept(0, base).select(metric="probability")
        one = replace(one, about={**one.about, "what": "patching z"})
        for each in (one, one.normalized(), one.effects(), one.effects().normalized()):
            found.append(each.plot().layout.title.text.removeprefix("Patching z: "))
            assert each.plot().layout.title.subtitle.text.startswith(
                {"corrupted": "denoising", "clean": "noising"}[base]
            )
    common = ["probability", "change of probability"]
    share = "share of probability"
    assert titles["corrupted"] == [common[0], f"{share} restored", common[1], f"{share} restored"]
    assert titles["clean"] == [common[0], f"{share} kept", common[1], f"change of the {share} kept"]


def test_baselines_are_exact_after_scaling() -> None:
    found = swept(0, "corrupted").select(metric="probability")
    found = replace(found, corrupted=found.corrupted + 1 / 3).normalized()
    assert "corrupted 0, clean 1" in repr(found)
    assert next(iter(found._pictured()["baselines"][0].values())) == 0.0


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_evaluations(seed: int) -> None:
    axes = {"of": ["circuit", "complement"], "circuit": [1, 5, 9]}
    full, empty = drawn(seed + 1) + 20, drawn(seed + 2)
    found = Evaluation(drawn(seed, 2, 3), axes, full, empty, [1, 5, 9], 10)
    assert_commutes(found, {"normalized": STEPS["normalized"], "part": lambda one: one.select(circuit=[9, 1])})
    assert_same(found.normalized().normalized(), found.normalized(), ("twice",))


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS)
def test_scores_and_chance(seed: int) -> None:
    found = ChanceScores(drawn(seed, 2, 3), AXES, chance=drawn(seed + 1, 2, 3))
    steps = {"above": lambda one: one.above_chance(), "metric": STEPS["metric"], "layers": PARTS["layers"]}
    assert_commutes(found, steps)
