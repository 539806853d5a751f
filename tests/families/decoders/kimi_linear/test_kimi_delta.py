import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.families.decoders.kimi_linear.kimi_delta import KimiDeltaAttention
from tests.close import assert_close
from tests.components.ssm import mixers
from tests.components.ssm.test_delta_net import convolved

SHAPES = {
    "low-rank": {"n_heads": 3, "d_head": 4, "n_groups": 3, "d_state": 5, "rank": 2, "eps": 0.1},
    "bounded": {"n_heads": 2, "d_head": 4, "n_groups": 2, "d_state": 4, "lower_bound": -2.0, "bias": True},
    "shared-keys": {"n_heads": 4, "d_head": 3, "n_groups": 2, "d_state": 4, "gate_act_fn": "silu"},
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    return mixers.filled(KimiDeltaAttention.Config(6, **SHAPES[request.param]).build())


def naive(mixer: KimiDeltaAttention, stream: Tensor) -> Tensor:
    """The recurrence as the paper writes it, `S = (I - beta k k^T) Diag(a) S + beta k v^T`, a head and a position at a time."""
    cfg, heads = mixer.cfg, []

    def linear(x: Tensor, name: str) -> Tensor:
        bias = getattr(mixer, f"b_{name}", None)
        return x @ getattr(mixer, f"W_{name}") + (0.0 if bias is None else bias)

    def low_rank(name: str) -> Tensor:
        return linear(linear(stream, f"{name}_down"), f"{name}_up") if cfg.rank else linear(stream, name)

    q, k, v = (convolved(getattr(mixer, f"conv_{x.lower()}"), linear(stream, x)) for x in "QKV")
    raw = low_rank("g").unflatten(-1, (cfg.n_heads, cfg.d_state)) + mixer.dt_bias
    rate = mixer.A_log.exp()[:, None]
    g = -rate * F.softplus(raw) if cfg.lower_bound is None else cfg.lower_bound * torch.sigmoid(rate * raw)
    beta, gate = torch.sigmoid(linear(stream, "beta")), low_rank("gate")
    act = {"silu": F.silu, "sigmoid": torch.sigmoid}[cfg.gate_act_fn]
    for head in range(cfg.n_heads):
        group = head // (cfg.n_heads // cfg.n_groups)
        shared, own = (slice(i * d, (i + 1) * d) for i, d in ((group, cfg.d_state), (head, cfg.d_head)))
        state, outputs = stream.new_zeros(stream.shape[0], cfg.d_state, cfg.d_head), []
        for pos in range(stream.shape[1]):
            query, key = (
                x[:, pos, shared] / (x[:, pos, shared].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)
            )
            b = beta[:, pos, head, None, None]
            state = g[:, pos, head].exp()[:, :, None] * state
            state = (torch.eye(cfg.d_state) - b * key[:, :, None] * key[:, None, :]) @ state
            state = state + b * key[:, :, None] * v[:, pos, None, own]
            z = (state.mT @ query[..., None])[..., 0] / cfg.d_state**0.5
            normed = z / (z.square().mean(-1, keepdim=True) + cfg.eps).sqrt() * mixer.norm.w
            outputs.append(normed * act(gate[:, pos, own]))
        heads.append(torch.stack(outputs, 1))
    return linear(torch.cat(heads, -1), "out")


class TestKimiDeltaAttention(mixers.MixerTests):
    naive = staticmethod(naive)


@pytest.mark.parametrize("n_pos", [1, 2, 17, 50])
def test_it_is_the_recurrence(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def test_the_number_of_weights(model: mixers.Rooted) -> None:
    matrices = {name: weight for name, weight in model.mixer.named_parameters() if name.startswith("W_")}
    assert model.mixer.cfg.n_weights == sum(weight.numel() for weight in matrices.values())


def test_steep_decays_have_finite_gradients() -> None:
    """transformers has none there: its softplus is the logarithm of an infinite exponential (`KimiLinearForgetGate.forward`)."""
    mixer = mixers.filled(KimiDeltaAttention.Config(6, **SHAPES["low-rank"]).build()).mixer
    with torch.no_grad():
        mixer.dt_bias += 100.0
    mixer.log_decay(mixers.some(2, 3, 6)).sum().backward()
    assert mixer.dt_bias.grad is not None
    assert mixer.dt_bias.grad.isfinite().all()
    assert (mixer.dt_bias.grad < 0).all()
