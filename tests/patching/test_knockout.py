"""Attention knockout: each cell is one forward pass in which some scores are minus infinity."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.patching import SweepInterrupted, attention_knockout
from tests.close import assert_apart, assert_close
from tests.core import thinned
from tests.engine.small import (
    built,
    close,
    ids,
    no_hook_is_left,
    no_sweep,
    run,
    score,
    setting,
    stopping_after,
)
from tests.models.toys import toy, words

KINDS = [
    "standard",
    "rotary",
    "parallel",
    "post_norm",
    "windowed",
    "alibi",
    "sinks",
    "shortformer",
    "hybrid",
    "mixture",
]
EDGES = {"one": (1, -1), "some to two": ([0, 2], [3, 4]), "itself": (4, 4), "all within": (range(2, 4), range(3, 6))}
AS_LISTS = {"one": ([1], [5]), "some to two": ([0, 2], [3, 4]), "itself": ([4], [4]),
            "all within": ([2, 3], [3, 4, 5])}  # fmt: skip
N_HEADS = 4


def cut(keys: list[int], queries: list[int], heads: Any = slice(None)) -> Any:
    """A hook that masks an edge, one score at a time."""

    def write(scores: Tensor, hook: Any) -> Tensor:
        scores = scores.clone()
        for key in keys:
            for query in queries:
                scores[:, heads, query, key] = float("-inf")
        return scores

    return write


def by_hand(model: HookedTransformer, tokens: Tensor, window: int, heads: list[Any]) -> Tensor:
    n_layers = model.cfg.n_layers
    expected = torch.full((len(AS_LISTS), n_layers, len(heads), len(tokens)), torch.nan)
    for number, (keys, queries) in enumerate(AS_LISTS.values()):
        for layer in range(n_layers):
            near = [i for i in range(n_layers) if -(window // 2) <= i - layer < (window + 1) // 2]
            sites = [site for i in near if (site := f"blocks.{i}.attn.hook_attn_scores") in model.all_points()]
            for column, head in enumerate(heads) if sites else ():
                hooks = [(site, cut(keys, queries, head)) for site in sites]
                expected[number, layer, column] = run(model, tokens, *hooks)
    return expected


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", thinned(KINDS, keep=["rotary", "hybrid"]))
def test_a_cell_is_a_forward_pass_with_these_scores_at_minus_infinity(kind: str):
    model, tokens = built(kind), ids()
    for window in (1, 2, 3):
        found = attention_knockout(model, tokens, EDGES, metric=score, window=window, progress=False)
        assert dict(found.axes) == {"edge": tuple(EDGES), "layer": tuple(range(model.cfg.n_layers))}
        close(found.values, by_hand(model, tokens, window, [slice(None)])[:, :, 0])
        assert_close(found.corrupted, score(model(tokens)))
        assert found.clean is None
    found = attention_knockout(model, tokens, EDGES, metric=score, heads="each", progress=False)
    assert list(found.axes) == ["edge", "layer", "head"]
    close(found.values, by_hand(model, tokens, 1, list(range(N_HEADS))))


def knockout(model: HookedTransformer, edges: Any, tokens: Any = None, **options: Any) -> Any:
    prompts = ids() if tokens is None else tokens
    return attention_knockout(model, prompts, edges, **{"metric": score, "progress": False, **options})


# ---- what it means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary", "hybrid"])
def test_without_earlier_keys_a_token_attends_to_itself(kind: str):
    model = built(kind)
    found = knockout(model, {"alone": (range(5), -1)}, layers=[1], heads=None)
    itself = torch.zeros(2, N_HEADS, 6, 6)
    itself[..., 5, 5] = 1.0
    last = (slice(None), slice(None), 5)
    expected = run(model, ids(), ("blocks.1.attn.hook_pattern", setting(last, itself)))
    assert_close(found.values[0, 0], expected)
    assert (found.values[0, 0] - found.corrupted).abs().min() > 1e-4


def test_queries_that_are_not_read_have_no_effect():
    """Masking a query that the metric does not read has no effect in the last layer."""
    result = knockout(built("rotary"), {"unread": (0, 3)})
    found = result.effects()
    assert_close(found.values[:, -1], 0.0, scale=result.corrupted)
    assert found.values[:, 0].abs().max() > 1e-3


def test_all_layers_together_and_some_heads():
    model, tokens = built("rotary"), ids()
    sites = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(3)]
    found = knockout(model, {"edge": (1, -1)}, layers=None)
    assert list(found.axes) == ["edge"]
    assert_close(found.values[0], run(model, tokens, *((site, cut([1], [5])) for site in sites)))
    found = knockout(model, {"edge": (1, -1)}, layers=None, heads=[2, 0])
    assert found.axes["head"] == (2, 0)
    assert_close(found.values[0, 1], run(model, tokens, *((site, cut([1], [5], 0)) for site in sites)))


def test_windows_without_scores_are_nan():
    model = built("hybrid")  # attention in the middle of three layers
    assert knockout(model, {"edge": (1, -1)}).values.isnan().all(-1).tolist() == [[True, False, True]]
    assert knockout(model, {"edge": (1, -1)}, window=2).values.isnan().all(-1).tolist() == [[True, False, False]]
    assert not knockout(model, {"edge": (1, -1)}, window=3).values.isnan().any()


def test_texts_and_several_metrics():
    model = toy(tokenizer=words())
    metrics = {"three": lambda logits: logits[:, -1, 3], "four": lambda logits: logits[:, -1, 4]}
    found = knockout(model, {"edge": (1, 3)}, ["w3 w4 w5", "w6 w7 w8"], metric=metrics)
    assert dict(found.axes) == {"metric": ("three", "four"), "edge": ("edge",), "layer": (0, 1, 2)}


def test_edges_to_earlier_positions_in_encoders():
    model = toy({"act_fn": "gelu", "attention_dir": "bidirectional"})
    with pytest.warns(UserWarning, match="its attention is not causal"):
        found = knockout(model, {"back": (5, 1)})
    for layer in range(3):
        expected = run(model, ids(), (f"blocks.{layer}.attn.hook_attn_scores", cut([5], [1])))
        assert_close(found.values[0, layer], expected)


# ---- bad input -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rotary", {"edges": {}}, ValueError, "edges is empty"),
    ("rotary", {"edges": {"a": ([], 3)}}, ValueError, r"edge 'a', from \[\] to \[3\]: both ends need a position"),
    ("rotary", {"edges": {"a": (1, 6)}}, IndexError, "edge 'a': position 6 is out of range: there are 6"),
    ("rotary", {"edges": {"a": (-7, 5)}}, IndexError, "edge 'a': position -7 is out of range"),
    ("rotary", {"edges": {"b": (4, 3)}}, ValueError, r"edge 'b', from the keys \[4\] .* nothing at the key 4"),
    (
        "rotary",
        {"edges": {"b": ([1, 4], 3)}},
        ValueError,
        "masks nothing at the key 4 in any of these layers: a query attends to itself",
    ),
    ("rotary", {"edges": {"b": (2, [1, 3])}}, ValueError, "masks nothing at the query 1"),
    ("rotary", {"edges": {"c": (range(4), 3)}}, ValueError, "edge 'c', .* the query 3 of layer 0 without keys"),
    ("rotary", {"edges": {"c": (0, [0, 1])}}, ValueError, "the query 0 of layer 0 without keys: keep one"),
    ("windowed", {"edges": {"c": ([3, 4, 5], 5)}}, ValueError, "the query 5 of layer 0 without keys"),
    ("rotary", {"window": 0}, ValueError, "window must be a number of layers from 1 on"),
    ("rotary", {"layers": [3]}, IndexError, "layer 3 is out of range"),
    ("rotary", {"heads": [4]}, IndexError, "head 4 is out of range: there are 4"),
    ("hybrid", {"layers": [0, 2]}, KeyError, r"none of the layers \[0, 2\] has a site 'attn_scores'"),
    ("states", {}, KeyError, "no attention to mask"),
]


@pytest.mark.every_parameter
@pytest.mark.parametrize(("kind", "arguments", "error", "message"), WRONG)
def test_mistakes_are_refused_before_the_sweep(
    kind: str, arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    model = built(kind)
    with no_sweep(monkeypatch), pytest.raises(error, match=message):
        attention_knockout(model, ids(), **{"edges": {"edge": (1, 5)}, "metric": score, **arguments})
    assert no_hook_is_left(model)


def test_keys_outside_of_a_window_may_all_be_cut_elsewhere():
    """A local layer sees three tokens; the rest are cut in the global one alone."""
    model, tokens = built("windowed"), ids()
    found = knockout(model, {"far": ([0, 1], 5)})
    assert_close(found.values[0, [0, 2]], found.corrupted.expand(2, -1))
    assert_apart(found.values[0, 1], found.corrupted)
    assert tokens.shape == (2, 6)


def test_an_interrupt_keeps_the_scores_and_leaves_no_hook():
    model = built("rotary")
    with pytest.raises(SweepInterrupted) as caught:
        knockout(model, EDGES, metric=stopping_after(5))
    assert 0 < int((~caught.value.result.values.isnan()).all(-1).sum()) < 12
    assert no_hook_is_left(model)
