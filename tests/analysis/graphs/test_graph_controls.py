"""The untrained twin beside a graph: made in the same way, with the same targets, and with transcoders of its own."""

from functools import partial
from typing import Any

import pytest
import torch

from hooked_lm.analysis.graphs import AttributionGraph, Target, attribution_graph
from hooked_lm.models.twins import twin_of
from tests.analysis.graphs.models import TOKENS, tiny, transcoders
from tests.close import assert_apart, assert_close

FEW: dict[str, Any] = {"max_nodes": 8, "check": 4, "round_size": 4, "progress": False}
quick = partial(attribution_graph, **FEW)


def of_twin(found: AttributionGraph) -> list[float]:
    """The numbers that a control has, of a graph itself."""
    return [*found.scores.values(), found.agreement.correlation["correlation"]]


def test_the_twin_is_read_along_its_own_unembedding() -> None:
    model = tiny()
    found = quick(model, TOKENS, answers=(4, 9), seed=1, control="untrained")
    assert set(found.control) == {"replacement", "completeness", "correlation"}
    assert "untrained twin: replacement" in str(found)
    own = quick(twin_of(model, 1), TOKENS, answers=(4, 9), seed=1, control=None)
    assert_close([*found.control.values()], of_twin(own))


def test_targets_and_their_weights_are_those_of_the_twin() -> None:
    model = tiny()
    direction = torch.linspace(-1, 1, 16)
    heavy, light = (
        [4, Target("read", direction, "blocks.1.hook_resid_post", weight=weight)] for weight in (5.0, 0.001)
    )
    found, other = (quick(model, TOKENS, targets=of, control="untrained") for of in (heavy, light))
    own = quick(twin_of(model, 0), TOKENS, targets=heavy, control=None)
    assert_close([*found.control.values()], of_twin(own))
    assert_apart([*other.control.values()], of_twin(own))


def test_features_have_a_control_only_with_transcoders_of_the_twin() -> None:
    model, twin = tiny(), twin_of(tiny(), 0)
    of_model, other = transcoders(model, "skip"), transcoders(model, "topk")
    assert quick(model, TOKENS, of_model, targets=[4]).control == {}
    found = quick(model, TOKENS, of_model, targets=[4], control=other)
    assert_close([*found.control.values()], of_twin(quick(twin, TOKENS, other, targets=[4])))
    with pytest.raises(ValueError, match="the untrained twin needs transcoders of its own"):
        quick(model, TOKENS, of_model, control="untrained")
    with pytest.raises(ValueError, match="this is a graph of neurons: give control='untrained'"):
        quick(model, TOKENS, control=other)
