"""Scores of a circuit have one sign, in whatever way the method and the metric are given."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from hooked_lm import HookedTransformer, Pairs
from hooked_lm.analysis import attribute, attribute_edges, metrics, patch_edges
from hooked_lm.analysis.circuits import Circuit, acdc, discover, prune
from hooked_lm.analysis.circuits.discover import scores_of
from tests.close import assert_close, assert_equal
from tests.unchecked import unchecked

PAIRS = Pairs(
    [
        "When Mary and John went to the store, John gave a drink to",
        "When Alice and Tom went to the store, Tom gave a drink to",
    ],
    [
        "When Mary and John went to the store, Mary gave a drink to",
        "When Alice and Tom went to the store, Alice gave a drink to",
    ],
    [" Mary", " Alice"],
    [" John", " Tom"],
)
BOTH = PAIRS.corrupted, PAIRS.clean
pytestmark = pytest.mark.slow
METHODS = ("eap", "eap-ig-inputs", "exact")


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def measured(model: HookedTransformer, method: str, **options: Any) -> Any:
    if method == "exact":
        return patch_edges(model, PAIRS, **options)
    return attribute_edges(model, PAIRS, method=method, check=False, **options)


def by_name(model: HookedTransformer, method: str, *prompts: Any, **options: Any) -> Circuit:
    check = {} if method == "exact" else {"check": False}
    return discover(model, *(prompts or (PAIRS,)), method=method, n_edges=60, **check, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_by_name_and_its_result_give_the_same_scores(model: HookedTransformer, method: str) -> None:
    named = by_name(model, method)
    result = measured(model, method, direction="noise")
    for given in (result, result.effects()):
        found = discover(model, PAIRS, method=given, n_edges=60)
        assert_close(found.scores.nan_to_num(), named.scores.nan_to_num())
        assert_equal(found.edges, named.edges)
        assert (found.about["direction"], found.about["replace_with"]) == ("noise", "corrupted")


@pytest.mark.parametrize("method", METHODS)
def test_both_directions_agree_in_their_signs(model: HookedTransformer, method: str) -> None:
    """What the strongest clean edges restore is lost without them."""
    noise, denoise = (
        discover(model, PAIRS, method=measured(model, method, direction=name), n_edges=60)
        for name in ("noise", "denoise")
    )
    assert denoise.about["direction"] == "denoise"
    top = noise.to_dataframe().head(10)
    places = [noise.graph.edge(*ends) for ends in zip(top["writer"], top["reader"], strict=True)]
    assert all(float(noise.scores[place]) < 0 for place in places)
    assert all(float(denoise.scores[place]) < 0 for place in places)
    restored = measured(model, method).effects().mean
    assert_close(denoise.scores.nan_to_num(), -restored.nan_to_num())
    share = discover(model, PAIRS, method=measured(model, method).restored(), n_edges=60)
    assert all(float(share.scores[place]) < 0 for place in places)


def test_zero_ablation_of_the_corrupted_run_keeps_its_sign(model: HookedTransformer) -> None:
    edges = [("m3", "logits"), ("m0", "m1")]
    for prompts in ((PAIRS,), (PAIRS.clean,)):
        found = patch_edges(model, *prompts, metric=PAIRS.metric(model), edges=edges, replace_with="zero")
        assert_close(
            scores_of(discover(model, PAIRS, method=found, n_edges=5).graph, found).nan_to_num(),
            found.effects().mean.nan_to_num(),
        )
    mean = patch_edges(model, PAIRS, edges=edges, replace_with="mean")  # the mean of the clean run
    assert_close(
        scores_of(discover(model, PAIRS, method=mean, n_edges=5).graph, mean).nan_to_num(),
        -mean.effects().mean.nan_to_num(),
    )


Spelling = Callable[[HookedTransformer], tuple[tuple[Any, ...], dict[str, Any]]]
SPELLINGS: dict[str, Spelling] = {
    "Pairs with answers": lambda model: ((PAIRS,), {}),
    "answers": lambda model: (BOTH, {"answers": (PAIRS.answers, PAIRS.wrong_answers)}),
    "a metric": lambda model: (BOTH, {"metric": PAIRS.metric(model)}),
    "a metric beside Pairs": lambda model: ((PAIRS,), {"metric": PAIRS.metric(model)}),
    "a lambda": lambda model: (BOTH, {"metric": lambda logits: PAIRS.metric(model)(logits)}),
    "a partial": lambda model: (BOTH, {"metric": partial(applied, PAIRS.metric(model))}),
}


def applied(metric: Any, logits: Tensor) -> Tensor:
    return metric(logits)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_of_a_metric_give_the_same_scores(model: HookedTransformer, spelling: str) -> None:
    prompts, options = SPELLINGS[spelling](model)
    expected = by_name(
        model, "eap", *BOTH, metric=metrics.logit_difference(PAIRS.answers, PAIRS.wrong_answers, model=model)
    )
    assert_close(by_name(model, "eap", *prompts, **options).scores.nan_to_num(), expected.scores.nan_to_num())
    edges, nodes = (measured_by(model, prompts, options) for measured_by in (edge_effects, node_effects))
    assert_close(edges, expected.scores.nan_to_num())
    assert_close(nodes, node_effects(model, (PAIRS,), {}))


def edge_effects(model: HookedTransformer, prompts: Any, options: Any) -> Tensor:
    return attribute_edges(model, *prompts, direction="noise", check=False, **options).effects().mean.nan_to_num()


def node_effects(model: HookedTransformer, prompts: Any, options: Any) -> Tensor:
    found = attribute(model, *prompts, sites="z", positions=None, heads="each", check=False, **options)
    return found.effects().mean


def test_a_search_by_its_name_is_its_function(model: HookedTransformer) -> None:
    by_function = acdc(model, PAIRS, threshold=1.0)
    assert_close(
        discover(model, PAIRS, method="acdc", threshold=1.0).scores.nan_to_num(), by_function.scores.nan_to_num()
    )
    assert float(by_function.scores[by_function.graph.edge("m3", "logits")]) < 0


@pytest.mark.parametrize(
    "method", [prune, attribute_edges, len, 3, None], ids=lambda method: getattr(method, "__name__", str(method))
)
def test_what_is_no_method_is_refused(model: HookedTransformer, method: Any) -> None:
    with (
        unchecked(),
        pytest.raises(TypeError, match=re.escape("'masks', or a result of attribute_edges or patch_edges; got ")),
    ):
        discover(model, PAIRS, method=method, n_edges=5)
