import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hooked_lm
from hooked_lm.components.kv_cache import KeyValueCache, KeyValueCacheEntry, StateCacheEntry


def some(n: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, n, 3, 4)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), room=st.integers(1, 70))
def test_what_comes_out_is_what_went_in(sizes: list[int], room: int) -> None:
    entry, keys, values = KeyValueCacheEntry(room), [], []
    for n in sizes:
        keys.append(some(n))
        values.append(some(n))
        all_keys, all_values = entry.append(keys[-1], values[-1])
        assert torch.equal(all_keys, torch.cat(keys, 1))
        assert torch.equal(all_values, torch.cat(values, 1))
        assert torch.equal(entry.past_keys, all_keys)
        assert torch.equal(entry.past_values, all_values)
    assert entry.length == sum(sizes)


def test_with_enough_room_nothing_is_ever_copied() -> None:
    entry = KeyValueCacheEntry(room=100)
    places = {entry.append(some(n), some(n))[0].data_ptr() for n in (60, 30, 10)}
    assert len(places) == 1
    assert entry.append(some(1), some(1))[0].data_ptr() not in places


def test_earlier_results_stay_as_they_were() -> None:
    entry = KeyValueCacheEntry()
    first = entry.append(some(3), some(3))[0]
    copy = first.clone()
    for _ in range(80):
        entry.append(some(1), some(1))
    assert torch.equal(first, copy)


def test_a_frozen_entry_joins_and_does_not_keep() -> None:
    entry = KeyValueCacheEntry()
    entry.frozen = True
    assert entry.append(some(2), some(2))[0].shape[1] == 2
    assert entry.past_keys is None
    entry.frozen = False
    entry.append(some(2), some(2))
    entry.frozen = True
    assert entry.append(some(3), some(3))[0].shape[1] == 5
    assert entry.length == 2


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_keys_and_of_values_survive_later_tokens(which: int) -> None:
    entry, new = KeyValueCacheEntry(), [some(2), some(2)]
    new[which].requires_grad_()
    entry.append(some(1), some(1))
    joined = entry.append(*new)[which]
    with torch.no_grad():
        entry.append(some(1), some(1))
    (joined**2).sum().backward()
    assert torch.equal(new[which].grad, 2 * new[which].detach())


def test_rows_must_agree() -> None:
    entry = KeyValueCacheEntry()
    entry.append(some(2, batch=3), some(2, batch=3))
    with pytest.raises(ValueError, match=r"3 rows.*1"):
        entry.append(some(1, batch=1), some(1, batch=1))


def test_masks() -> None:
    cache = KeyValueCache(1)
    ones = torch.ones(2, 3, dtype=torch.long)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert torch.equal(cache.append_attention_mask(mask), mask)
    cache[0].append(some(3), some(3))
    assert torch.equal(cache.append_attention_mask(ones), torch.cat([mask, ones], 1))
    cache[0].append(some(3), some(3))
    cache.freeze()
    assert cache.frozen
    assert cache.append_attention_mask(ones[:, :1]).shape == (2, 7)
    assert cache.previous_attention_mask.shape == (2, 6)
    cache.unfreeze()
    assert not cache.frozen
    assert cache.full_mask(None, 2, 2).shape == (2, 8)
    assert KeyValueCache(1).full_mask(None, 2, 2) is None


def test_a_state_is_copied_counted_and_frozen() -> None:
    cache = KeyValueCache(2)
    entry, window, state = cache.state(1), torch.randn(2, 3, 4), torch.randn(2, 4)
    assert entry.past(2) == (None, None)
    entry.keep(window, state, 5)
    kept = state.clone()
    state.zero_()
    assert torch.equal(entry.past(2)[1], kept)
    assert (cache.length, cache[0].length, entry.length) == (5, 0, 5)  # the first layer may have nothing to keep
    assert cache.state(1) is entry
    cache.freeze()
    entry.keep(window, state, 5)
    assert entry.length == 5
    assert torch.equal(entry.past(2)[1], kept)
    with pytest.raises(ValueError, match=r"2 rows.*3"):
        entry.past(3)


def test_a_state_of_a_frozen_cache_is_frozen() -> None:
    cache = KeyValueCache(1)
    cache.freeze()
    cache.state(0).keep(some(1), some(1), 1)
    assert cache.length == 0
    cache.unfreeze()
    cache.state(0).keep(some(1), some(1), 1)
    assert cache.length == 1


def test_a_run_that_fails_restores_entries_of_both_kinds() -> None:
    cache = KeyValueCache(3)
    cache[0].append(some(2), some(2))
    cache.state(1).keep(some(3), some(1), 2)
    before = cache.state(1).state

    def run() -> None:
        with cache.appending(None):
            cache[0].append(some(1), some(1))
            cache.state(1).keep(some(3), some(1), 1)
            cache.state(2).keep(some(3), some(1), 3)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert (cache[0].length, cache.state(1).length, cache[2].length) == (2, 2, 0)
    assert cache.state(1).state is before


def test_the_cache_has_its_name_of_the_interface():
    assert hooked_lm.HookedTransformerKeyValueCache is KeyValueCache


def test_a_state_does_not_keep_the_values_of_all_positions() -> None:
    entry, run = StateCacheEntry(), some(50)
    entry.keep(run[:, -3:].flatten(2), run[:, -1], n_new=50)
    for kept in (entry.window, entry.state):
        assert kept is not None
        assert kept.untyped_storage().nbytes() == kept.nbytes
