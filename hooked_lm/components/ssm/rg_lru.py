"""The RG-LRU of Griffin (De et al. 2024, arXiv:2402.19427): a real-gated linear recurrent unit with an output gate."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.mixer import INNER, Inner, Mixer, Stream
from hooked_lm.components.ssm.scan import edited_scan, hooked_states
from hooked_lm.hooks import HookPoint

SHARPNESS = 8.0  # the paper's c

State = Float[Tensor, "batch d_inner"]


class RGLRU(Mixer):
    """`h[pos] = a h[pos - 1] + sqrt(1 - a^2) i u` in each channel, gated: `(h * act(gate)) W_out`.

    `u = conv(x W_x)`; `r = sigmoid(u W_r + b_r)` is the recurrence gate, `i = sigmoid(u W_i + b_i)` the input gate, and
    `a = exp(-8 r softplus(Lambda))`. At a prompt's first token the state is reset, and `i u` is not scaled by
    the root. `W_x` and `W_gate` are [d_model, d_inner], `W_r` and `W_i` [channel_group, d_in, d_out]: block-diagonal, one block
    per group of channels; `Lambda` is [d_inner], `W_out` [d_inner, d_model].

    Sites: `hook_x` before the convolution, `hook_conv` (u) after it (no activation follows), `hook_gate` before its
    activation, `hook_r`, `hook_i`, `hook_a`; on demand `hook_state` (h), whose edits change later states (see
    `scan.hooked_states`); `hook_y`, the same before the gate, whose edits do not. `hook_r` to `hook_y` are in at least
    fp32, as the recurrence is.
    """

    axes = dict.fromkeys(("W_r", "W_i"), "channel_group [d_in] d_out; it is block-diagonal")

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_inner: int
        n_channel_groups: int
        conv_width: int = 4
        act_fn: str = "gelu_pytorch_tanh"  # of the gate
        bias: bool = True
        conv_bias: bool = True

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_inner * (3 * self.d_model + 2 * self.d_inner // self.n_channel_groups)

        def build(self) -> "RGLRU":
            return RGLRU(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.d_inner % cfg.n_channel_groups:
            raise ValueError(f"d_inner={cfg.d_inner} must be a multiple of n_channel_groups={cfg.n_channel_groups}")
        d_group = cfg.d_inner // cfg.n_channel_groups
        self.make_inputs()
        self.W_r = nn.Parameter(torch.empty(cfg.n_channel_groups, d_group, d_group))
        self.W_i = nn.Parameter(torch.empty(cfg.n_channel_groups, d_group, d_group))
        self.b_r = nn.Parameter(torch.zeros(cfg.n_channel_groups, d_group))
        self.b_i = nn.Parameter(torch.zeros(cfg.n_channel_groups, d_group))
        # initial decays from 0.9 to 0.999 with r = 1: a = exp(-8 softplus(Lambda))
        decays = torch.linspace(0.9, 0.999, cfg.d_inner)
        self.Lambda = nn.Parameter((-decays.log() / SHARPNESS).expm1().log())
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

        self.make_input_sites()
        self.hook_r, self.hook_i, self.hook_a = HookPoint(*INNER), HookPoint(*INNER), HookPoint(*INNER)
        self.hook_state = HookPoint(*INNER, on_demand=True)
        self.hook_y = HookPoint(*INNER)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def recurrence(
        self, x: Inner, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Inner, Window, State]:
        """y, and the window and the state after the last position; see `Mixer`."""
        real = context.new_real()
        u, window = self.conv(x, window, real)
        u = self.hook_conv(u.to(x.dtype))
        r, i = self.hook_r(self.gate(u, self.W_r, self.b_r)), self.hook_i(self.gate(u, self.W_i, self.b_i))
        a = self.hook_a(self.decay(r))

        decay, update = self.discretized(u, i, a, (context.positions == 0)[..., None])
        if real is not None:  # padding does not change the state
            decay = decay.masked_fill(~real[..., None], 1.0)
            update = update.masked_fill(~real[..., None], 0.0)
        states, _ = hooked_states(self.hook_state, partial(edited_scan, decay, update, state))
        return states, window, states[:, -1]

    def gate(
        self, u: Inner, W: Float[Tensor, "channel_group d_in d_out"], b: Float[Tensor, "channel_group d_out"]
    ) -> Inner:
        """A gate between 0 and 1, in at least fp32."""
        groups = torch.einsum("bpni,nio->bpno", u.unflatten(-1, (self.cfg.n_channel_groups, -1)), W)
        return (upcast(groups) + upcast(b)).sigmoid().flatten(2)

    def decay(self, r: Inner) -> Inner:
        """The decay of the state at each position."""
        return (-SHARPNESS * r * F.softplus(upcast(self.Lambda))).exp()

    def discretized(self, u: Inner, i: Inner, a: Inner, first: Tensor) -> tuple[Inner, Inner]:
        """Decay and update of the state at each position; `first` marks the first tokens of prompts."""
        # the minimum bounds the gradient of the root where a is 1
        root = torch.where(first, 1.0, 1 - a.square()).clamp(min=1e-12).sqrt()
        return torch.where(first, 0.0, a), root * i * upcast(u)

    def output(self, y: Inner, gate: Inner) -> Stream:
        """Gates the states and projects them into the stream."""
        return F.linear((y * self.act(upcast(gate))).to(gate.dtype), self.W_out.T, self.b_out)
