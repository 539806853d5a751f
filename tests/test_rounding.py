"""Within `rounding`, calls of other shapes return other bits, and nothing else changes that every processor computes alike."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hooked_lm import HookedTransformer
from tests.close import LAYER, assert_close, assert_equal
from tests.rounding import rounding

ROOT = Path(__file__).parents[1]


def rows(*, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix product": lambda x: x @ x[0].mT,
    "linear": lambda x: functional.linear(x, x[0, 0], x[0, 0, 0]),
    "einsum": lambda x: torch.einsum("b h p d, b h q d -> b h p q", x, x),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "convolution": lambda x: functional.conv1d(x[:, 0], x[0, 0, :, :, None].expand(16, 16, 3)),
    "layer norm": lambda x: functional.layer_norm(x, (16,)),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "variance": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of whole numbers": lambda x: x.round().sum(-1),
    "mean of 0 and 1": lambda x: (x > 0).to(x.dtype).mean(-1),
    "chosen rows": lambda x: torch.eye(16, dtype=x.dtype)[[3, 5]] @ x,
    "one column": lambda x: x[..., :1].softmax(-1),
    "masked": lambda x: x.masked_fill(torch.arange(16) != 3, -torch.inf).softmax(-1),
    "product by zeros": lambda x: x @ torch.zeros(16, 16, dtype=x.dtype),
    "products of elements": lambda x: x * x / 3 + x,
    "moves": lambda x: torch.cat([x.mT, x], -1).sort(-1).values,
    "saturated": lambda x: (40 + x).sigmoid(),
}


@pytest.mark.parametrize("compute", ROUNDED.values(), ids=ROUNDED)
@rounding(1)
def test_the_same_call_has_the_same_bits_and_another_batch_others(compute: Callable[[Tensor], Tensor]) -> None:
    x = rows()
    assert_equal(compute(x), compute(x.clone()))
    of_some_rows = compute(x[:4])
    assert not torch.equal(of_some_rows, compute(x)[:4])
    assert_close(of_some_rows, compute(x)[:4], LAYER)


@pytest.mark.parametrize("compute", ROUNDED.values(), ids=ROUNDED)
@rounding(1)
def test_seeds_differ_and_everything_ends_with_the_context(compute: Callable[[Tensor], Tensor]) -> None:
    x = rows()
    with rounding(2):
        of_another_seed = compute(x)
    assert not torch.equal(of_another_seed, compute(x))
    assert_close(of_another_seed, compute(x), LAYER)


@rounding(1)
def test_strides_and_dtypes_count_as_shapes_do() -> None:
    x = rows()
    assert not torch.equal(x.mT.contiguous().exp().mT, x.exp())
    assert not torch.equal(rows(dtype=torch.bfloat16).exp() / x.exp(), (rows(dtype=torch.float16).exp() / x.exp()))


@pytest.mark.parametrize("compute", EXACT.values(), ids=EXACT)
def test_what_no_kernel_rounds_is_exact(compute: Callable[[Tensor], Tensor]) -> None:
    expected = compute(rows())
    with rounding(1):
        assert_equal(compute(rows()), expected)
        assert_equal(compute(rows()[:4]), expected[:4])


@pytest.mark.parametrize("compute", ROUNDED.values(), ids=ROUNDED)
def test_double_precision_is_left_alone(compute: Callable[[Tensor], Tensor]) -> None:
    x = rows(dtype=torch.float64)
    expected = compute(x)
    with rounding(1):
        assert_equal(compute(x), expected)


@pytest.mark.parametrize("compute", ROUNDED.values(), ids=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@rounding(1)
def test_half_precision_is_disturbed_to_a_neighbouring_number(
    compute: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = rows(dtype=dtype)
    assert not torch.equal(compute(x[:4]), compute(x)[:4])
    assert_close(compute(x[:4]), compute(x)[:4], LAYER)


@pytest.mark.parametrize("operation", [torch.exp, torch.sigmoid, torch.tanh, torch.log1p])
@rounding(1)
def test_variants_in_place_and_with_a_result_to_fill_compute_alike(operation: Callable[..., Tensor]) -> None:
    x = rows().abs()
    expected = operation(x)
    assert_equal(operation(x, out=torch.empty_like(x)), expected)
    assert_equal(getattr(x, f"{operation.__name__}_")(), expected)


@rounding(1)
def test_gradients_are_disturbed_however_they_are_taken() -> None:
    def loss(x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1).square().sum()

    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    (of_some_rows,) = torch.autograd.grad(loss(x[:4]), x)
    assert not torch.equal(of_some_rows[:4], gradient[:4])
    assert_close(of_some_rows[:4], gradient[:4], 4 * LAYER)
    assert_close(torch.func.vmap(torch.func.grad(loss))(x.detach()), gradient, 4 * LAYER)
    assert_close(torch.func.jacrev(loss)(x.detach()), gradient, 4 * LAYER)


@rounding(1)
def test_autocast_and_inference_mode_are_as_they_were() -> None:
    x = rows().requires_grad_()
    with torch.autocast("cpu"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert (x @ x).is_inference()
    assert_equal((x @ x).detach(), x.detach() @ x.detach())


@rounding(1)
def test_runs_of_a_model_on_other_columns_differ() -> None:
    """As tests learned on a processor that nobody had."""
    model = HookedTransformer.from_pretrained("demo")
    tokens = model.to_tokens(["Mary and John went to the store", "John and Mary went to the store"])
    together, alone = model(tokens), model(tokens[:1])
    assert_equal(model(tokens), together)
    assert not torch.equal(together[:1], alone)
    assert_close(together[:1], alone)


@pytest.mark.slow
def test_the_option_fails_a_test_that_relies_on_one_processor(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import torch\n\n\ndef test_rows():\n    x = torch.randn(64, 64)\n    assert torch.equal((x @ x)[:7], x[:7] @ x)\n"
        "\n\ndef test_again():\n    x = torch.randn(64, 64)\n    assert torch.equal(x @ x, x @ x)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run([*command, "--rounding", "1"], cwd=ROOT, capture_output=True, text=True)
    assert "rounding 1" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "FAILED" in done.stdout
    assert "test_rows" in done.stdout
