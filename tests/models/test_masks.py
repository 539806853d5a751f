"""What a mask leaves out counts for nothing, also where it is infinite or NaN."""

import pytest
import torch
from torch import Tensor

from hooked_lm.components.heads import Pooler
from hooked_lm.models.loss import lm_cross_entropy_loss

TOKENS = torch.tensor([[1, 2, 3, 0], [4, 1, 2, 3]])
REAL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def with_padding_of(value: float) -> Tensor:
    """Logits whose last prediction of the first row, of a token that is padding, is of this size."""
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    logits[0, 2, 0] = value
    return logits


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_losses_of_padding_count_for_nothing(value: float) -> None:
    for per_token in (False, True):
        expected = lm_cross_entropy_loss(with_padding_of(0.5), TOKENS, REAL, per_token)
        found = lm_cross_entropy_loss(with_padding_of(value), TOKENS, REAL, per_token)
        assert torch.equal(found, expected)
    logits = with_padding_of(value).requires_grad_()
    lm_cross_entropy_loss(logits, TOKENS, REAL).backward()
    assert logits.grad is not None
    assert not logits.grad[1].isnan().any()


def test_an_infinite_loss_that_counts_is_infinite() -> None:
    logits = with_padding_of(0.0)
    logits[0, 0, 2] = -torch.inf
    assert lm_cross_entropy_loss(logits, TOKENS, REAL).isposinf()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_mean_over_real_tokens_sees_these_alone(value: float) -> None:
    pooler = Pooler.Config(d_model=3, mean=True).build()
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 3] = value
    assert torch.equal(pooler.pooled(other, REAL.bool()), pooler.pooled(x, REAL.bool()))
