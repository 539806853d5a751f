"""The matrix LSTM against a loop with the stabilised state of the paper."""

from math import exp

import pytest
import torch
from torch import Tensor

from hooked_lm.families.decoders.xlstm.mlstm import MLSTM
from tests.close import assert_close
from tests.components.ssm import mixers

SHAPES = {
    "two-heads": {"n_heads": 2, "d_head": 3, "d_state": 4, "denominator_eps": 0.1, "eps": 0.5},
    "biased-tight-cap": {"n_heads": 3, "d_head": 2, "d_state": 2, "bias": True, "gate_cap": 1.5, "eps": 0.1},
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    rooted = mixers.filled(MLSTM.Config(6, **SHAPES[request.param]).build())
    with torch.no_grad():
        rooted.mixer.b_i.add_(2)  # sums of weights above one and below
    return rooted


def naive(mixer: MLSTM, stream: Tensor) -> Tensor:
    """A head and a position at a time, with C and n divided by exp(m)."""
    cfg, heads = mixer.cfg, []

    def linear(x: Tensor, name: str) -> Tensor:
        bias = getattr(mixer, f"b_{name}")
        return x @ getattr(mixer, f"W_{name}") + (0.0 if bias is None else bias)

    q, k, v, gate = (linear(stream, name) for name in ("Q", "K", "V", "gate"))
    i, f = (cfg.gate_cap * torch.tanh(linear(stream, name) / cfg.gate_cap) for name in "if")
    for head in range(cfg.n_heads):
        keys, values = (slice(head * d, (head + 1) * d) for d in (cfg.d_state, cfg.d_head))
        C, n = stream.new_zeros(len(stream), cfg.d_head, cfg.d_state), stream.new_zeros(len(stream), cfg.d_state)
        m, outputs = stream.new_zeros(len(stream)), []
        for pos in range(stream.shape[1]):
            decayed = torch.log(torch.sigmoid(f[:, pos, head])) + m
            m = torch.maximum(decayed, i[:, pos, head])
            keep, write = torch.exp(decayed - m)[:, None], torch.exp(i[:, pos, head] - m)[:, None]
            C = keep[..., None] * C + (write * v[:, pos, values])[:, :, None] * k[:, pos, keys][:, None]
            n = keep * n + write * k[:, pos, keys]
            query = q[:, pos, keys] / cfg.d_state**0.5
            size = torch.maximum((n * query).sum(-1).abs(), torch.exp(-m)) + cfg.denominator_eps
            z = (C @ query[..., None])[..., 0] / size[:, None]
            centred = z - z.mean(-1, keepdim=True)
            normed = centred / (centred.square().mean(-1, keepdim=True) + cfg.eps).sqrt() * mixer.norm.w[head]
            normed = normed if mixer.norm.shift() is None else normed + mixer.norm.b[head]
            outputs.append(normed * torch.sigmoid(gate[:, pos, values]))
        heads.append(torch.stack(outputs, 1))
    out = torch.cat(heads, -1) @ mixer.W_out
    return out if mixer.b_out is None else out + mixer.b_out


class TestMLSTM(mixers.MixerTests):
    naive = staticmethod(naive)
    state_pos = 10

    def test_the_formula(self, model: mixers.Rooted) -> None:
        stream = mixers.some(2, 80, 6)
        assert_close(model(stream), naive(model.mixer, stream))

    def test_gates_at_their_cap(self, model: mixers.Rooted) -> None:
        """Over many positions, in single precision."""
        with torch.no_grad():
            model.mixer.W_i.mul_(40)
            model.mixer.W_f.mul_(40)
        stream = mixers.some(2, 300, 6)
        expected = naive(model.mixer, stream)
        assert_close(model.float()(stream.float()), expected, dtype=torch.float32, scale=30.0)


@pytest.mark.parametrize("cap", [0.0, 90.0])
def test_caps_that_do_not_keep_exponentials_in_range(cap: float) -> None:
    with pytest.raises(ValueError, match=f"gate_cap={cap}: exponentials of gates need a cap of at most 60"):
        MLSTM.Config(6, 2, 3, 4, gate_cap=cap).build()
    assert exp(60) < torch.finfo(torch.float32).max
