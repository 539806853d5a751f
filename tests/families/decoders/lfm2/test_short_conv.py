import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.families.decoders.lfm2.short_conv import ShortConv
from tests.close import assert_apart, assert_close
from tests.components.ssm import mixers

SHAPES = {"three-taps": {}, "two-taps-biased": {"conv_width": 2, "bias": True}, "five-taps-silu": {"conv_width": 5}}
SHAPES["five-taps-silu"] |= {"act_fn": "silu"}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    return mixers.filled(ShortConv.Config(6, **SHAPES[request.param]).build())


def naive(mixer: ShortConv, stream: Tensor) -> Tensor:
    """A window that moves over the products, a position at a time."""

    def projected(name: str) -> Tensor:
        return F.linear(stream, getattr(mixer, f"W_{name}").T, getattr(mixer, f"b_{name}"))

    product, gate = projected("B") * projected("x"), projected("gate")
    window, outputs = stream.new_zeros(mixer.cfg.conv_width, stream.shape[0], mixer.cfg.d_inner), []
    for pos in range(stream.shape[1]):
        window = torch.cat([window[1:], product[None, :, pos]])
        y = torch.einsum("tbi,ti->bi", window, mixer.conv.W_conv)
        y = y if mixer.conv.b_conv is None else y + mixer.conv.b_conv
        y = F.silu(y) if mixer.cfg.act_fn == "silu" else y
        outputs.append(F.linear(y * gate[:, pos], mixer.W_out.T, mixer.b_out))
    return torch.stack(outputs, 1)


class TestShortConv(mixers.MixerTests):
    naive = staticmethod(naive)
    state_pos = 10  # an edit leaves the window after a few positions


@pytest.mark.parametrize("n_pos", [1, 2, 3, 40])
def test_it_is_the_window(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def test_the_state_is_the_window(model: mixers.Rooted) -> None:
    """The last products, the newest last; before the first token they are zero."""
    stream, width = mixers.some(2, 8, 6), model.mixer.cfg.conv_width
    _, cache = model.run_with_cache(stream, names_filter=["mixer.hook_state", "mixer.hook_x", "mixer.hook_B"])
    product, states = cache["mixer.hook_B"] * cache["mixer.hook_x"], cache["mixer.hook_state"]
    assert_close(states[:, 7], product[:, 8 - width :].mT)
    assert_close(states[:, 0, :, -1], product[:, 0])
    assert not states[:, 0, :, :-1].any()


def test_an_edit_leaves_the_window(model: mixers.Rooted) -> None:
    """An edit of the state changes as many positions as there are taps, and none before or after."""
    stream, width = mixers.some(2, 20, 6), model.mixer.cfg.conv_width

    def move(state: Tensor, hook: object) -> Tensor:
        state[:, 9] += 1.0
        return state

    change = (model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", move)]) - model(stream)).abs().amax((0, 2))
    assert (change > 1e-4).nonzero().flatten().tolist() == list(range(9, 9 + width))


def test_padding_keeps_the_state(model: mixers.Rooted) -> None:
    """At padding the state is that after the last real token; the state of the left padding of a row is zero."""
    stream, real = mixers.some(1, 6, 6), torch.tensor([[False, True, True, False, True, False]])
    states = []
    with model.hooks([("mixer.hook_state", lambda state, hook: states.append(state))]):
        listened = model(stream, Context(6, stream.device, real))
        model(stream[:, real[0]])
    assert_close(states[0][:, real[0]], states[1])
    assert torch.equal(states[0][:, 3], states[0][:, 2])
    assert not states[0][:, 0].any()
    assert_close(listened[:, real[0]], model(stream, Context(6, stream.device, real))[:, real[0]])
    assert_apart(states[0][:, 4], states[0][:, 2])
