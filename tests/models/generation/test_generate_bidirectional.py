"""Generation of models in which a token sees later ones: its keys and values change with every new token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.kv_cache import KeyValueCache
from tests.close import assert_close
from tests.models.toys import BOTH_WAYS, ids, padded, toy

GREEDY: dict[str, Any] = {"verbose": False, "stop_at_eos": False, "do_sample": False}
ROTARY = {**BOTH_WAYS, "positional_embedding_type": "rotary"}


def by_hand(model: HookedTransformer, row: Tensor, n: int) -> Tensor:
    for _ in range(n):
        row = torch.cat([row, model(row)[0, -1].argmax(keepdim=True)])
    return row


LOCAL = {**BOTH_WAYS, "use_local_attn": True, "window_size": 3, "attn_types": ["local"] * 3}


@pytest.mark.parametrize("fields", [BOTH_WAYS, ROTARY, LOCAL], ids=["learned", "rotary", "local"])
def test_the_default_is_the_run_without_a_cache(fields: dict[str, Any]) -> None:
    model, rows = toy(fields), [ids(1, n, seed=n)[0] for n in (7, 1, 4)]
    tokens, mask = padded(rows, "left")
    expected = [by_hand(model, row, 6).tolist() for row in rows]
    for options in ({}, {"use_past_kv_cache": True}, {"use_past_kv_cache": False}):
        out = model.generate(tokens, 6, attention_mask=mask, **GREEDY, **options)
        assert [row[-len(e) :].tolist() for row, e in zip(out, expected, strict=True)] == expected
        pieces = list(model.generate_stream(tokens, 6, 2, attention_mask=mask, **GREEDY, **options))
        assert torch.equal(torch.cat(pieces, 1), out)


def test_the_cache_that_is_returned_is_that_of_the_whole_result() -> None:
    model = toy(BOTH_WAYS)
    out, cache = model.generate(ids(2, 5), 4, return_cache=True, names_filter=lambda name: True, **GREEDY)
    _, expected = model.run_with_cache(out, names_filter=lambda name: True)
    assert list(cache) == list(expected)
    for name, value in cache.items():
        assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")


def test_one_layer_that_sees_both_ways_is_enough() -> None:
    causal = toy()
    blocks = list(causal.tree.blocks)
    blocks[1] = replace(blocks[1], attn=replace(blocks[1].attn, causal=False))
    cfg = replace(causal.cfg, tree=replace(causal.tree, blocks=tuple(blocks)))
    model = HookedTransformer(cfg)
    model.load_state_dict(causal.state_dict())
    assert not torch.equal(model(ids(1, 6)), causal(ids(1, 6)))
    rows = ids(6, 4)
    assert model.generate(rows, 8, **GREEDY).tolist() == [by_hand(model, row, 8).tolist() for row in rows]
    with pytest.raises(ValueError, match="layer 1 is bidirectional"):
        model(rows, past_kv_cache=KeyValueCache(3))


def test_a_cache_that_is_given_is_refused() -> None:
    model, cache = toy(BOTH_WAYS), KeyValueCache(3)
    with pytest.raises(ValueError, match=r"key/value cache.*layer 0 is bidirectional.*whole text"):
        model(ids(1, 4), past_kv_cache=cache)
    assert cache.length == 0
