"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention whose state decays, and erases what it overwrites."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.activations import activation
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm, upcast
from hooked_lm.components.ssm.convolution import CausalConvolution, Window
from hooked_lm.components.ssm.delta_rule import DeltaInputs, Output, State, hooked_delta_rule
from hooked_lm.components.ssm.mamba import initial_dt_bias
from hooked_lm.components.ssm.mamba2 import GROUPS, HEADS
from hooked_lm.components.ssm.mixer import CachedMixer, Stream
from hooked_lm.hooks import HookPoint

PerHead = Float[Tensor, "batch pos ssm_head d_ssm_head"]
PerGroup = Float[Tensor, "batch pos group d_state"]


class AbstractDeltaNet(CachedMixer):
    """The gated delta rule; subclasses have the decay of the state and the gate of the output."""

    axes = {
        "W_Q": "[d_model] d_shared",
        "W_K": "[d_model] d_shared",
        "W_V": "[d_model] d_inner",
        "W_gate": "[d_model] d_inner",
        "W_g": "[d_model] ssm_head",
        "W_beta": "[d_model] ssm_head",
    }

    def __init__(self, cfg: "GatedDeltaNet.Config") -> None:
        super().__init__(cfg)
        if cfg.n_heads % cfg.n_groups:
            raise ValueError(f"n_heads={cfg.n_heads} must be a multiple of n_groups={cfg.n_groups}")
        self.gate_act = activation(cfg.gate_act_fn)
        for name, width in cfg.widths.items():
            self.register_parameter(f"W_{name}", nn.Parameter(torch.empty(width, cfg.d_model).T))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(width)) if cfg.bias else None)
        convs = [CausalConvolution.Config(cfg.widths[name], cfg.conv_width, bias=False).build() for name in "QKV"]
        self.conv_q, self.conv_k, self.conv_v = convs
        self.A_log = nn.Parameter(torch.arange(1.0, cfg.n_heads + 1).log())
        self.dt_bias = nn.Parameter(initial_dt_bias(cfg.n_heads))

        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*GROUPS), HookPoint(*GROUPS), HookPoint(*HEADS)
        self.hook_conv_q, self.hook_conv_k, self.hook_conv_v = HookPoint(*GROUPS), HookPoint(*GROUPS), HookPoint(*HEADS)
        self.hook_g, self.hook_beta = HookPoint(*HEADS[:3]), HookPoint(*HEADS[:3])
        self.hook_state = HookPoint(*HEADS, "d_state", on_demand=True)
        self.hook_z, self.hook_gate = HookPoint(*HEADS), HookPoint(*HEADS)
        self.norm = RMSNorm.Config(cfg.d_head, cfg.eps).build(HEADS)
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Stream, Window, State]:
        real = context.new_real()
        q, k = (self.hook_q(self.projected(stream, "Q")), self.hook_k(self.projected(stream, "K")))
        v = self.hook_v(self.projected(stream, "V"))
        q, k, v, window = self.convolved(q, k, v, window, real)
        q, k, v = self.hook_conv_q(q), self.hook_conv_k(k), self.hook_conv_v(v)
        g, beta = self.hook_g(self.log_decay(stream)), self.hook_beta(self.written_share(stream))
        z, state = self.recurrence(q, k, v, g, beta, state, real)
        z, gate = self.hook_z(z), self.hook_gate(self.gate(stream))
        return self.output(z, gate), window, state

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The projection by `W_name`."""
        return F.linear(x, getattr(self, f"W_{name}").T, getattr(self, f"b_{name}"))

    def projected(self, stream: Stream, name: str) -> PerHead | PerGroup:
        """The same, for each head or group."""
        size = self.cfg.d_state if name in ("Q", "K") else self.cfg.d_head
        return self.linear(stream, name).unflatten(-1, (-1, size))

    def convolved(
        self, q: PerGroup, k: PerGroup, v: PerHead, window: Window | None = None, real: Tensor | None = None
    ) -> tuple[PerGroup, PerGroup, PerHead, Window]:
        """q, k and v after their convolutions and activation, and the new window of all three."""
        widths = [self.cfg.d_shared, self.cfg.d_shared, self.cfg.d_inner]
        windows = [None] * 3 if window is None else window.split(widths, -1)
        made = []
        for conv, x, before in zip((self.conv_q, self.conv_k, self.conv_v), (q, k, v), windows, strict=True):
            out, after = conv(x.flatten(2), before, real)
            made.append((self.act(out).to(x.dtype).view_as(x), after))
        (q, _), (k, _), (v, _) = made
        return q, k, v, torch.cat([after for _, after in made], -1)

    @abstractmethod
    def log_decay(self, stream: Stream) -> Float[Tensor, "batch pos ssm_head *d_state"]:
        """The logarithm of the decay of the state at each position, in at least fp32."""

    def written_share(self, stream: Stream) -> Float[Tensor, "batch pos ssm_head"]:
        """The share of the old value that each position replaces, in at least fp32."""
        return upcast(self.linear(stream, "beta")).sigmoid() * self.cfg.max_beta

    @abstractmethod
    def gate(self, stream: Stream) -> PerHead:
        """The gate of the output, before its activation."""

    # ---- the recurrence ----------------------------------------------------------------------------------------------

    def recurrence(
        self, q: PerGroup, k: PerGroup, v: PerHead, g: Tensor, beta: Tensor, state: State | None, real: Tensor | None
    ) -> tuple[Output, State]:
        """What is read from the state at every position, and the last state."""
        q, inputs = self.rule_inputs(q, k, v, g, beta, real)
        return hooked_delta_rule(self.hook_state, q, inputs, state)

    def rule_inputs(
        self, q: PerGroup, k: PerGroup, v: PerHead, g: Tensor, beta: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, DeltaInputs]:
        """The queries of each head, scaled, and the other inputs of the rule, in at least fp32."""
        if real is not None:  # padding does not change the state
            g = g.masked_fill(~real.view(*real.shape, *(1,) * (g.ndim - 2)), 0.0)
            beta = beta.masked_fill(~real[..., None], 0.0)
        n = self.cfg.n_heads // self.cfg.n_groups
        q, k = (unit(upcast(x)).repeat_interleave(n, 2) for x in (q, k))
        return q * self.cfg.d_state**-0.5, DeltaInputs(k, upcast(v), g if g.ndim == 4 else g[..., None], beta)

    def output(self, z: Output, gate: PerHead) -> Stream:
        """Normalises and gates what was read from the state, and projects it into the stream."""
        return self.written(self.norm(z), gate)

    def written(self, normed: Output, gate: PerHead) -> Stream:
        """The output for normalised values."""
        gated = normed * self.gate_act(upcast(gate))
        return self.linear(gated.flatten(2).to(gate.dtype), "out")


class GatedDeltaNet(AbstractDeltaNet):
    """In each head `S' = S[pos - 1] exp(g)`, `S[pos] = S' + beta (v - S' k) k^T` and `z = S[pos] q`; `norm(z) * act(gate) W_out`.

    q, k and v are `act(conv(x W_Q))` and so on; q and k are then divided by their lengths, and q by `sqrt(d_state)`.
    `beta = max_beta * sigmoid(x W_beta)` is the share of the old value under k that v replaces,
    `g = -exp(A_log) softplus(x W_g + dt_bias)` the logarithm of the decay. The heads of a group share q and k. The norm has
    one weight for all heads. `W_Q` and `W_K` are [d_model, group * d_state], `W_V` and `W_gate` [d_model, d_inner], `W_beta`
    and `W_g` [d_model, ssm_head], `W_out` [d_inner, d_model]; `A_log` and `dt_bias` are [ssm_head].

    Sites: `hook_q`, `hook_k` and `hook_v` before the convolutions, `hook_conv_q`, `hook_conv_k` and `hook_conv_v` after them and
    their activation; `hook_g`, `hook_beta`, and `hook_gate` before its activation; on demand `hook_state`, the state after every
    position [d_ssm_head, d_state], whose edits change later states (see `scan.hooked_states`); `hook_z` before the norm and the
    gate. `hook_g`, `hook_beta`, `hook_state` and `hook_z` are in at least fp32, as the recurrence is.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        n_groups: int
        d_state: int
        conv_width: int = 4
        act_fn: str = "silu"  # after the convolutions
        gate_act_fn: str = "silu"
        max_beta: float = 1.0  # with 2 the state can also be reflected (Grazzi et al. 2024, arXiv:2411.12537)
        bias: bool = False  # of all projections
        eps: float = 1e-6  # of the norm before the gate

        @property
        def d_inner(self) -> int:
            return self.n_heads * self.d_head

        @property
        def d_shared(self) -> int:
            """The width of q and of k, over all groups."""
            return self.n_groups * self.d_state

        @property
        def widths(self) -> dict[str, int]:
            """The width of each projection."""
            wide = {"Q": self.d_shared, "K": self.d_shared, "V": self.d_inner}
            return wide | {"g": self.n_heads, "beta": self.n_heads, "gate": self.d_inner}

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_model * (sum(self.widths.values()) + self.d_inner)

        def build(self) -> "AbstractDeltaNet":
            return GatedDeltaNet(self)

    def log_decay(self, stream: Stream) -> Float[Tensor, "batch pos ssm_head"]:
        dt = F.softplus(upcast(self.linear(stream, "g")) + upcast(self.dt_bias))
        return -dt * upcast(self.A_log).exp()

    def gate(self, stream: Stream) -> PerHead:
        return self.projected(stream, "gate")


def unit(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Vectors of length one; short ones stay shorter."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
