import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.ssm.mamba import Mamba, initial_dt_bias
from tests.close import assert_close
from tests.components.ssm import mixers


@pytest.fixture(params=[True, False], ids=["biased", "unbiased"])
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    bias = request.param
    cfg = Mamba.Config(6, d_inner=8, d_state=3, dt_rank=2, conv_width=3, bias=bias, conv_bias=bias)
    return mixers.filled(cfg.build())


def naive(mixer: Mamba, stream: Tensor) -> Tensor:
    """The paper's algorithm 2, a number at a time where that is clearest."""
    batch, n_pos, _ = stream.shape
    x, gate = stream @ mixer.W_x, stream @ mixer.W_gate
    if mixer.b_x is not None:
        x, gate = x + mixer.b_x, gate + mixer.b_gate
    state, outputs, width = stream.new_zeros(batch, mixer.cfg.d_inner, mixer.cfg.d_state), [], mixer.cfg.conv_width
    for pos in range(n_pos):
        convolved = stream.new_zeros(batch, mixer.cfg.d_inner)
        for tap in range(width):
            before = pos - (width - 1) + tap
            if before >= 0:
                convolved = convolved + mixer.conv.W_conv[tap] * x[:, before]
        if mixer.conv.b_conv is not None:
            convolved = convolved + mixer.conv.b_conv
        u = F.silu(convolved)
        dt = F.softplus(u @ mixer.W_dt_down @ mixer.W_dt_up + mixer.dt_bias)
        B, C = u @ mixer.W_B, u @ mixer.W_C
        for channel in range(mixer.cfg.d_inner):
            kept = torch.exp(-dt[:, channel, None] * mixer.A_log[channel].exp()) * state[:, channel]
            added = dt[:, channel, None] * B * u[:, channel, None]
            state = torch.cat([state[:, :channel], (kept + added)[:, None], state[:, channel + 1 :]], 1)
        y = (state * C[:, None]).sum(-1) + mixer.D * u
        outputs.append((y * F.silu(gate[:, pos])) @ mixer.W_out)
    out = torch.stack(outputs, 1)
    return out if mixer.b_out is None else out + mixer.b_out


class TestMamba(mixers.MixerTests):
    naive = staticmethod(naive)


@pytest.mark.parametrize("n_pos", [1, 2, 7, 8, 50])
def test_it_is_the_recurrence(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def test_segments_join(model: mixers.Rooted, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = mixers.some(1, 50, 6)
    whole = model(stream)
    monkeypatch.setattr("hooked_lm.components.ssm.mamba.SEGMENT", 16)
    assert_close(model(stream), whole)


def test_zeroed_states_leave_the_direct_path(model: mixers.Rooted) -> None:
    stream = mixers.some(2, 20, 6)
    seen = {}

    def see(value: Tensor, hook: object) -> None:
        seen[hook.name] = value

    hooks = [("mixer.hook_state", lambda state, hook: state * 0)]
    hooks += [(name, see) for name in ("mixer.hook_conv", "mixer.hook_y")]
    model.run_with_hooks(stream, fwd_hooks=hooks)
    assert_close(seen["mixer.hook_y"], model.mixer.D * seen["mixer.hook_conv"])


def test_large_steps_neither_overflow_nor_vanish(model: mixers.Rooted) -> None:
    with torch.no_grad():
        model.mixer.dt_bias.add_(60.0)  # a state that forgets everything at once
    stream = mixers.some(1, 50, 6)
    found = model(stream)
    assert found.isfinite().all()
    assert_close(found, naive(model.mixer, stream))


def test_new_step_sizes() -> None:
    sizes = F.softplus(initial_dt_bias(5))
    assert_close(sizes, torch.tensor([0.001, 10**-2.5, 0.01, 10**-1.5, 0.1]))
