"""Lightning attention (Qin et al. 2024, arXiv:2401.04658): linear attention with a fixed decay in each head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.constants import constant, numbers
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.decayed_sum import PerHead, Rates, State, hooked_decayed_sum
from hooked_lm.components.ssm.mamba2 import HEADS
from hooked_lm.components.ssm.mixer import INNER, CachedMixer, Stream
from hooked_lm.hooks import HookPoint

QUERIES = (*HEADS[:3], "d_state")
PARTS = ("Q", "K", "V", "gate")


class LightningAttention(CachedMixer):
    """In each head `S[pos] = exp(-slope) S[pos - 1] + v k^T` and `z = S[pos] q`; `(norm(z) * sigmoid(x W_gate)) W_out`.

    q, k and v are `act(x W_Q)` and so on, k and q of width `d_state = d_head`. The norm is over all heads. Each weight is
    [d_model, d_inner], `W_out` [d_inner, d_model]; `slopes` has the slope of each head.

    Sites: `hook_q`, `hook_k` and `hook_v` after their activation, `hook_gate` before its sigmoid; on demand `hook_state`, the
    state after every position [d_ssm_head, d_state], whose edits change later states (see `scan.hooked_states`); `hook_z`
    before the norm. `hook_state` and `hook_z` are in at least fp32, as the recurrence is.
    """

    axes = dict.fromkeys(("W_Q", "W_K", "W_V", "W_gate"), "[d_model] d_inner")

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        slopes: tuple[float, ...]
        act_fn: str = "silu"
        eps: float = 1e-6

        @property
        def d_inner(self) -> int:
            return self.n_heads * self.d_head

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return 5 * self.d_model * self.d_inner

        def build(self) -> "LightningAttention":
            return LightningAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if len(cfg.slopes) != cfg.n_heads:
            raise ValueError(f"n_heads={cfg.n_heads} heads must have as many slopes, got {len(cfg.slopes)}")
        self.W_Q, self.W_K, self.W_V, self.W_gate = (
            nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T) for _ in PARTS
        )
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERIES), HookPoint(*QUERIES), HookPoint(*HEADS)
        self.hook_state = HookPoint(*HEADS, "d_state", on_demand=True)
        self.hook_z, self.hook_gate = HookPoint(*HEADS), HookPoint(*INNER)
        self.norm = RMSNorm.Config(cfg.d_inner, cfg.eps).build(INNER)
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out: nn.Parameter | None = None  # as in other mixers
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Stream, Window, State]:
        """The output and the state; there is no convolution, so the window is empty."""
        q, k = self.hook_q(self.projected(stream, "Q")), self.hook_k(self.projected(stream, "K"))
        v, real = self.hook_v(self.projected(stream, "V")), context.new_real()
        z, state = hooked_decayed_sum(self.hook_state, upcast(q), *self.inputs(k, v, real), state)
        z, gate = self.hook_z(z), self.hook_gate(F.linear(stream, self.W_gate.T))
        return self.written(self.norm(z.flatten(2)), gate), stream[:, :0], state

    def projected(self, stream: Stream, name: str) -> PerHead:
        """Queries, keys or values, after their activation."""
        return self.act(F.linear(stream, getattr(self, f"W_{name}").T)).unflatten(-1, (self.cfg.n_heads, -1))

    def inputs(
        self, k: PerHead, v: PerHead, real: Bool[Tensor, "batch pos"] | None = None
    ) -> tuple[PerHead, PerHead, Rates]:
        """The keys, values and rates of the recurrence; padding does not change the state."""
        k, v = upcast(k), upcast(v)
        rates = -constant(v, numbers, self.cfg.slopes, v.dtype).expand(v.shape[:3])
        if real is not None:
            rates, v = rates.masked_fill(~real[..., None], 0.0), v.masked_fill(~real[..., None, None], 0.0)
        return k, v, rates

    def written(self, normed: Float[Tensor, "batch pos d_inner"], gate: Float[Tensor, "batch pos d_inner"]) -> Stream:
        """The output for normalised values."""
        return F.linear((normed * upcast(gate).sigmoid()).to(gate.dtype), self.W_out.T)
