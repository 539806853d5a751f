import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.ssm.decayed_sum import decayed_updates, decays, in_chunks, read_by_queries
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.components.ssm.scan import step_by_step
from tests.close import assert_close
from tests.components.ssm import mixers

SHAPES = {
    "one-group": {"n_heads": 4, "d_head": 2, "n_groups": 1, "bias": True},
    "two-groups": {"n_heads": 4, "d_head": 2, "n_groups": 2, "conv_bias": False, "dt_limit": (0.2, 0.8)},
    "group-per-head": {"n_heads": 3, "d_head": 4, "n_groups": 3, "conv_width": 2},
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    return mixers.filled(Mamba2.Config(6, d_state=5, **SHAPES[request.param]).build())


def naive(mixer: Mamba2, stream: Tensor) -> Tensor:
    """The recurrence, a head and a position at a time."""
    cfg, batch = mixer.cfg, stream.shape[0]

    def branch(name: str) -> Tensor:
        bias = getattr(mixer, f"b_{name}")
        made = stream @ getattr(mixer, f"W_{name}")
        return made if bias is None else made + bias

    gate, dt = branch("gate"), (F.softplus(branch("dt") + mixer.dt_bias)).clamp(*cfg.dt_limit)
    together = torch.cat([branch("x"), branch("B"), branch("C")], -1)
    padded = torch.cat([stream.new_zeros(batch, cfg.conv_width - 1, together.shape[-1]), together], 1)
    taps = [mixer.conv.W_conv[k] * padded[:, k : k + stream.shape[1]] for k in range(cfg.conv_width)]
    convolved = sum(taps) if mixer.conv.b_conv is None else sum(taps) + mixer.conv.b_conv
    x, B, C = F.silu(convolved).split([cfg.d_inner, cfg.d_shared, cfg.d_shared], -1)
    heads = []
    for head in range(cfg.n_heads):
        group = head // (cfg.n_heads // cfg.n_groups)
        of_group = slice(group * cfg.d_state, (group + 1) * cfg.d_state)
        own = x[..., head * cfg.d_head : (head + 1) * cfg.d_head]
        state, outputs = stream.new_zeros(batch, cfg.d_head, cfg.d_state), []
        for pos in range(stream.shape[1]):
            step = dt[:, pos, head, None, None]
            state = torch.exp(-step * mixer.A_log[head].exp()) * state
            state = state + step * own[:, pos, :, None] * B[:, pos, None, of_group]
            outputs.append((state * C[:, pos, None, of_group]).sum(-1) + mixer.D[head] * own[:, pos])
        heads.append(torch.stack(outputs, 1))
    gated = torch.cat(heads, -1) * F.silu(gate)
    parts = gated.split(cfg.d_inner // cfg.n_groups, -1)
    normed = [part / (part.square().mean(-1, keepdim=True) + cfg.eps).sqrt() for part in parts]
    out = torch.cat(normed, -1) * mixer.norm.w.flatten() @ mixer.W_out
    return out if mixer.b_out is None else out + mixer.b_out


class TestMamba2(mixers.MixerTests):
    naive = staticmethod(naive)


@pytest.mark.parametrize("n_pos", [1, 2, 7, 64, 65, 150])
def test_it_is_the_recurrence(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def test_chunks_equal_the_recurrence(model: mixers.Rooted) -> None:
    mixer, (batch, n_pos) = model.mixer, (2, 150)
    cfg = mixer.cfg
    u, state = mixers.some(batch, n_pos, cfg.n_heads, cfg.d_head), mixers.some(batch, cfg.n_heads, cfg.d_head, 5)
    B, C = (mixers.some(batch, n_pos, cfg.n_groups, cfg.d_state, seed=seed) for seed in (2, 3))
    dt = mixers.some(batch, n_pos, cfg.n_heads, seed=4).exp()
    for first in (None, state):
        inputs = mixer.inputs(u, dt, B)
        y, last = in_chunks(C, *inputs, first)
        states = step_by_step(*decayed_updates(*inputs), first)
        assert_close(y, read_by_queries(states, C))
        assert_close(last, states[:, -1])


def test_decays_are_precise_beside_large_rates() -> None:
    rates = torch.tensor([-5000.0, -1e-4, -2e-4])
    expected = torch.tensor([[0, 0, 0], [-1e-4, 0, 0], [-3e-4, -2e-4, 0]]).exp().tril()
    assert_close(decays(rates), expected)


def test_groups_must_divide_heads() -> None:
    with pytest.raises(ValueError, match="n_heads=4 must be a multiple of n_groups=3"):
        Mamba2.Config(6, 4, 2, 5, n_groups=3).build()
