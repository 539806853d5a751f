"""Calls of attention on a GPU have a form that its fused kernels take, chosen without one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hooked_lm.components.attention import multihead
from hooked_lm.components.attention.gpu_kernels import for_kernels
from tests.close import assert_close

# n_heads, n_kv, width of queries and keys, width of values
SHAPES = ((4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 6, 6), (4, 2, 12, 5), (2, 2, 8, 12))
HALF = torch.bfloat16


def heads(
    shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, **options: str
) -> tuple[torch.Tensor, ...]:
    n_heads, n_kv, d_head, d_value = shape
    sizes = ((2, 5, n_heads, d_head), (2, 5, n_kv, d_head), (2, 5, n_kv, d_value))
    return tuple(torch.randn(size, dtype=dtype, **options) for size in sizes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("masked", [False, True])
def test_the_form_is_what_a_kernel_takes(shape: tuple[int, int, int, int], dtype: torch.dtype, masked: bool):
    """The flash kernel has no masks and no fp32; the other one no grouped heads, and rows of multiples of 16 bytes."""
    q, k, v = for_kernels(*heads(shape, dtype), torch.ones(5, 5, dtype=torch.bool) if masked else None)
    if not masked and dtype == HALF:
        assert (q.shape[2], k.shape[2], v.shape[2]) == (shape[0], shape[1], shape[1])
        assert q.shape[-1] == k.shape[-1] <= v.shape[-1]
    else:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert all(x.shape[-1] * x.element_size() % 16 == 0 for x in (q, k, v))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_result_is_the_same(shape: tuple[int, int, int, int], masked: bool):
    torch.manual_seed(0)
    q, k, v = heads(shape, torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
    expected = multihead.fused(q, k, v, mask, 0.3)
    found = multihead.fused(*for_kernels(q, k, v, mask), mask, 0.3)
    assert_close(found[..., : v.shape[-1]], expected)


def test_attention_on_a_gpu_uses_that_form():
    """Seen by the shapes that the kernel gets, on tensors without values."""
    seen = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append((tuple(q.shape), tuple(k.shape), kwargs["enable_gqa"]))
        return kernel(q, k, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(multihead.F, "scaled_dot_product_attention", record)
        q, k, v = (torch.empty(2, 5, n, 8, dtype=HALF, device="cuda") for n in (4, 2, 2))
        mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device="cuda")
        assert multihead.fused(q, k, v, mask, 0.3).shape == (2, 5, 4, 8)
        assert multihead.fused(q, k, v, None, 0.3, True).shape == (2, 5, 4, 8)
    assert seen == [((2, 4, 5, 8), (2, 4, 5, 8), False), ((2, 4, 5, 8), (2, 2, 5, 8), True)]
