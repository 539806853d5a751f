"""The router of Switch Transformers: the best expert, as long as it has room."""

import torch

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import CapacityRouter
from hooked_lm.components.mlp import MLP
from tests.close import assert_close


def test_later_tokens_of_a_row_find_their_expert_full():
    logits = torch.tensor(
        [[[2.0, 0, 1], [3, 0, 1], [0, 1, 0], [4, 0, 1]], [[0.0, 0, 1], [2, 0, 1], [3, 0, 1], [4, 0, 1]]]
    )
    weights, indices = CapacityRouter(2)(logits, 1)
    assert indices[..., 0].tolist() == [[0, 0, 1, 0], [2, 0, 0, 0]]
    expected = logits.softmax(-1).amax(-1)
    expected[0, 3] = expected[1, 3] = 0.0  # each row for itself
    assert_close(weights[..., 0], expected)
    assert_close(CapacityRouter(3)(logits, 1)[0][..., 0], logits.softmax(-1).amax(-1))


def test_a_token_beyond_the_capacity_has_weight_zero():
    moe = MoE.Config(MLP.Config(6, 8, "relu", bias=False), 2, 1, CapacityRouter(1)).build()
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(1, 1, 6, generator=generator).expand(1, 3, 6)
    out = moe(x)
    assert out[0, 0].abs().max() > 0
    assert (out[0, 1:] == 0).all()
