"""Layer normalisation (Ba et al. 2016, arXiv:1607.06450) and RMS normalisation (Zhang and Sennrich 2019,
arXiv:1910.07467), with the divisor and the normalised value in sight.

Nobody listens: one fused kernel. Somebody does: the same sum in steps. Both compute in at least fp32 and return the input's
dtype.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.manner import Manner
from hooked_lm.hooks import HookPoint, is_listening

RESIDUAL = ("batch", "pos", "d_model")


def wide(x: Tensor) -> Tensor:
    """In fp32, or in fp64 if it is so already."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def root_mean_square(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch 1"]:
    """The root of the mean square plus eps, in one pass over the memory."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (length.square() / x.shape[-1] + eps).sqrt()


class _Known(nn.Module):
    """What users of the public interface ask a norm for."""

    cfg: Any
    manner = Manner()
    kind = ""  # "LN" or "RMS"

    @property
    def eps(self) -> float:
        """What is added to the mean square."""
        return self.cfg.eps

    @property
    def length(self) -> int:
        """How wide the vectors are that it normalises."""
        return self.cfg.d_model

    @property
    def normalization_type(self) -> str:
        """Its public name: "LN" or "RMS", "LNPre" or "RMSPre" without a weight."""
        return self.kind if self.cfg.weight else self.kind + "Pre"


class LayerNorm(_Known):
    """`(x - mean) / scale * (offset + w) + b`, where scale is the root of the variance plus eps; the offset is mostly 0.

    A norm whose weights were folded into the next layer ("LNPre") has neither `w` nor `b`. With `n_heads` they are
    [head, d_model]: each head has its own.
    """

    kind = "LN"

    @dataclass(frozen=True)
    class Config:
        d_model: int
        eps: float = 1e-5
        weight: bool = True
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
        if self.manner.fused and not is_listening(self.hook_scale, self.hook_normalized):
            return self.plain(x)
        centred = wide(x) - wide(x).mean(-1, keepdim=True)
        scale = self.hook_scale(root_mean_square(centred, self.cfg.eps))
        return self.apply_weights(self.hook_normalized((centred / scale).to(x.dtype)))

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same value, past the hook points."""
        cfg = self.cfg
        if cfg.n_heads is not None or (cfg.weight and self.w.dtype != x.dtype):  # or of a wider stream
            return self.apply_weights(F.layer_norm(x, (cfg.d_model,), eps=cfg.eps))
        gain = None if not cfg.weight else self.w if cfg.offset == 0.0 else self.w + cfg.offset
        return F.layer_norm(x, (cfg.d_model,), gain, self.shift(), cfg.eps)

    def gain(self) -> Float[Tensor, "*heads d_model"] | None:
        """What the normalised value is multiplied by; None for a folded norm."""
        if not self.cfg.weight:
            return None
        return self.w if self.cfg.offset == 0.0 else wide(self.w) + self.cfg.offset

    def shift(self) -> Float[Tensor, "*heads d_model"] | None:
        """What is added after the gain; None for a folded norm."""
        return self.b if self.cfg.bias else None

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """From the normalised value to the output."""
        gain, shift = self.gain(), self.shift()
        if gain is not None and shift is not None and gain.dtype == normalized.dtype:
            return torch.addcmul(shift, normalized, gain)
        if gain is not None:
            normalized = (normalized * gain).to(normalized.dtype)
        return normalized if shift is None else normalized + shift


class HeadLayerNorm(LayerNorm):
    """The same without biases, for heads whose weights are parameters of their own: `heads.0`, `heads.1`, each [d_model]."""

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

    def gain(self) -> Float[Tensor, "heads d_model"]:
        """What the normalised values are multiplied by."""
        return torch.stack(list(self.heads))


class RMSNorm(_Known):
    """`x / scale * (offset + w)`, where scale is the root of the mean square plus eps; Gemma's offset is 1.

    With `n_heads` the weight is [head, d_model]: each head has its own. `joint` then takes one scale over all heads
    together.
    """

    kind = "RMS"

    @dataclass(frozen=True)
    class Config:
        d_model: int
        eps: float = 1e-6
        weight: bool = True
        offset: float = 0.0
        n_heads: int | None = None
        joint: bool = False

        @property
        def shape(self) -> tuple[int, ...]:
            """The shape of the weight."""
            return (self.d_model,) if self.n_heads is None else (self.n_heads, self.d_model)

        @property
        def normalized_shape(self) -> tuple[int, ...]:
            """The axes over which the mean square is taken."""
            return self.shape if self.joint else (self.d_model,)

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "RMSNorm":
            return RMSNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__()
        self.cfg = cfg
        if cfg.weight:
            self.w = nn.Parameter(torch.full(cfg.shape, 1.0 - cfg.offset))
        n_axes = len(cfg.normalized_shape)
        self.hook_scale = HookPoint(*dims[:-n_axes], *["1"] * n_axes)
        self.hook_normalized = HookPoint(*dims)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if self.manner.fused and not is_listening(self.hook_scale, self.hook_normalized):
            return self.plain(x)
        rows = wide(x).flatten(-2) if self.cfg.joint else wide(x)
        scale = root_mean_square(rows, self.cfg.eps)
        scale = self.hook_scale(scale[..., None] if self.cfg.joint else scale)
        return self.apply_weights(self.hook_normalized((wide(x) / scale).to(x.dtype)))

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same value, past the hook points."""
        cfg = self.cfg
        if cfg.n_heads is not None and not cfg.joint:
            return self.apply_weights(F.rms_norm(wide(x), cfg.normalized_shape, eps=cfg.eps).to(x.dtype))
        return F.rms_norm(wide(x), cfg.normalized_shape, self.gain(), cfg.eps).to(x.dtype)

    def gain(self) -> Float[Tensor, "*heads d_model"] | None:
        """What the normalised value is multiplied by, in at least fp32; None for a folded norm."""
        if not self.cfg.weight:
            return None
        return wide(self.w) if self.cfg.offset == 0.0 else wide(self.w) + self.cfg.offset

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """From the normalised value to the output."""
        gain = self.gain()
        return normalized if gain is None else (wide(normalized) * gain).to(normalized.dtype)


Norm = LayerNorm | RMSNorm
NormConfig = LayerNorm.Config | RMSNorm.Config


def build_norm(cfg: NormConfig | None, dims: tuple[str, ...] = RESIDUAL) -> nn.Module:
    """The norm that a sublayer reads the stream through; an identity where it reads the stream itself."""
    return nn.Identity() if cfg is None else cfg.build(dims)


def add_norm(module: nn.Module, name: str, cfg: NormConfig | None, dims: tuple[str, ...] = RESIDUAL) -> None:
    """Give a module the norm of a config under this name; None gives none, and no attribute."""
    if cfg is not None:
        setattr(module, name, cfg.build(dims))


NO_NORM = nn.Identity()


def norm_of(module: nn.Module, name: str) -> nn.Module:
    """The norm that a module has under this name; an identity if it has none."""
    norm = module._modules.get(name)
    return NO_NORM if norm is None else norm


def norm_unhooked(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm's value past its hook points, for the extra copies of a stream; a foreign module is simply called."""
    return norm.plain(x) if isinstance(norm, (LayerNorm, RMSNorm)) else norm(x)
