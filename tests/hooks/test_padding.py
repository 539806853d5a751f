"""A padded batch: its cache knows the mask, reads the last token of each row, and warns of columns of padding."""

import copy
from typing import Any

import pytest
import torch

from hooked_lm import ActivationCache, HookedTransformer
from hooked_lm.analysis import logit_lens
from hooked_lm.hooks import wrap
from tests.close import assert_close, assert_equal
from tests.interventions.tables import of_family
from tests.models.toys import ids, padded, toy

TEXTS = ["The capital of France is", "Mary", "Mary and John went home"]


@pytest.fixture(scope="module")
def model() -> Any:
    return HookedTransformer.from_pretrained("demo")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_last_is_the_last_token_of_each_row(model: Any, side: str, as_ids: bool):
    given = model.to_tokens(TEXTS, padding_side=side) if as_ids else TEXTS
    _, cache = model.run_with_cache(given, padding_side=side)
    assert_equal(cache.attention_mask, model.tokens.encode(TEXTS, padding_side=side)[1].bool())
    for key, is_later in (
        (("resid_post", 3), False),
        (("z", 1), False),
        (("pattern", 2), True),
        (("hook_embed",), False),
    ):
        found = cache.last(*key)
        for i, text in enumerate(TEXTS):
            alone = model.run_with_cache(text)[1].last(*key)[0]
            n = alone.shape[-1]
            mine = found[i, ..., :n] if side == "right" else found[i, ..., -n:]
            assert_close(mine if is_later else found[i], alone)
    assert "padded, so .last(name, layer)" in repr(cache)


def test_without_padding_it_is_the_last_position(model: Any):
    _, cache = model.run_with_cache(TEXTS[0])
    assert cache.attention_mask is None
    assert_equal(cache.last("resid_post", 3), cache["resid_post", 3][:, -1])
    assert "padded" not in repr(cache)
    _, cache = wrap(torch.nn.Sequential(torch.nn.Linear(3, 3))).run_with_cache(torch.ones(2, 5, 3))
    assert cache.last("0").shape == (2, 3)
    _, cache = wrap(torch.nn.Sequential(torch.nn.Linear(3, 3))).run_with_cache(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"the position axis of '0', of shape .* is unknown"):
        cache.last("0")


def test_the_mask_goes_with_the_cache(model: Any, tmp_path):
    _, cache = model.run_with_cache(TEXTS, names_filter="*.hook_resid_post")
    mask, last = cache.attention_mask, cache.last("resid_post", 3)
    cache.save(tmp_path / "cache")
    loaded = ActivationCache.load(tmp_path / "cache", model)
    for other in (loaded, copy.copy(cache).to("cpu", torch.float32), cache.select("*.3.*")):
        assert_equal(other.attention_mask, mask)
        assert_equal(other.last("resid_post", 3), last)
    assert [*loaded] == [*cache], "the mask is no value"
    rows = cache.apply_slice_to_batch_dim([2, 0])
    assert_equal(rows.last("resid_post", 3), last[[2, 0]])
    row = cache.apply_slice_to_batch_dim(1)
    assert_equal(row.attention_mask, mask[1])
    assert_equal(row.last("resid_post", 3), last[1])
    _, one = model.run_with_cache(TEXTS[:1], attention_mask=torch.tensor([[1, 1, 1, 0, 0, 0]]), remove_batch_dim=True)
    assert_equal(one.last("z", 1), one["z", 1][2])
    _, some = model.run_with_cache(TEXTS, pos_slice=(0, 3))
    assert_equal(some.attention_mask, mask[:, :3])
    assert_close(some.last("resid_post", 3)[1], last[1])


def test_what_has_no_such_position_is_refused(model: Any):
    _, cache = model.run_with_cache(TEXTS)
    with pytest.raises(ValueError, match=r"'hook_scalar' \[\] of shape \(3,\) has no axis of positions"):
        ActivationCache({"hook_scalar": torch.ones(3)}, model).last("hook_scalar")
    with pytest.raises(KeyError, match="is not in this cache"):
        cache.select("*.hook_z").last("resid_post", 3)
    cache.cache_dict["hook_embed"] = cache["hook_embed"][:, :2]
    with pytest.raises(ValueError, match=r"the positions of 'hook_embed' .* are not those of the padded tokens"):
        cache.last("hook_embed")
    with pytest.warns(UserWarning, match="padding in 1 of 3 rows"):
        _, cache = model.run_with_cache(TEXTS, pos_slice=-1)
    with pytest.raises(ValueError, match=r"'blocks.3.hook_resid_post' has rows without a real token"):
        cache.last("resid_post", 3)


def test_columns_of_padding_warn_once(model: Any):
    readers = (
        lambda cache: cache.stack_head_results(pos_slice=-1),
        lambda cache: cache.accumulated_resid(pos_slice=(-1, None), apply_ln=True),
        lambda cache: cache.logit_attrs(cache.decompose_resid(pos_slice=[-1]), 7, pos_slice=[-1]),
        lambda cache: logit_lens(model, cache, positions=[-1]),
    )
    for read in readers:
        _, cache = model.run_with_cache(TEXTS)
        with pytest.warns(UserWarning, match=r"\) are columns, and padding in 1 of 3 rows \(1\): cache.last") as seen:
            read(cache)
        assert len(seen) == 1
        read(cache)  # once; a second warning would be an error
        read(model.run_with_cache(TEXTS, padding_side="left")[1])  # no warning, which would be an error
    cache.logit_attrs(cache.decompose_resid(), 7)
    cache.stack_head_results(pos_slice=(0, 4))
    logit_lens(model, cache)


def test_a_mask_that_is_given_counts_and_one_of_two_stacks_is_that_of_the_site():
    rows = [ids(1, n, seed=n)[0] for n in (6, 4)]
    tokens, mask = padded(rows, "right")
    _, cache = toy("rotary").run_with_cache(tokens, attention_mask=mask)
    assert_equal(cache.attention_mask, mask.bool())
    model = of_family("t5")
    target = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    inputs = (tokens + 3, ids(2, 5) + 3)
    _, cache = model.run_with_cache(*inputs, one_zero_attention_mask=mask, decoder_attention_mask=target)
    with pytest.raises(ValueError, match="a mask for each of encoder, decoder: see attention_masks"):
        _ = cache.attention_mask
    assert_equal(cache.last("decoder.resid_post", 0)[0], cache["decoder.resid_post", 0][0, 2])
    assert_equal(cache.last("encoder.resid_post", 0)[1], cache["encoder.resid_post", 0][1, 3])
