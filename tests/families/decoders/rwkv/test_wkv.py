"""The mixers of RWKV-4 against loops over positions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.ssm.scan import step_by_step
from hooked_lm.families.decoders.rwkv.channel_mix import ChannelMix
from hooked_lm.families.decoders.rwkv.token_shift import previous
from hooked_lm.families.decoders.rwkv.wkv import WKV
from tests.close import assert_close
from tests.components.ssm import mixers


@pytest.fixture(params=[4, 9])
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    return mixers.filled(WKV.Config(6, request.param).build())


def shifted(stream: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(stream[:, :1]), stream[:, :-1]], 1)


def naive(mixer: WKV, stream: Tensor) -> Tensor:
    """The average as the paper writes it, without a state."""

    def linear(name: str) -> Tensor:
        share = getattr(mixer, f"mix_{name}")
        return (share * stream + (1 - share) * shifted(stream)) @ getattr(mixer, f"W_{name}")

    k, v, r = (linear(name) for name in "KVR")
    rate, out = mixer.decay.exp(), []
    for pos in range(stream.shape[1]):
        own = (mixer.bonus + k[:, pos]).exp()
        above, below = own * v[:, pos], own
        for before in range(pos):
            weight = (k[:, before] - (pos - 1 - before) * rate).exp()
            above, below = above + weight * v[:, before], below + weight
        out.append(torch.sigmoid(r[:, pos]) * above / below)
    return torch.stack(out, 1) @ mixer.W_out


class TestWKV(mixers.MixerTests):
    naive = staticmethod(naive)
    state_pos = 10

    def test_the_formula(self, model: mixers.Rooted) -> None:
        stream = mixers.some(2, 15, 6)
        assert_close(model(stream), naive(model.mixer, stream))

    def test_states_can_be_edited(self, model: mixers.Rooted) -> None:
        """An edited state changes later positions and none before; a token reads the state before it."""
        stream = mixers.some(2, 20, 6)

        def move(state: Tensor, hook: Any) -> Tensor:
            state[:, 9] = state[:, 9] * 0.5 + 0.2
            return state

        clean, edited = model(stream), model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", move)])
        _, cache = mixers.in_steps(model, stream[:, :10], [10])
        entry = cache.state(0)
        entry.state = entry.state * 0.5 + 0.2
        after = model(stream[:, 10:], Context(10, stream.device, cache=cache))
        assert_close(edited[:, :10], clean[:, :10])
        assert_close(edited[:, 10:], after)
        assert ((edited - clean)[:, 10:12].abs().amax((0, 2)) > 1e-3).all()


def test_weights_of_any_size_stay_finite() -> None:
    """Keys of a few hundred, of both signs, whose exponentials are no numbers; the states say the same as the scan."""
    model = mixers.filled(WKV.Config(6, 8).build())
    with torch.no_grad():
        model.mixer.W_K.mul_(300)
        model.mixer.decay.copy_(torch.linspace(-8.0, 4.0, 8))
    stream = mixers.some(2, 400, 6)
    found = model(stream)
    assert found.isfinite().all()
    listened, cache = model.run_with_cache(stream, names_filter=["mixer.hook_state"])
    assert_close(found, listened)
    assert_close(model.float()(stream.float()), found, dtype=torch.float32)
    assert cache["mixer.hook_state"].isfinite().all()


def test_a_sum_decays_as_the_state_says() -> None:
    """Mean times weight is a decayed sum of weighted values."""
    mixer = mixers.filled(WKV.Config(6, 4).build()).mixer
    k, v = mixers.some(2, 12, 4), mixers.some(2, 12, 4, seed=3)
    start = torch.stack([torch.zeros(2, 4), torch.full((2, 4), -1e30)], -1).double()
    mean, weight = mixer.states(k, v, start).states.unbind(-1)
    decay = (-mixer.decay.exp()).exp().expand(2, 12, 4)
    assert_close(weight.exp(), step_by_step(decay, k.exp()))
    assert_close(mean * weight.exp(), step_by_step(decay, k.exp() * v))


@pytest.fixture
def channels() -> mixers.Rooted:
    return mixers.filled(ChannelMix.Config(6, 10).build())


def test_channel_mixing(channels: mixers.Rooted) -> None:
    mixer, stream = channels.mixer, mixers.some(2, 9, 6)
    inner = (mixer.mix_in * stream + (1 - mixer.mix_in) * shifted(stream)) @ mixer.W_in
    gate = (mixer.mix_gate * stream + (1 - mixer.mix_gate) * shifted(stream)) @ mixer.W_gate
    assert_close(channels(stream), torch.sigmoid(gate) * (inner.relu().square() @ mixer.W_out))
    for lengths in ([1] * 9, [4, 1, 4]):
        assert_close(mixers.in_steps(channels, stream, lengths)[0], channels(stream))


def test_the_shift_skips_padding() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    real = torch.tensor([[False, True, False, True, True, False]])
    before, window = previous(x, None, real)
    assert before[0, real[0], 0].tolist() == [0.0, 2.0, 4.0]
    assert window.flatten().tolist() == [5.0]
    _, window = previous(x, window, torch.zeros_like(real))
    assert window.flatten().tolist() == [5.0]
