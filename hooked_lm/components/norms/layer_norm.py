"""Layer normalisation (Ba et al. 2016, arXiv:1607.06450)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import RESIDUAL, Norm, root_mean_square, upcast
from hooked_lm.hooks import HookPoint, is_listening


class LayerNorm(Norm):
    """`(x - mean) / scale * (offset + w) + b`, where scale is the root of the variance plus eps; the offset is mostly 0.

    A norm whose weights were folded into the next layer ("LNPre") has neither `w` nor `b`. With `n_heads` they are
    [head, d_model]: each head has its own.
    """

    kind = "LN"

    @dataclass(frozen=True)
    class Config(Norm.Config):
        bias: bool = True
        offset: float = 0.0
        n_heads: int | None = None

        @property
        def shape(self) -> tuple[int, ...]:
            """The shape of the weights."""
            return (self.d_model,) if self.n_heads is None else (self.n_heads, self.d_model)

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "LayerNorm":
            return LayerNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.weight:
            self.w = nn.Parameter(torch.full(cfg.shape, 1.0 - cfg.offset))
        if cfg.bias:
            self.b = nn.Parameter(torch.zeros(cfg.shape))
        self.hook_scale = HookPoint(*dims[:-1], "1")
        self.hook_normalized = HookPoint(*dims)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if self.settings.fused and not is_listening(self.hook_scale, self.hook_normalized):
            return self.unhooked(x)
        centred = self.centred(upcast(x))
        scale = self.hook_scale(root_mean_square(centred, self.cfg.eps))
        return self.apply_weights(self.hook_normalized((centred / scale).to(x.dtype)))

    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same output by one fused kernel, without the hook points."""
        cfg = self.cfg
        if cfg.n_heads is not None or (cfg.weight and self.w.dtype != x.dtype):  # the fused kernel needs one dtype
            return self.apply_weights(F.layer_norm(x, (cfg.d_model,), eps=cfg.eps))
        gain = None if not cfg.weight else self.w if cfg.offset == 0.0 else self.w + cfg.offset
        return F.layer_norm(x, (cfg.d_model,), gain, self.shift(), cfg.eps)

    def centred(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The vectors minus their mean."""
        return x - x.mean(-1, keepdim=True)

    def gain(self) -> Float[Tensor, "*heads d_model"] | None:
        """The factors of the normalised value; None for a folded norm."""
        if not self.cfg.weight:
            return None
        return self.w if self.cfg.offset == 0.0 else upcast(self.w) + self.cfg.offset

    def shift(self) -> Float[Tensor, "*heads d_model"] | None:
        """The bias; None for a folded norm."""
        return self.b if self.cfg.bias else None

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output for a normalised value."""
        gain, shift = self.gain(), self.shift()
        if gain is not None and shift is not None and gain.dtype == normalized.dtype:
            return torch.addcmul(shift, normalized, gain)
        if gain is not None:
            normalized = (normalized * gain).to(normalized.dtype)
        return normalized if shift is None else normalized + shift


class HeadLayerNorm(LayerNorm):
    """Layer normalisation of heads with separate parameters `heads.0`, `heads.1`, ..., each [d_model], and without biases."""

    @dataclass(frozen=True)
    class Config(LayerNorm.Config):
        bias: bool = False
        n_heads: int = 1

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "HeadLayerNorm":
            return HeadLayerNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__(replace(cfg, weight=False), dims)
        self.cfg = cfg
        self.heads = nn.ParameterList(torch.ones(cfg.d_model) for _ in range(cfg.n_heads))

    @property
    def w(self) -> Float[Tensor, "heads d_model"]:  # type: ignore[override]
        """The weights of all heads."""
        return torch.stack(list(self.heads))


class JointLayerNorm(LayerNorm):
    """Layer normalisation over all heads together, [head, d_head], without biases."""

    @dataclass(frozen=True)
    class Config(LayerNorm.Config):
        bias: bool = False
        joint: ClassVar[bool] = True

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "JointLayerNorm":
            return JointLayerNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__(cfg, dims)
        self.hook_scale = HookPoint(*dims[:-2], "1", "1")

    def forward(self, x: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
        centred = self.centred(upcast(x))
        scale = self.hook_scale(root_mean_square(centred.flatten(-2), self.cfg.eps)[..., None])
        return self.apply_weights(self.hook_normalized((centred / scale).to(x.dtype)))

    def centred(self, x: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
        """The heads minus the mean of all."""
        return x - x.mean((-2, -1), keepdim=True)

    def unhooked(self, x: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
        """The same output by one fused kernel, without the hook points."""
        return self.apply_weights(F.layer_norm(x, x.shape[-2:], eps=self.cfg.eps))
