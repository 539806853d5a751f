import pytest
import torch
import torch.nn.functional as F

from hooked_lm.components.ssm.convolution import CausalConvolution
from tests.close import assert_close


def filled(width: int, bias: bool = True) -> CausalConvolution:
    conv = CausalConvolution.Config(5, width, bias).build()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    return conv


@pytest.mark.every_parameter
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_a_grouped_convolution(width: int, bias: bool) -> None:
    conv, x = filled(width, bias), torch.randn(2, 9, 5)
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    expected = F.conv1d(padded, conv.W_conv.T[:, None], conv.b_conv, groups=5).transpose(1, 2)
    found, window = conv(x)
    assert_close(found, expected)
    assert torch.equal(window, x[:, 9 - (width - 1) :])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("first", [1, 2, 6])
def test_the_window_continues_after_a_run(width: int, first: int) -> None:
    conv, x = filled(width), torch.randn(2, 9, 5)
    whole, last = conv(x)
    head, window = conv(x[:, :first])
    tail, end = conv(x[:, first:], window)
    assert_close(torch.cat([head, tail], 1), whole)
    assert torch.equal(end, last)


def test_low_precision_is_summed_in_fp32_and_cached_unchanged() -> None:
    conv, x = filled(4).bfloat16(), torch.randn(2, 9, 5).bfloat16()
    exact, _ = filled(4).bfloat16().double()(x.double())
    found, window = conv(x)
    assert (found.dtype, window.dtype) == (torch.float32, torch.bfloat16)
    assert_close(found, exact, dtype=torch.float32)


def test_inputs_before_the_first_token_are_zero() -> None:
    conv, x = filled(4), torch.randn(1, 2, 5)
    _, window = conv(x)
    assert torch.equal(window, torch.cat([torch.zeros(1, 1, 5), x], 1))
