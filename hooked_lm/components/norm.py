"""Layer normalisation (Ba et al. 2016, arXiv:1607.06450) and RMS normalisation (Zhang and Sennrich 2019,
arXiv:1910.07467), with the divisor and the normalised value in sight.

Nobody listens: one fused kernel. Somebody does: the same sum in steps. Both compute in at least fp32 and return the input's
dtype.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.hooks import HookPoint, is_listening

RESIDUAL = ("batch", "pos", "d_model")


def wide(x: Tensor) -> Tensor:
    """In fp32, or in fp64 if it is so already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def root_mean_square(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch 1"]:
    """The root of the mean square plus eps, in one pass over the memory."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (length.square() / x.shape[-1] + eps).sqrt()


class LayerNorm(nn.Module):
    """`(x - mean) / scale * w + b`, where scale is the root of the variance plus eps.

    `w` or `b` may be None: a norm whose weights were folded into the next layer ("LNPre") has neither.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        eps: float = 1e-5
        weight: bool = True
        bias: bool = True

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "LayerNorm":
            return LayerNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.ones(cfg.d_model)) if cfg.weight else None
        self.b = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_scale = HookPoint(*dims[:-1], "1")
        self.hook_normalized = HookPoint(*dims)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if not is_listening(self.hook_scale, self.hook_normalized):
            return self.plain(x)
        centred = wide(x) - wide(x).mean(-1, keepdim=True)
        scale = self.hook_scale(root_mean_square(centred, self.cfg.eps))
        return self.apply_weights(self.hook_normalized((centred / scale).to(x.dtype)))

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same value, past the hook points."""
        return F.layer_norm(x, (self.cfg.d_model,), self.w, self.b, self.cfg.eps)

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """From the normalised value to the output."""
        if self.w is not None and self.b is not None:
            return torch.addcmul(self.b, normalized, self.w)
        if self.w is not None:
            normalized = normalized * self.w
        return normalized if self.b is None else normalized + self.b


class RMSNorm(nn.Module):
    """`x / scale * (offset + w)`, where scale is the root of the mean square plus eps; Gemma's offset is 1."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        eps: float = 1e-6
        weight: bool = True
        offset: float = 0.0

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "RMSNorm":
            return RMSNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.full((cfg.d_model,), 1.0 - cfg.offset)) if cfg.weight else None
        self.hook_scale = HookPoint(*dims[:-1], "1")
        self.hook_normalized = HookPoint(*dims)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if not is_listening(self.hook_scale, self.hook_normalized):
            return self.plain(x)
        scale = self.hook_scale(root_mean_square(wide(x), self.cfg.eps))
        return self.apply_weights(self.hook_normalized((wide(x) / scale).to(x.dtype)))

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same value, past the hook points."""
        return F.rms_norm(wide(x), (self.cfg.d_model,), self.gain(), self.cfg.eps).to(x.dtype)

    def gain(self) -> Float[Tensor, " d_model"] | None:
        """What the normalised value is multiplied by, in at least fp32; None for a folded norm."""
        return None if self.w is None else wide(self.w) + self.cfg.offset

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """From the normalised value to the output."""
        gain = self.gain()
        return normalized if gain is None else (wide(normalized) * gain).to(normalized.dtype)


Norm = LayerNorm | RMSNorm
NormConfig = LayerNorm.Config | RMSNorm.Config


def build_norm(cfg: NormConfig | None, dims: tuple[str, ...] = RESIDUAL) -> nn.Module:
    """The norm of a config; None is no norm at all."""
    return nn.Identity() if cfg is None else cfg.build(dims)


def plain_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm's value past its hook points, for the extra copies of a stream; a foreign module is simply called."""
    return norm.plain(x) if isinstance(norm, (LayerNorm, RMSNorm)) else norm(x)
