"""The recurrent block of Griffin (De et al. 2024, arXiv:2402.19427): a real-gated linear recurrent unit beside a gate."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.activations import activation
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import hook_if_listening
from hooked_lm.components.norm import RESIDUAL, wide
from hooked_lm.components.ssm.convolution import CausalConvolution
from hooked_lm.components.ssm.scan import shown_states
from hooked_lm.hooks import HookPoint

INNER = ("batch", "pos", "d_inner")
SHARPNESS = 8.0  # the paper's c

Stream = Float[Tensor, "batch pos d_model"]
Inner = Float[Tensor, "batch pos d_inner"]


class RGLRU(nn.Module):
    """`h[pos] = a h[pos - 1] + sqrt(1 - a^2) i u` in each channel, gated: `(h * act(gate)) W_out`.

    `u = conv(x W_x)`; `r = sigmoid(u W_r + b_r)` is the recurrence gate, `i = sigmoid(u W_i + b_i)` the input gate, and
    `a = exp(-8 r softplus(Lambda))`. At a prompt's first token the state starts anew and the input comes whole, without
    the root. `W_x` and `W_gate` are [d_model, d_inner], `W_r` and `W_i` [part, d_in, d_out]: channels are mixed within
    their part only; `Lambda` is [d_inner], `W_out` [d_inner, d_model].

    Sites: `hook_x` before the convolution, `hook_conv` (u) after it (no activation follows), `hook_gate` before its
    activation, `hook_r`, `hook_i`, `hook_a`; on demand `hook_state` (h), whose edits change what follows (see
    `scan.shown_states`); `hook_y`, the same before the gate, whose edits do not. The last four and `hook_r` are in at
    least fp32, as the recurrence is.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_inner: int
        n_parts: int
        conv_width: int = 4
        act_fn: str = "gelu_pytorch_tanh"  # of the gate
        bias: bool = True
        conv_bias: bool = True

        @property
        def n_weights(self) -> int:
            """The entries of its matrices."""
            return self.d_inner * (3 * self.d_model + 2 * self.d_inner // self.n_parts)

        def build(self) -> "RGLRU":
            return RGLRU(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if cfg.d_inner % cfg.n_parts:
            raise ValueError(f"{cfg.d_inner} channels cannot be cut into {cfg.n_parts} parts evenly")
        d_part = cfg.d_inner // cfg.n_parts
        self.cfg = cfg
        self.act = activation(cfg.act_fn)
        self.W_x = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T)
        self.W_gate = nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T)
        self.b_x = nn.Parameter(torch.zeros(cfg.d_inner)) if cfg.bias else None
        self.b_gate = nn.Parameter(torch.zeros(cfg.d_inner)) if cfg.bias else None
        self.conv = CausalConvolution.Config(cfg.d_inner, cfg.conv_width, cfg.conv_bias).build()
        self.W_r = nn.Parameter(torch.empty(cfg.n_parts, d_part, d_part))
        self.W_i = nn.Parameter(torch.empty(cfg.n_parts, d_part, d_part))
        self.b_r = nn.Parameter(torch.zeros(cfg.n_parts, d_part))
        self.b_i = nn.Parameter(torch.zeros(cfg.n_parts, d_part))
        # a new model keeps 0.9 to 0.999 of its state when the gate is open: a^c = exp(-8 softplus(Lambda))
        kept = torch.linspace(0.9, 0.999, cfg.d_inner)
        self.Lambda = nn.Parameter((-kept.log() / SHARPNESS).expm1().log())
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_x, self.hook_gate = HookPoint(*INNER), HookPoint(*INNER)
        self.hook_conv = HookPoint(*INNER)
        self.hook_r, self.hook_i, self.hook_a = HookPoint(*INNER), HookPoint(*INNER), HookPoint(*INNER)
        self.hook_state = HookPoint(*INNER, on_demand=True)
        self.hook_y = HookPoint(*INNER)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def forward(self, stream: Stream, context: Context | None = None, layer: int = 0) -> Stream:
        """`layer` says which entry of the context's cache is this layer's."""
        stream = hook_if_listening(self.hook_in, stream)
        context = context or Context(stream.shape[1], stream.device)
        real, entry = context.new_real(), None if context.cache is None else context.cache.state(layer)
        window, state = (None, None) if entry is None else entry.past(stream.shape[0])

        x = self.hook_x(F.linear(stream, self.W_x.T, self.b_x))
        gate = self.hook_gate(F.linear(stream, self.W_gate.T, self.b_gate))
        u, window = self.conv(x, window, real)
        u = self.hook_conv(u.to(x.dtype))
        r, i = self.hook_r(self.gate(u, self.W_r, self.b_r)), self.hook_i(self.gate(u, self.W_i, self.b_i))
        a = self.hook_a(self.decay(r))

        decay, update = self.discretized(u, i, a, (context.positions == 0)[..., None])
        if real is not None:  # padding leaves the state as it is
            decay = decay.masked_fill(~real[..., None], 1.0)
            update = update.masked_fill(~real[..., None], 0.0)
        states = shown_states(self.hook_state, decay, update, state)
        if entry is not None:
            entry.keep(window, states[:, -1], context.n_pos)
        return self.hook_out(self.output(self.hook_y(states), gate))

    def gate(self, u: Inner, W: Float[Tensor, "part d_in d_out"], b: Float[Tensor, "part d_out"]) -> Inner:
        """A gate between 0 and 1, in at least fp32."""
        parts = torch.einsum("bpni,nio->bpno", u.unflatten(-1, (self.cfg.n_parts, -1)), W)
        return (wide(parts) + wide(b)).sigmoid().flatten(2)

    def decay(self, r: Inner) -> Inner:
        """What each position keeps of the state."""
        return (-SHARPNESS * r * F.softplus(wide(self.Lambda))).exp()

    def discretized(self, u: Inner, i: Inner, a: Inner, first: Tensor) -> tuple[Inner, Inner]:
        """What each position keeps of the state, and what it adds; `first` marks where a prompt begins."""
        # the floor only bounds the slope of the root, at channels that keep all of their state
        root = torch.where(first, 1.0, 1 - a.square()).clamp(min=1e-12).sqrt()
        return torch.where(first, 0.0, a), root * i * wide(u)

    def output(self, y: Inner, gate: Inner) -> Stream:
        """From the states back into the stream."""
        return F.linear((y * self.act(wide(gate))).to(gate.dtype), self.W_out.T, self.b_out)
