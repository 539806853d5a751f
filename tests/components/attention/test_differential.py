"""Differential attention against the formula of the paper, one pair of heads at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hooked_lm.components.attention.differential import DifferenceNorm, DifferentialAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.norms.norm import RMSNorm
from tests.close import assert_apart, assert_close
from tests.components.attention.test_attend import PLAIN, built

NORM = DifferenceNorm.Config(12, eps=0.1, lam_init=0.3)
CFG = DifferentialAttention.Config(**{**vars(replace(PLAIN, n_heads=8, n_key_value_heads=4)), "z_norm": NORM})


def example() -> tuple[DifferentialAttention, Tensor]:
    attn = built(CFG)
    assert isinstance(attn, DifferentialAttention)
    return attn, torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(attn: DifferentialAttention, x: Tensor) -> Tensor:
    """The output for one prompt [pos, d_model]."""
    norm = attn.z_norm
    lam = (norm.lambda_q1 @ norm.lambda_k1).exp() - (norm.lambda_q2 @ norm.lambda_k2).exp() + 0.3
    out = attn.b_O.expand(5, -1)
    masked = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for pair in range(4):
        patterns = []
        for head in (pair, pair + 4):
            q, k = x @ attn.W_Q[head] + attn.b_Q[head], x @ attn.W_K[head // 2] + attn.b_K[head // 2]
            patterns.append((q @ k.T / 6**0.5).masked_fill(masked, float("-inf")).softmax(-1))
        halves = [x @ attn.W_V[kv] + attn.b_V[kv] for kv in (pair // 2, pair // 2 + 2)]
        difference = (patterns[0] - lam * patterns[1]) @ torch.cat(halves, -1)
        normed = difference / (difference.square().mean(-1, keepdim=True) + 0.1).sqrt()
        out = out + 0.7 * normed @ attn.W_O_pair[pair]
    return out


@pytest.mark.parametrize("site", [None, "hook_pattern", "hook_result", "hook_scale", "hook_normalized"])
def test_the_formula(site: str | None) -> None:
    """By differences of pairs, and head by head where something listens."""
    attn, x = example()
    for name, part in attn.named_modules():
        if site is not None and name.endswith(site):
            part.add_hook(lambda value, hook: None)
    assert_close(attn(x), torch.stack([by_hand(attn, row) for row in x]))


def test_the_second_heads_matter() -> None:
    attn, x = example()
    expected = torch.stack([by_hand(attn, row) for row in x])
    attn.z_norm.cfg = replace(NORM, lam_init=0.2)
    assert_apart(attn(x), expected)


def test_weights_of_heads_are_those_of_their_pair() -> None:
    attn, _ = example()
    assert attn.W_O.shape == (8, 12, 12)
    assert torch.equal(attn.W_O[3], attn.W_O[7])
    assert "W_O" not in attn._parameters
    assert not attn.is_linear_in_values


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (replace(CFG, n_heads=4, n_key_value_heads=1), "an even number of key/value heads, not 1"),
        (replace(CFG, z_norm=RMSNorm.Config(12)), "z_norm must be a DifferenceNorm of 12 features"),
        (replace(CFG, z_norm=replace(NORM, d_model=6)), "z_norm must be a DifferenceNorm of 12 features"),
    ],
)
def test_configs_that_do_not_fit(cfg: Attention.Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cfg.build()
