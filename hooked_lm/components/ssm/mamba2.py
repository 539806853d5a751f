"""The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): with one decay per head the recurrence is also
a masked product of `C` and `B`, a form of attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm, add_norm, norm_of, upcast
from hooked_lm.components.ssm.convolution import CausalConvolution, Window
from hooked_lm.components.ssm.decayed_sum import PerGroup, PerHead, Rates, State, hooked_decayed_sum
from hooked_lm.components.ssm.mamba import initial_dt_bias
from hooked_lm.components.ssm.mixer import Inner, Mixer, Stream
from hooked_lm.hooks import HookPoint

HEADS = ("batch", "pos", "ssm_head", "d_ssm_head")
GROUPS = ("batch", "pos", "group", "d_state")
PerGroupInner = Float[Tensor, "batch pos group d_group"]


class Mamba2(Mixer):
    """In each head `h[pos] = exp(dt A) h[pos - 1] + dt u B^T` and `y = h C + D u`; `norm(y * silu(gate)) W_out`.

    `u`, `B` and `C` are `act(conv(x [W_x W_B W_C]))`, `dt = softplus(x W_dt + dt_bias)` within `dt_limit`, and
    `A = -exp(A_log)`. The heads of a group share `B` and `C`; each group is normalised separately. `W_x` and `W_gate` are
    [d_model, d_inner], `W_B` and `W_C` [d_model, group * d_state], `W_dt` [d_model, ssm_head], `W_out`
    [d_inner, d_model]; `A_log`, `D` and `dt_bias` are [ssm_head]. The results of the projections may be `scaled`. The norm may be
    absent, or precede the gate: `norm(y) * silu(gate)`.

    Sites: `hook_x` before the convolution, `hook_conv` (u) after it and its activation, as are `hook_B` and `hook_C`;
    `hook_gate` before its silu, `hook_dt` after the softplus; on demand `hook_state`, the state after every position,
    whose edits change later states (see `scan.hooked_states`); `hook_y` before the gate. `hook_dt`, `hook_state` and
    `hook_y` are in at least fp32, as the recurrence is.
    """

    axes = {"W_B": "[d_model] d_shared", "W_C": "[d_model] d_shared", "W_dt": "[d_model] ssm_head"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        d_state: int
        n_groups: int = 1
        conv_width: int = 4
        act_fn: str = "silu"  # after the convolution
        bias: bool = False
        out_bias: bool | None = None  # None: as `bias`
        conv_bias: bool = True
        dt_limit: tuple[float, float] = (0.0, float("inf"))
        eps: float = 1e-5  # of the norm
        norm: bool = True
        norm_before_gate: bool = False
        scaled: tuple[float, float, float, float, float] = (1.0,) * 5  # gate, x, B, C and dt, with their biases

        @property
        def d_inner(self) -> int:
            return self.n_heads * self.d_head

        @property
        def d_shared(self) -> int:
            """The width of B and of C, over all groups."""
            return self.n_groups * self.d_state

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_model * (3 * self.d_inner + 2 * self.d_shared + self.n_heads)

        def build(self) -> "Mamba2":
            return Mamba2(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.n_heads % cfg.n_groups:
            raise ValueError(f"n_heads={cfg.n_heads} must be a multiple of n_groups={cfg.n_groups}")
        self.W_gate, self.b_gate = self._projection(cfg.d_inner)
        self.W_x, self.b_x = self._projection(cfg.d_inner)
        self.W_B, self.b_B = self._projection(cfg.d_shared)
        self.W_C, self.b_C = self._projection(cfg.d_shared)
        self.W_dt, self.b_dt = self._projection(cfg.n_heads)
        self.conv = CausalConvolution.Config(cfg.d_inner + 2 * cfg.d_shared, cfg.conv_width, cfg.conv_bias).build()
        self.dt_bias = nn.Parameter(initial_dt_bias(cfg.n_heads))
        self.A_log = nn.Parameter(torch.arange(1.0, cfg.n_heads + 1).log())
        self.D = nn.Parameter(torch.ones(cfg.n_heads))

        self.make_input_sites()
        self.hook_B, self.hook_C = HookPoint(*GROUPS), HookPoint(*GROUPS)
        self.hook_dt = HookPoint("batch", "pos", "ssm_head")
        self.hook_state = HookPoint(*HEADS, "d_state", on_demand=True)
        self.hook_y = HookPoint(*HEADS)
        norm = RMSNorm.Config(cfg.d_inner // cfg.n_groups, cfg.eps, n_heads=cfg.n_groups) if cfg.norm else None
        add_norm(self, "norm", norm, ("batch", "pos", "group", "d_group"))
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        out_bias = cfg.bias if cfg.out_bias is None else cfg.out_bias
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if out_bias else None
        self.scales = dict(zip(("gate", "x", "B", "C", "dt"), cfg.scaled, strict=True))
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def _projection(self, size: int) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A weight [d_model, size] and its bias."""
        weight = nn.Parameter(torch.empty(size, self.cfg.d_model).T)
        return weight, nn.Parameter(torch.zeros(size)) if self.cfg.bias else None

    def scaled(self, projected: Float[Tensor, "batch pos width"], name: str) -> Float[Tensor, "batch pos width"]:
        return projected if self.scales[name] == 1.0 else projected * self.scales[name]

    def recurrence(
        self, x: Inner, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[PerHead, Window, State]:
        """y, and the window and the state after the last position; see `Mixer`."""
        real = context.new_real()
        u, B, C, window = self.convolved(x, stream, window, real)
        u, B, C = self.hook_conv(u), self.hook_B(B), self.hook_C(C)
        dt = self.hook_dt(self.step_size(stream))

        masked_dt = dt if real is None else dt.masked_fill(~real[..., None], 0.0)  # padding does not change the state
        heads = upcast(u).unflatten(-1, (self.cfg.n_heads, -1))
        inputs = self.inputs(heads, masked_dt, upcast(B))
        y, state = hooked_decayed_sum(self.hook_state, upcast(C), *inputs, state)
        return y + upcast(self.D)[:, None] * heads, window, state

    def convolved(
        self, x: Inner, stream: Stream, window: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Inner, PerGroup, PerGroup, Tensor]:
        """u, B and C, all after the convolution and its activation, and the new window."""
        B, C = self.projected(stream, "B"), self.projected(stream, "C")
        sizes, groups = [x.shape[-1], B.shape[-1], C.shape[-1]], (self.cfg.n_groups, -1)
        together, window = self.conv(torch.cat([x, B, C], -1), window, real)
        x, B, C = self.act(together).to(x.dtype).split(sizes, -1)
        return x, B.unflatten(-1, groups), C.unflatten(-1, groups), window

    def step_size(self, stream: Stream) -> Rates:
        """The step size at each position, in at least fp32."""
        return F.softplus(upcast(self.projected(stream, "dt")) + upcast(self.dt_bias)).clamp(*self.cfg.dt_limit)

    def rates(self, dt: Float[Tensor, "*batch ssm_head"]) -> Float[Tensor, "*batch ssm_head"]:
        """The logarithm of the decay at each position."""
        return -dt * upcast(self.A_log).exp()

    def inputs(self, u: PerHead, dt: Rates, B: PerGroup) -> tuple[PerGroup, PerHead, Rates]:
        """The keys, values and rates of the recurrence."""
        return B, u * dt[..., None], self.rates(dt)

    def output(self, y: PerHead, gate: Inner) -> Stream:
        """Gates and normalises the outputs of the state space and projects them into the stream."""
        return self.to_stream(norm_of(self, "norm")(self.norm_input(y, gate)), gate)

    def norm_input(self, y: PerHead, gate: Inner) -> PerGroupInner:
        """The input of the norm: y, after the gate unless that comes after the norm."""
        y = y.flatten(2) if self.cfg.norm_before_gate else y.flatten(2) * F.silu(upcast(gate))
        return y.unflatten(-1, (self.cfg.n_groups, -1))

    def to_stream(self, normed: PerGroupInner, gate: Inner) -> Stream:
        """The output for the output of the norm."""
        normed = normed.flatten(2)
        normed = normed * F.silu(upcast(gate)) if self.cfg.norm_before_gate else normed
        return F.linear(normed.to(gate.dtype), self.W_out.T, self.b_out)
