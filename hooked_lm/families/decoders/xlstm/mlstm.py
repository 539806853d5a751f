"""The matrix LSTM of xLSTM (Beck et al. 2024, arXiv:2405.04517; the form of xLSTM 7B, arXiv:2503.13427)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.embed import soft_capped
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.decayed_sum import CHUNK, hooked_decayed_sum, log_decays
from hooked_lm.components.ssm.mamba2 import HEADS
from hooked_lm.components.ssm.mixer import CachedMixer, Stream
from hooked_lm.hooks import HookPoint

QK = (*HEADS[:-1], "d_state")

PerHead = Float[Tensor, "batch pos ssm_head d_ssm_head"]
Keys = Float[Tensor, "batch pos ssm_head d_state"]
Gates = Float[Tensor, "batch pos ssm_head"]
State = Float[Tensor, "batch ssm_head columns d_state"]
Sums = Float[Tensor, "batch pos ssm_head columns"]


class MLSTM(CachedMixer):
    """In each head `C[pos] = f C[pos - 1] + exp(i) v k^T` and `n[pos] = f n[pos - 1] + exp(i) k`; `z = C q / max(|n q|, 1)`.

    `f = sigmoid(cap(x W_f + b_f))` and `i = cap(x W_i + b_i)`, where `cap(g) = gate_cap * tanh(g / gate_cap)`; q is divided by
    `sqrt(d_state)`. The output is `(norm(z) * sigmoid(gate)) W_out`, where the norm has a weight for each head. `W_Q` and `W_K`
    are [d_model, ssm_head * d_state], `W_V` and `W_gate` [d_model, d_inner], `W_i` and `W_f` [d_model, ssm_head], `W_out`
    [d_inner, d_model]. `b_i` and `b_f` are always there, the other biases with `bias`.

    The divisor is `max(|n q|, 1) + denominator_eps * exp(m)`, where the stabiliser m, the logarithm of the largest weight in the
    state, is `max(log f + m[pos - 1], i)`. Other implementations keep the state divided by `exp(m)`; as gates have a cap, its
    numbers stay in range without.

    Sites: `hook_q`, `hook_k`, `hook_v`; `hook_i` and `hook_f` after the cap, f before the sigmoid; `hook_gate` before its
    sigmoid; on demand `hook_state`, the state after every position: C, and n as its last row [d_ssm_head + 1, d_state], whose
    edits change later states (see `scan.hooked_states`), not the stabiliser; `hook_z` before the norm. The state and `hook_z`
    are in at least fp32.
    """

    axes = {
        "W_Q": "[d_model] d_qk",
        "W_K": "[d_model] d_qk",
        "W_V": "[d_model] d_inner",
        "W_gate": "[d_model] d_inner",
        "W_i": "[d_model] ssm_head",
        "W_f": "[d_model] ssm_head",
    }

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        d_state: int
        gate_cap: float = 15.0
        bias: bool = False
        eps: float = 1e-6  # of the norm
        denominator_eps: float = 1e-6

        @property
        def act_fn(self) -> str:
            """That of the gate of the output."""
            return "sigmoid"

        @property
        def d_inner(self) -> int:
            return self.n_heads * self.d_head

        @property
        def widths(self) -> dict[str, int]:
            """The width of each projection."""
            wide = dict.fromkeys(("Q", "K"), self.n_heads * self.d_state) | {"V": self.d_inner, "gate": self.d_inner}
            return wide | {"i": self.n_heads, "f": self.n_heads}

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return self.d_model * (sum(self.widths.values()) + self.d_inner)

        def build(self) -> "MLSTM":
            return MLSTM(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if not 0 < cfg.gate_cap <= 60:
            raise ValueError(f"gate_cap={cfg.gate_cap}: exponentials of gates need a cap of at most 60")
        for name, width in cfg.widths.items():
            self.register_parameter(f"W_{name}", nn.Parameter(torch.empty(width, cfg.d_model).T))
            has_bias = cfg.bias or name in ("i", "f")
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(width)) if has_bias else None)
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QK), HookPoint(*QK), HookPoint(*HEADS)
        self.hook_i, self.hook_f = HookPoint(*HEADS[:3]), HookPoint(*HEADS[:3])
        self.hook_state = HookPoint(*HEADS[:3], "columns", "d_state", on_demand=True)
        self.hook_z, self.hook_gate = HookPoint(*HEADS), HookPoint(*HEADS)
        self.norm = LayerNorm.Config(cfg.d_head, cfg.eps, bias=cfg.bias, n_heads=cfg.n_heads).build(HEADS)
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Stream, Window, State]:
        """The window is the stabiliser of each head after the last position."""
        real = context.new_real()
        q, k, v = (point(self.projected(stream, name)) for name, point in self.sites("QKV"))
        i, f = self.hook_i(self.capped(stream, "i")), self.hook_f(self.capped(stream, "f"))
        log_i, log_f = upcast(i), F.logsigmoid(upcast(f))
        if real is not None:  # padding does not change the state
            log_f = log_f.masked_fill(~real[..., None], 0.0)
            log_i = log_i.masked_fill(~real[..., None], float("-inf"))
        sums, state = self.recurrence(q, k, v, log_i, log_f, state)
        m = self.stabilisers(log_i, log_f, window)
        z, gate = self.hook_z(self.divided(sums, m)), self.hook_gate(self.projected(stream, "gate"))
        return self.output(z, gate), m[:, -1:], state

    def sites(self, names: str) -> list[tuple[str, HookPoint]]:
        """The sites of these projections."""
        return [(name, getattr(self, f"hook_{name.lower()}")) for name in names]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The projection by `W_name`."""
        return F.linear(x, getattr(self, f"W_{name}").T, getattr(self, f"b_{name}"))

    def projected(self, stream: Stream, name: str) -> PerHead | Keys:
        """The same, for each head."""
        return self.linear(stream, name).unflatten(-1, (self.cfg.n_heads, -1))

    def capped(self, stream: Stream, name: str) -> Gates:
        """The logarithm of the input gate, or the forget gate before its sigmoid."""
        return soft_capped(self.linear(stream, name), self.cfg.gate_cap)

    def output(self, z: PerHead, gate: PerHead) -> Stream:
        """Normalises and gates what was read from the state, and projects it into the stream."""
        return self.written(self.norm(z), gate)

    def written(self, normed: PerHead, gate: PerHead) -> Stream:
        """The output for normalised values."""
        return self.linear((upcast(normed) * upcast(gate).sigmoid()).flatten(2).to(gate.dtype), "out")

    # ---- the recurrence ----------------------------------------------------------------------------------------------

    def recurrence(
        self, q: Keys, k: Keys, v: PerHead, log_i: Gates, log_f: Gates, state: State | None
    ) -> tuple[Sums, State]:
        """`C q` and `n q` at every position, and the last state."""
        q, k, columns = upcast(q) * self.cfg.d_state**-0.5, upcast(k), F.pad(upcast(v), (0, 1), value=1.0)
        return hooked_decayed_sum(self.hook_state, q, k, columns * log_i.exp()[..., None], log_f, state)

    def stabilisers(self, log_i: Gates, log_f: Gates, window: Window | None = None) -> Gates:
        """m at every position, after that of earlier tokens, which is 0 before the first."""
        n_pos, length = log_f.shape[1], min(CHUNK, log_f.shape[1])
        rates, entering = (_in_chunks(x, length) for x in (log_f, log_i))
        last = torch.zeros_like(rates[:, 0, :, 0]) if window is None else window[:, -1]
        found = []
        highest = (log_decays(rates) + entering[..., None, :]).amax(-1)  # of the chunk's own inputs
        for own, decayed in zip(highest.unbind(1), rates.cumsum(-1).unbind(1), strict=True):
            found.append(torch.maximum(own, last[..., None] + decayed))
            last = found[-1][..., -1]
        return rearrange(found, "chunk batch head pos -> batch (chunk pos) head")[:, :n_pos]

    def divided(self, sums: Sums, m: Gates) -> PerHead:
        """z, from `C q`, `n q` and the stabiliser."""
        divisor = sums[..., -1].abs().clamp(min=1.0) + self.cfg.denominator_eps * m.exp()
        return sums[..., :-1] / divisor[..., None]


def _in_chunks(x: Gates, length: int) -> Float[Tensor, "batch chunk ssm_head in_chunk"]:
    """In chunks of a length, with zeros at the end."""
    return rearrange(
        F.pad(x, (0, 0, 0, -x.shape[1] % length)), "batch (chunk pos) head -> batch chunk head pos", pos=length
    )
