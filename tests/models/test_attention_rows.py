"""`attention_rows`: rows of patterns by layer, and what it refuses."""

from typing import Any

import pytest

from hooked_lm import HookedEncoder, HookedTransformer, at
from tests.close import assert_apart, assert_close
from tests.families import CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, padded, toy
from tests.unchecked import unchecked

TOKENS = ids(batch=2, n_pos=10)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return toy("rotary")


@pytest.mark.parametrize("what", ["pattern", "scores"])
def test_rows_are_those_of_a_cache(model: HookedTransformer, what: str) -> None:
    _, cache = model.run_with_cache(TOKENS)
    site = {"pattern": "pattern", "scores": "attn_scores"}[what]
    rows = model.attention_rows(TOKENS, what=what)
    assert list(rows) == [0, 1, 2]
    for layer, found in rows.items():
        assert_close(found, cache[site, layer][:, :, -1:])
        assert_apart(found, cache[site, layer][:, :, -2:-1])
    some = model.attention_rows(TOKENS, layers=[-1, 0], heads=(3, 0), query_positions=(7, 2), what=what)
    assert list(some) == [2, 0]
    for layer, found in some.items():
        assert_close(found, cache[site, layer][:, [3, 0]][:, :, [7, 2]])
    labels = model.attention_rows(TOKENS, heads=["L2H3", "L0H1", "L2H0"], query_positions=slice(3, None), what=what)
    assert {layer: found.shape for layer, found in labels.items()} == {0: (2, 1, 7, 10), 2: (2, 2, 7, 10)}
    assert_close(labels[2], cache[site, 2][:, [3, 0], 3:])


def test_it_takes_what_a_run_takes(model: HookedTransformer) -> None:
    tokens, mask = padded(list(TOKENS[0].split([6, 4])), "left")
    rows = model.attention_rows(tokens, attention_mask=mask, layers=1)
    alone = model.attention_rows(tokens[1:, -4:], layers=1)
    assert_close(rows[1][1, :, :, -4:], alone[1][0])
    hook = at("resid_pre", 1, positions=3).zero()
    hooked_rows = model.attention_rows(TOKENS, layers=1, fwd_hooks=[hook])
    assert_close(hooked_rows[1], model.run_with_cache(TOKENS, fwd_hooks=[hook])[1]["pattern", 1][:, :, -1:])
    assert_apart(hooked_rows[1], model.attention_rows(TOKENS, layers=1)[1])


def test_rows_of_an_encoder() -> None:
    encoder = HookedEncoder({"n_layers": 2, "d_model": 16, "n_heads": 2, "n_ctx": 12, "d_vocab": 50, "act_fn": "gelu"})
    _, cache = encoder.run_with_cache(TOKENS)
    assert_close(encoder.attention_rows(TOKENS, query_positions=2)[1], cache["pattern", 1][:, :, 2:3])


@unchecked()
def test_what_has_no_softmax_attention_is_refused_by_name(model: HookedTransformer) -> None:
    by_family = {family: next(case for case in CASES if case.family == family) for family in ("jamba", "mamba2", "t5")}
    hybrid = hooked(by_family["jamba"])
    assert list(hybrid.attention_rows(prompt(by_family["jamba"]))) == [1]
    with pytest.raises(ValueError, match=r"layer 0, Mamba, has no softmax attention; those that have are \[1\]"):
        hybrid.attention_rows(prompt(by_family["jamba"]), layers=[1, 0])
    with pytest.raises(ValueError, match=r"layer 0, Mamba2, has no softmax attention; those that have are \[\]"):
        hooked(by_family["mamba2"]).attention_rows(prompt(by_family["mamba2"]))
    with pytest.raises(ValueError, match=r"one stack of blocks.*names_filter='\*.hook_pattern', pos_slice=\[-1\]"):
        hooked(by_family["t5"]).attention_rows(TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"what": "z"}, ValueError, "must be 'pattern' or 'scores', got 'z'"),
        ({"layers": 3}, IndexError, "layers 3 is out of range"),
        ({"heads": 4}, IndexError, "heads 4 is out of range at 'blocks.0.attn.hook_pattern'"),
        ({"heads": "L1H4"}, IndexError, "heads 4 is out of range at 'blocks.1.attn.hook_pattern'"),
        ({"heads": "L1H0", "layers": [0]}, ValueError, "a head of layer 1, and the layers are \\[0\\]"),
        ({"heads": ["L1H0", 2]}, ValueError, "'2' is not the label of a head"),
        ({"query_positions": 10}, IndexError, "index 10 is out of range"),
    ],
)
def test_bad_input(model: HookedTransformer, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model.attention_rows(TOKENS, **options)
