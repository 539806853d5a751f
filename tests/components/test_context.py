import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache

CPU = torch.device("cpu")


def after(n_past: int, n_pos: int, real: torch.Tensor | None = None) -> Context:
    cache = KeyValueCache(1)
    if n_past:
        cache[0].append(torch.zeros(1, n_past, 1, 1), torch.zeros(1, n_past, 1, 1))
    return Context(n_pos, CPU, real, cache)


@given(
    real=st.lists(st.booleans(), min_size=2, max_size=9),
    cut=st.integers(0, 8),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 2, 4]),
)
def test_a_mask_says_which_keys_a_query_attends_to(
    real: list[bool], cut: int, causal: bool, window: int | None
) -> None:
    n_past = min(cut, len(real) - 1)
    context = after(n_past, len(real) - n_past, torch.tensor([real]))
    position = [max(sum(real[: i + 1]) - 1, 0) for i in range(len(real))]
    assert context.positions[0].tolist() == position[n_past:]
    mask = context.full_mask(causal, window)
    for row, query in enumerate(range(n_past, len(real))):
        for key in range(len(real)):
            distance = position[query] - position[key]
            near = window is None or (distance if causal else abs(distance)) < window
            seen = (not causal or key <= query) and near and real[key]
            assert mask[0, 0, row, key].item() == (seen or key == query)
    added = context.additive_mask(causal, window, torch.float64)
    assert added.dtype == torch.float64
    assert torch.equal(added == 0, mask)
    assert torch.equal(added == float("-inf"), ~mask)


def test_no_mask_is_computed_where_none_is_needed() -> None:
    assert Context(5, CPU).mask(causal=True, window=None) is None
    assert Context(5, CPU).mask(causal=False, window=None) is None
    assert Context(5, CPU).mask(causal=True, window=5) is None
    assert after(7, 1).mask(causal=True, window=None) is None
    assert after(7, 1).mask(causal=True, window=3) is not None
    assert after(7, 2).mask(causal=True, window=None) is not None


@pytest.mark.parametrize("n_past", [0, 4])
def test_masks_are_computed_once_a_run(n_past: int) -> None:
    context = after(n_past, 3)
    assert context.full_mask(True, 2) is context.full_mask(True, 2)
    assert context.additive_mask(True, 2, torch.float32) is context.additive_mask(True, 2, torch.float32)
    assert context.full_mask(True, 2) is not context.full_mask(True, None)
