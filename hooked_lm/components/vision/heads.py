"""The vector of a whole image that a vision tower computes, and its projection into the space that texts share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.heads import Real, Stream
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.components.stack_context import EncodedSource, StackContext
from hooked_lm.hooks import HookPoint

Pooled = Float[Tensor, "batch d_model"]


class ClassToken(nn.Module):
    """The vector at the first position, that of the class token."""

    @dataclass(frozen=True)
    class Config:
        d_model: int

        def build(self) -> "ClassToken":
            return ClassToken(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, real: Real | None = None) -> Pooled:
        return self.hook_pooler_out(resid[:, 0])


class ProbePooler(nn.Module):
    """`x + mlp(ln(x))`, where x is what a learned query `W_probe` [d_model] attends to (Zhai et al. 2022, arXiv:2106.04560).

    `attn` reads all positions for this one query: `attn.hook_q` is [batch, 1, head, d_head].
    """

    axes = {"W_probe": "d_model"}

    @dataclass(frozen=True)
    class Config:
        attn: CrossAttention.Config
        ln: LayerNorm.Config
        mlp: MLP.Config

        def build(self) -> "ProbePooler":
            return ProbePooler(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_probe = nn.Parameter(torch.empty(cfg.attn.d_model))
        self.attn = cfg.attn.build()
        self.hook_attn_out = HookPoint(*RESIDUAL)
        self.ln = cfg.ln.build()
        self.mlp = cfg.mlp.build()
        self.hook_mlp_out = HookPoint(*RESIDUAL)
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, real: Real | None = None) -> Pooled:
        context = StackContext(len(resid), 1, resid.device, source=EncodedSource(resid, real))
        attended = self.hook_attn_out(self.attn(self.W_probe.expand(len(resid), 1, -1), context))
        return self.hook_pooler_out((attended + self.hook_mlp_out(self.mlp(self.ln(attended))))[:, 0])


class ClassAndMean(nn.Module):
    """The vector of the class token, and beside it the mean of the patches, which follow `n_before` positions."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_before: int = 1

        def build(self) -> "ClassAndMean":
            return ClassAndMean(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_out")

    def forward(self, resid: Stream, real: Real | None = None) -> Float[Tensor, "batch d_out"]:
        return self.hook_pooler_out(torch.cat([resid[:, 0], self.mean(resid, real)], -1))

    def mean(self, resid: Stream, real: Real | None = None) -> Pooled:
        """The mean of the patches that are not padding."""
        patches = resid[:, self.cfg.n_before :]
        if real is None:
            return patches.mean(1)
        counted = real[:, self.cfg.n_before :, None]
        return patches.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


class Projection(nn.Module):
    """`x W + b` with `W` [d_model, d_out], in which images and texts are compared (Radford et al. 2021, arXiv:2103.00020)."""

    axes = {"W": "[d_model] d_out"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_out: int
        bias: bool = False

        def build(self) -> "Projection":
            return Projection(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.d_out))
        self.b = nn.Parameter(torch.zeros(cfg.d_out)) if cfg.bias else None
        self.hook_out = HookPoint("batch", "d_out")

    def forward(self, pooled: Pooled) -> Float[Tensor, "batch d_out"]:
        return self.hook_out(F.linear(pooled, self.W.T, self.b))
