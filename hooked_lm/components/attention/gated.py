"""Gated attention (Qiu et al. 2025, arXiv:2505.06708): a gate, computed from the query's input, scales the mixed values."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.activations import activation
from hooked_lm.components.attention.latent import Latent, LatentAttention
from hooked_lm.components.attention.multihead import QUERY, Attention, SelfAttention, project
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint

Gate = Float[Tensor, "batch pos head width"]


class OutputGate(SelfAttention):
    """Attention with `z = (pattern v) * act(x W_gate)`, where x is the input of the queries.

    `W_gate` is [head, d_model, d_value], or [head, d_model, 1] for one number per head. `hook_gate` is before the activation,
    `hook_z` after the gate: what `W_O` reads.
    """

    axes = {"W_gate": "head [d_model] d_gate"}

    @dataclass(frozen=True)
    class Options:
        gate_act_fn: str = "sigmoid"
        gate_per_head: bool = False
        gate_bias: bool = False

    cfg: "GatedConfig"
    mixes_linearly = False
    axis = QUERY[-1]  # of the mixed values

    def make_parts(self, d_value: int) -> None:
        cfg, width = self.cfg, 1 if self.cfg.gate_per_head else d_value
        self.gate_act = activation(cfg.gate_act_fn)
        self.W_gate = projection(cfg.n_heads, cfg.d_model, width)
        self.b_gate = nn.Parameter(torch.zeros(cfg.n_heads, width)) if cfg.gate_bias else None
        self.hook_gate = HookPoint(*QUERY[:-1], "1" if cfg.gate_per_head else self.axis)
        super().make_parts(d_value)

    def gate(self, query_input: Float[Tensor, "batch pos *head d_model"]) -> Gate:
        """What the mixed values are multiplied by."""
        return self.opened(self.hook_gate(project(query_input, self.W_gate, self.b_gate)))

    def opened(self, gate: Gate) -> Gate:
        """The gate after its activation, which is computed in at least fp32."""
        return self.gate_act(upcast(gate)).to(gate.dtype)


class GatedAttention(OutputGate, Attention):
    """Attention over heads with a gate."""

    @dataclass(frozen=True)
    class Config(OutputGate.Options, Attention.Config):
        def build(self) -> "GatedAttention":
            return GatedAttention(self)

    cfg: Config


class GatedLatentAttention(OutputGate, LatentAttention):
    """Latent attention with a gate."""

    axis = "d_value"

    @dataclass(frozen=True)
    class Config(OutputGate.Options, LatentAttention.Config):
        def build(self) -> "GatedLatentAttention":
            return GatedLatentAttention(self)

    cfg: Config


class GatedSparseLatentAttention(OutputGate, SparseLatentAttention):
    """Latent attention to chosen keys with a gate."""

    axis = "d_value"

    @dataclass(frozen=True)
    class Config(OutputGate.Options, SparseLatentAttention.Config):
        sinks: bool = False

        def build(self) -> "GatedSparseLatentAttention":
            return GatedSparseLatentAttention(self)

    cfg: Config


class GatedSharedIndexAttention(OutputGate, SharedIndexAttention):
    """Latent attention to the keys that an earlier layer chose, with a gate."""

    axis = "d_value"

    @dataclass(frozen=True)
    class Config(OutputGate.Options, SharedIndexAttention.Config):
        sinks: bool = False

        def build(self) -> "GatedSharedIndexAttention":
            return GatedSharedIndexAttention(self)

    cfg: Config


class QueryGatedSparseLatentAttention(GatedSparseLatentAttention):
    """Gated latent attention whose queries and gates are projections of `[norm(c), c]` with the latent c of queries (A.X K2).

    `W_UQ` and `W_gate` are [head, 2 d_q_latent, ...]; the indexer reads `norm(c)`.
    """

    axes = {"W_UQ": "head [d_q_latents] d_head", "W_gate": "head [d_q_latents] d_value"}

    @dataclass(frozen=True)
    class Config(GatedSparseLatentAttention.Config):
        def build(self) -> "QueryGatedSparseLatentAttention":
            return QueryGatedSparseLatentAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        assert cfg.d_q_latent is not None, "gates are projections of a latent"
        self.W_UQ = projection(cfg.n_heads, 2 * cfg.d_q_latent, cfg.d_head)
        self.W_gate = projection(cfg.n_heads, 2 * cfg.d_q_latent, cfg.d_value)

    def read_by_queries(self, normed: Latent, raw: Latent) -> Float[Tensor, "batch pos *head d_q_latents"]:
        """The latent of queries after its norm, and before it."""
        return torch.cat([normed, raw], -1)

    def gate_input(self, query_input: Float[Tensor, "batch pos *head d_model"], q_latent: Latent) -> Latent:
        """What the gate is a projection of."""
        return q_latent


GatedConfig = (
    GatedAttention.Config
    | GatedLatentAttention.Config
    | GatedSparseLatentAttention.Config
    | GatedSharedIndexAttention.Config
)
