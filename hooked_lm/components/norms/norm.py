"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), and what all norms share.

A norm runs one fused kernel if nothing listens to its hook points, and the same computation in steps otherwise. Both compute in
at least fp32 and return the dtype of the input.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.tl_attributes import NormTLAttributes
from hooked_lm.components.run_settings import RunSettings
from hooked_lm.hooks import HookPoint, is_listening

RESIDUAL = ("batch", "pos", "d_model")


def upcast(x: Tensor) -> Tensor:
    """Converted to fp32 if its precision is lower."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def root_mean_square(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch 1"]:
    """The root of the mean square plus eps, in one pass over memory."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (length.square() / x.shape[-1] + eps).sqrt()


class Norm(NormTLAttributes, nn.Module, ABC):
    """A norm with the divisor and the normalised value at hook points."""

    settings = RunSettings()

    @dataclass(frozen=True)
    class Config(ABC):
        """Without a `weight` the norm only normalises, e.g. since its weight was folded into the next layer."""

        d_model: int
        eps: float = 1e-5
        weight: bool = True

        @abstractmethod
        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "Norm":
            """The norm of this config, for a value with these axes."""

    cfg: Any

    @abstractmethod
    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output for `x` by one fused kernel, without the hook points."""


class RMSNorm(Norm):
    """`x / scale * (offset + w)`, where scale is the root of the mean square plus eps; Gemma's offset is 1.

    With `n_heads` the weight is [head, d_model]: each head has its own. `joint` then takes one scale over all heads
    together.
    """

    kind = "RMS"

    @dataclass(frozen=True)
    class Config(Norm.Config):
        eps: float = 1e-6
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
        if self.settings.fused and not is_listening(self.hook_scale, self.hook_normalized):
            return self.unhooked(x)
        rows = upcast(x).flatten(-2) if self.cfg.joint else upcast(x)
        scale = root_mean_square(rows, self.cfg.eps)
        scale = self.hook_scale(scale[..., None] if self.cfg.joint else scale)
        return self.apply_weights(self.hook_normalized((upcast(x) / scale).to(x.dtype)))

    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same output by one fused kernel, without the hook points."""
        cfg = self.cfg
        if cfg.n_heads is not None and not cfg.joint:
            return self.apply_weights(F.rms_norm(upcast(x), cfg.normalized_shape, eps=cfg.eps).to(x.dtype))
        return self.bounded(F.rms_norm(upcast(x), cfg.normalized_shape, self.gain(), cfg.eps).to(x.dtype))

    def gain(self) -> Float[Tensor, "*heads d_model"] | None:
        """The factors of the normalised value, in at least fp32; None for a folded norm."""
        if not self.cfg.weight:
            return None
        return upcast(self.w) if self.cfg.offset == 0.0 else upcast(self.w) + self.cfg.offset

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output for a normalised value."""
        if (gain := self.gain()) is not None:
            normalized = (upcast(normalized) * self.gain_of_copies(gain, normalized)).to(normalized.dtype)
        return self.bounded(normalized)

    def gain_of_copies(self, gain: Float[Tensor, "*heads d"], normalized: Tensor) -> Float[Tensor, "*heads d"]:
        """The factors of a normalised value in which a head may have several copies."""
        return gain

    def bounded(self, out: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output, within its bounds if it has any."""
        return out


NormConfig = Norm.Config


def build_norm(cfg: NormConfig | None, dims: tuple[str, ...] = RESIDUAL) -> nn.Module:
    """The norm in front of a sublayer, which is always an attribute: an identity if a config has none."""
    return nn.Identity() if cfg is None else cfg.build(dims)


def add_norm(module: nn.Module, name: str, cfg: NormConfig | None, dims: tuple[str, ...] = RESIDUAL) -> None:
    """Adds any other norm of a config to a module under this name; None adds no attribute (see `norm_of`)."""
    if cfg is not None:
        setattr(module, name, cfg.build(dims))


NO_NORM = nn.Identity()


def norm_of(module: nn.Module, name: str) -> nn.Module:
    """The norm that a module has under this name; an identity if it has none."""
    norm = module._modules.get(name)
    return NO_NORM if norm is None else norm


def norm_unhooked(norm: nn.Module, x: Tensor) -> Tensor:
    """The output of a norm without its hook points, for extra copies of a stream; a foreign module is simply called."""
    return norm.unhooked(x) if isinstance(norm, Norm) else norm(x)
