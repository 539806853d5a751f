"""Slice against plain indexing."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm.hooks import Slice

LENGTH = 5
index = st.integers(-LENGTH, LENGTH - 1)
bounds = st.none() | st.integers(-7, 7)
inputs = st.one_of(
    st.none(),
    index,
    st.lists(index, max_size=4),
    st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2])),
    st.tuples(bounds, bounds),
)


@given(chosen=inputs, dim=st.integers(-3, 2))
def test_apply_and_indices_are_plain_indexing(chosen: Any, dim: int) -> None:
    tensor = torch.arange(float(LENGTH**3)).view(LENGTH, LENGTH, LENGTH)
    plain = slice(None) if chosen is None else slice(*chosen) if isinstance(chosen, tuple) else chosen
    plain = np.array(plain, dtype=int) if isinstance(plain, list) else plain
    where = (slice(None),) * (dim % 3) + (plain,)
    assert np.array_equal(Slice(chosen).apply(tensor, dim).numpy(), tensor.numpy()[where])
    indices = Slice(chosen).indices(LENGTH)
    assert np.array_equal(np.arange(LENGTH)[indices], np.atleast_1d(np.arange(LENGTH)[plain]))
    assert Slice(chosen).slice_len(LENGTH) == len(indices)


@given(chosen=index)
def test_unwrap_keeps_the_axis_of_an_int(chosen: int) -> None:
    tensor = torch.arange(LENGTH * 2).view(2, LENGTH)
    assert torch.equal(Slice.unwrap(chosen).apply(tensor, 1), tensor[:, [chosen]])
    assert Slice.unwrap(Slice(chosen)).apply(tensor, 1).shape == (2,)


@pytest.mark.parametrize("mask", [[True, False, True], np.array([True, False, True])])
def test_a_mask_selects_where_it_is_true(mask: Any) -> None:
    assert Slice(mask).apply(torch.arange(3)).tolist() == [0, 2]
    assert Slice(torch.tensor(mask)).apply(torch.arange(3)).tolist() == [0, 2]


@pytest.mark.parametrize("chosen", [np.array([1.0]), torch.tensor([0.5]), torch.tensor([1j])])
def test_anything_else_is_refused(chosen: Any) -> None:
    with pytest.raises(ValueError, match="cannot slice by"):
        Slice.unwrap(chosen)


def test_an_int_needs_no_length_and_others_do() -> None:
    assert Slice(3).indices().tolist() == [3]
    with pytest.raises(ValueError, match="max_ctx"):
        Slice((0, 2)).indices()
    with pytest.raises(IndexError):
        Slice(5).apply(torch.arange(3))


@pytest.mark.parametrize("wrong", [3, -4, [0, 3], torch.tensor([-4])])
def test_what_is_out_of_range_is_named(wrong: Any) -> None:
    with pytest.raises(IndexError, match="the axis has length 3, so -3 to 2"):
        Slice(wrong).apply(torch.zeros(2, 3), dim=1)


def test_integers_of_numpy_are_integers() -> None:
    assert Slice(np.int64(-1)).apply(torch.arange(3)).item() == 2
    assert Slice.unwrap(np.int64(1)).apply(torch.arange(3)).tolist() == [1]
    with pytest.raises(IndexError, match=r"index 3 .* -3 to 2"):
        Slice(np.int64(3)).apply(torch.arange(3))
