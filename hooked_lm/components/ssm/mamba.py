"""The selective state space of Mamba (Gu and Dao 2023, arXiv:2312.00752): each channel has a
small state, whose decay depends on the input."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, norm_of, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.mixer import INNER, Inner, Mixer, Stream
from hooked_lm.components.ssm.scan import edited_scan, hooked_states
from hooked_lm.hooks import HookPoint, is_listening

STATE = ("batch", "pos", "d_state")
SEGMENT = 256  # positions whose states are in memory at once, unless something listens to hook_state

State = Float[Tensor, "batch d_inner d_state"]


class AbstractMamba(Mixer):
    """The recurrence of `Mamba`; subclasses have the weights that make the step size, B and C."""

    axes = {
        "W_dt_down": "[d_inner] dt_rank",
        "W_dt_up": "[dt_rank] d_inner",
        "W_B": "[d_inner] d_state",
        "W_C": "[d_inner] d_state",
    }

    state_dims: tuple[str, ...] = STATE
    W_dt_down: Tensor
    W_dt_up: Tensor
    W_B: Tensor
    W_C: Tensor

    def __init__(self, cfg: "Mamba.Config") -> None:
        super().__init__(cfg)
        self.make_inputs()
        self.make_selection()
        self.dt_bias = nn.Parameter(initial_dt_bias(cfg.d_inner))
        self.A_log = nn.Parameter(torch.arange(1.0, cfg.d_state + 1).log().repeat(cfg.d_inner, 1))
        self.D = nn.Parameter(torch.ones(cfg.d_inner))
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

        self.make_input_sites()
        add_norm(self, "dt_norm", cfg.dt_norm, ("batch", "pos", "dt_rank"))
        self.hook_dt = HookPoint(*INNER)
        add_norm(self, "B_norm", cfg.state_norm, self.state_dims)
        self.hook_B = HookPoint(*self.state_dims)
        add_norm(self, "C_norm", cfg.state_norm, self.state_dims)
        self.hook_C = HookPoint(*self.state_dims)
        self.hook_state = HookPoint(*INNER, "d_state", on_demand=True)
        self.hook_y = HookPoint(*INNER)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    @abstractmethod
    def make_selection(self) -> None:
        """Adds the weights that make the step size, B and C."""

    def recurrence(
        self, x: Inner, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Inner, Window, State]:
        """y, and the window and the state after the last position; see `Mixer`."""
        real = context.new_real()
        convolved, window = self.conv(x, window, real)
        u = self.hook_conv(self.act(convolved).to(x.dtype))
        dt = self.hook_dt(self.step_size(norm_of(self, "dt_norm")(self.selected(u, self.W_dt_down))))
        B = self.hook_B(norm_of(self, "B_norm")(self.selected(u, self.W_B)))
        C = self.hook_C(norm_of(self, "C_norm")(self.selected(u, self.W_C)))

        masked_dt = dt if real is None else dt.masked_fill(~real[..., None], 0.0)  # padding does not change the state
        y, state = self.scan(upcast(u), masked_dt, upcast(B), upcast(C), state)
        return y, window, state

    @abstractmethod
    def product(self, x: Float[Tensor, "batch pos *head d_in"], W: Tensor) -> Float[Tensor, "batch pos *head width"]:
        """The product of channels, which may be split by heads, with one of the weights of `make_selection`."""

    def heads(self, x: Float[Tensor, "batch pos d_inner *d_state"]) -> Float[Tensor, "batch pos *inner"]:
        """A value of each channel, split by the heads that have a step size, B and C of their own."""
        return x

    def selected(self, u: Inner, W: Tensor) -> Float[Tensor, "batch pos *head width"]:
        """The product with `W_dt_down`, `W_B` or `W_C`."""
        return self.product(self.heads(u), W)

    def read(
        self, states: Float[Tensor, "batch pos d_inner d_state"], C: Float[Tensor, "batch pos *head d_state"]
    ) -> Inner:
        """`C h` at every position."""
        return (self.heads(states) @ C[..., None]).flatten(2)

    def step_size(self, low: Float[Tensor, "batch pos *head dt_rank"]) -> Inner:
        """The step size at each position, in at least fp32, from the input of `W_dt_up`."""
        return F.softplus(upcast(self.product(low, self.W_dt_up).flatten(2)) + upcast(self.dt_bias))

    def scan(
        self,
        u: Inner,
        dt: Inner,
        B: Float[Tensor, "batch pos *head d_state"],
        C: Float[Tensor, "batch pos *head d_state"],
        state: State | None,
    ) -> tuple[Inner, State]:
        """`C h` at every position, and the last state; in segments, so that few states are in memory at a time."""
        length = u.shape[1] if is_listening(self.hook_state) else SEGMENT
        outputs = []
        for start in range(0, u.shape[1], length):
            segment = slice(start, start + length)
            decay, update = self.discretized(u[:, segment], dt[:, segment], B[:, segment])
            states, _ = hooked_states(self.hook_state, partial(edited_scan, decay, update, state))
            outputs.append(self.read(states, C[:, segment]))
            state = states[:, -1]
        assert state is not None  # there is at least one position
        return torch.cat(outputs, 1) + upcast(self.D) * u, state

    def discretized(
        self, u: Inner, dt: Inner, B: Float[Tensor, "batch pos *head d_state"]
    ) -> tuple[Float[Tensor, "batch pos d_inner d_state"], Float[Tensor, "batch pos d_inner d_state"]]:
        """Decay and update of the state at each position."""
        A = -upcast(self.A_log).exp()
        return (dt[..., None] * A).exp(), (self.heads(dt * u)[..., None] * B[..., None, :]).flatten(2, -2)

    def output(self, y: Inner, gate: Inner) -> Stream:
        """Gates the outputs of the state space and projects them into the stream."""
        return F.linear((y * F.silu(upcast(gate))).to(gate.dtype), self.W_out.T, self.b_out)


class Mamba(AbstractMamba):
    """`h[pos] = exp(dt A) h[pos - 1] + dt B u` and `y = C h + D u`, gated: `(y * silu(gate)) W_out`.

    `u = act(conv(x W_x))` is the input of the state space, `dt`, `B` and `C` are functions of it, and `A = -exp(A_log)`.
    `W_x` and `W_gate` are [d_model, d_inner], `W_dt_down` [d_inner, dt_rank], `W_dt_up` [dt_rank, d_inner], `W_B` and
    `W_C` [d_inner, d_state], `W_out` [d_inner, d_model]; `A_log` is [d_inner, d_state], `D` and `dt_bias` [d_inner].

    `u W_dt_down`, `B` and `C` may be normalised (`dt_norm`, `B_norm`, `C_norm`), as in Jamba (Lieber et al. 2024,
    arXiv:2403.19887).

    Sites: `hook_x` before the convolution, `hook_conv` (u) after it and its activation, `hook_gate` before its silu,
    `hook_dt` after the softplus, `hook_B` and `hook_C` after their norms; on demand `hook_state`, the state after every
    position, whose edits change later states (see `scan.hooked_states`); `hook_y` before the gate. `hook_dt`,
    `hook_state` and `hook_y` are in at least fp32, as the recurrence is.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_inner: int
        d_state: int
        dt_rank: int
        conv_width: int = 4
        act_fn: str = "silu"  # after the convolution
        bias: bool = False
        conv_bias: bool = True
        dt_norm: NormConfig | None = None  # of width dt_rank
        state_norm: NormConfig | None = None  # of B and of C, each with its own weight, of width d_state

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_inner * (3 * self.d_model + 2 * self.dt_rank + 2 * self.d_state)

        def build(self) -> "AbstractMamba":
            return Mamba(self)

    def make_selection(self) -> None:
        cfg = self.cfg
        self.W_dt_down = nn.Parameter(torch.empty(cfg.dt_rank, cfg.d_inner).T)
        self.W_dt_up = nn.Parameter(torch.empty(cfg.d_inner, cfg.dt_rank).T)
        self.W_B = nn.Parameter(torch.empty(cfg.d_state, cfg.d_inner).T)
        self.W_C = nn.Parameter(torch.empty(cfg.d_state, cfg.d_inner).T)

    def product(self, x: Inner, W: Tensor) -> Float[Tensor, "batch pos width"]:
        return F.linear(x, W.T)


def initial_dt_bias(n: int) -> Float[Tensor, " n"]:
    """Initial biases: step sizes from 0.001 to 0.1, log-spaced, before the softplus."""
    return torch.linspace(-3.0, -1.0, n).mul(math.log(10.0)).exp().expm1().log()
