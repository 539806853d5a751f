import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.components.ssm.delta_rule import DeltaInputs, delta_in_chunks, delta_states
from tests.close import assert_apart, assert_close
from tests.components.ssm import mixers

SHAPES = {
    "one-group": {"n_heads": 4, "d_head": 2, "n_groups": 1, "d_state": 5, "bias": True},
    "two-groups-reflected": {"n_heads": 4, "d_head": 3, "n_groups": 2, "d_state": 4, "max_beta": 2.0, "eps": 0.1},
    "group-per-head": {
        "n_heads": 3,
        "d_head": 4,
        "n_groups": 3,
        "d_state": 4,
        "conv_width": 2,
        "gate_act_fn": "sigmoid",
    },
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> mixers.Rooted:
    return mixers.filled(GatedDeltaNet.Config(6, **SHAPES[request.param]).build())


def convolved(conv: torch.nn.Module, x: Tensor) -> Tensor:
    width = len(conv.W_conv)
    padded = torch.cat([x.new_zeros(x.shape[0], width - 1, x.shape[-1]), x], 1)
    return F.silu(sum(conv.W_conv[tap] * padded[:, tap : tap + x.shape[1]] for tap in range(width)))


def naive(mixer: GatedDeltaNet, stream: Tensor) -> Tensor:
    """The recurrence as the paper writes it, `S (a (I - beta k k^T)) + beta v k^T`, a head and a position at a time."""
    cfg, heads = mixer.cfg, []

    def linear(x: Tensor, name: str) -> Tensor:
        bias = getattr(mixer, f"b_{name}")
        return x @ getattr(mixer, f"W_{name}") + (0.0 if bias is None else bias)

    q, k, v = (convolved(getattr(mixer, f"conv_{x.lower()}"), linear(stream, x)) for x in "QKV")
    alpha = torch.exp(-mixer.A_log.exp() * F.softplus(linear(stream, "g") + mixer.dt_bias))
    beta, gate = cfg.max_beta * torch.sigmoid(linear(stream, "beta")), linear(stream, "gate")
    act = {"silu": F.silu, "sigmoid": torch.sigmoid}[cfg.gate_act_fn]
    for head in range(cfg.n_heads):
        group = head // (cfg.n_heads // cfg.n_groups)
        shared, own = (slice(i * d, (i + 1) * d) for i, d in ((group, cfg.d_state), (head, cfg.d_head)))
        state, outputs = stream.new_zeros(stream.shape[0], cfg.d_head, cfg.d_state), []
        for pos in range(stream.shape[1]):
            query, key = (
                x[:, pos, shared] / (x[:, pos, shared].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)
            )
            a, b = alpha[:, pos, head, None, None], beta[:, pos, head, None, None]
            state = state @ (a * (torch.eye(cfg.d_state) - b * key[:, :, None] * key[:, None, :]))
            state = state + b * v[:, pos, own, None] * key[:, None, :]
            z = (state @ query[..., None])[..., 0] / cfg.d_state**0.5
            normed = z / (z.square().mean(-1, keepdim=True) + cfg.eps).sqrt() * mixer.norm.w
            outputs.append(normed * act(gate[:, pos, own]))
        heads.append(torch.stack(outputs, 1))
    return linear(torch.cat(heads, -1), "out")


class TestGatedDeltaNet(mixers.MixerTests):
    naive = staticmethod(naive)


@pytest.mark.parametrize("n_pos", [1, 2, 7, 64, 65, 150])
def test_it_is_the_recurrence(model: mixers.Rooted, n_pos: int) -> None:
    stream = mixers.some(2, n_pos, 6)
    assert_close(model(stream), naive(model.mixer, stream))


def rule(n_pos: int, per_column: bool, rate: float = 1.0) -> tuple[Tensor, DeltaInputs, Tensor]:
    """Queries, inputs and a first state; the keys have length one."""
    q, k = (F.normalize(mixers.some(2, n_pos, 3, 5, seed=seed), dim=-1) for seed in (1, 2))
    v, state = mixers.some(2, n_pos, 3, 4, seed=3), mixers.some(2, 3, 4, 5, seed=6)
    g = -rate * mixers.some(2, n_pos, 3, 5 if per_column else 1, seed=4).exp()
    return q, DeltaInputs(k, v, g, 2 * mixers.some(2, n_pos, 3, seed=5).sigmoid()), state


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("rate", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("n_pos", [2, 16, 17, 150])
def test_chunks_equal_steps(n_pos: int, per_column: bool, rate: float) -> None:
    """In single precision too, for decays from almost none to all of the state within a position."""
    q, inputs, state = rule(n_pos, per_column, rate)
    for dtype in (torch.float64, torch.float32):
        typed, queries = DeltaInputs(*(x.to(dtype) for x in inputs)), q.to(dtype)
        for first in (None, state.to(dtype)):
            states = delta_states(typed, first).states
            z, last = delta_in_chunks(queries, typed, first)
            assert (z - (states @ queries[..., None])[..., 0]).abs().max() < 1e-4
            assert_close(z, (states @ queries[..., None])[..., 0])
            assert_close(last, states[:, -1])


def test_a_decay_of_each_column_is_another() -> None:
    q, inputs, state = rule(20, per_column=True)
    mean = inputs._replace(g=inputs.g.mean(-1, keepdim=True))
    assert_apart(delta_in_chunks(q, inputs, state)[0], delta_in_chunks(q, mean, state)[0])


def test_a_value_written_with_beta_one_is_read_back() -> None:
    """The rule replaces what the state holds under a key."""
    _, inputs, state = rule(1, per_column=False)
    written = delta_states(inputs._replace(beta=torch.ones(2, 1, 3)), state).states[:, 0]
    assert_close((written @ inputs.k[:, 0, :, :, None])[..., 0], inputs.v[:, 0])


def test_groups_must_divide_heads() -> None:
    with pytest.raises(ValueError, match="n_heads=4 must be a multiple of n_groups=3"):
        GatedDeltaNet.Config(6, 4, 2, 3, 5).build()
