import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.ssm.rg_lru import RGLRU
from tests.close import assert_close
from tests.components.ssm import mixers


@pytest.fixture(params=[(8, 2), (8, 8), (9, 1)], ids=["two-parts", "part-per-channel", "one-part"])
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    d_inner, n_channel_groups = request.param
    return mixers.filled(RGLRU.Config(6, d_inner=d_inner, n_channel_groups=n_channel_groups, conv_width=3).build())


def naive(mixer: RGLRU, stream: Tensor) -> Tensor:
    """Equations 1 to 4 of the paper, a position at a time."""
    cfg, (batch, n_pos, _) = mixer.cfg, stream.shape
    d_group = cfg.d_inner // cfg.n_channel_groups
    x, gate = stream @ mixer.W_x + mixer.b_x, stream @ mixer.W_gate + mixer.b_gate
    padded = torch.cat([stream.new_zeros(batch, cfg.conv_width - 1, cfg.d_inner), x], 1)
    state, outputs = stream.new_zeros(batch, cfg.d_inner), []
    for pos in range(n_pos):
        u = sum(mixer.conv.W_conv[k] * padded[:, pos + k] for k in range(cfg.conv_width)) + mixer.conv.b_conv
        parts = u.split(d_group, -1)
        r = torch.cat([(part @ mixer.W_r[n] + mixer.b_r[n]).sigmoid() for n, part in enumerate(parts)], -1)
        i = torch.cat([(part @ mixer.W_i[n] + mixer.b_i[n]).sigmoid() for n, part in enumerate(parts)], -1)
        a = torch.exp(-8 * r * F.softplus(mixer.Lambda))
        state = i * u if pos == 0 else a * state + (1 - a**2).sqrt() * (i * u)
        outputs.append((state * F.gelu(gate[:, pos], approximate="tanh")) @ mixer.W_out + mixer.b_out)
    return torch.stack(outputs, 1)


class TestRGLRU(mixers.MixerTests):
    naive = staticmethod(naive)


@pytest.mark.parametrize("n_pos", [1, 2, 7, 8, 90])
def test_it_is_the_recurrence(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def test_parts_must_divide_channels() -> None:
    with pytest.raises(ValueError, match="d_inner=8 must be a multiple of n_channel_groups=3"):
        RGLRU.Config(6, 8, 3).build()


def test_a_channel_that_keeps_everything_has_a_gradient(model: mixers.Rooted) -> None:
    with torch.no_grad():
        model.mixer.Lambda.fill_(-200.0)
    model(mixers.some(1, 20, 6)).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_initial_decays() -> None:
    mixer = RGLRU.Config(6, 5, 1).build()
    kept = mixer.decay(torch.ones(1, 1, 5))[0, 0]
    assert_close(kept, torch.linspace(0.9, 0.999, 5))
