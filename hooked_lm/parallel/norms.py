"""Norms of queries, keys and mixed values whose heads are split over ranks."""

from dataclasses import replace

from torch import Tensor

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, upcast
from hooked_lm.parallel.guard import SplitModule, split_class
from hooked_lm.parallel.ranks import Ranks


class SplitRMSNorm(SplitModule, RMSNorm):
    """A norm with weights for each head, those of this rank."""

    guarded = ("w",)


class SplitLayerNorm(SplitModule, LayerNorm):
    """A norm with weights for each head, those of this rank."""

    guarded = ("w", "b")


class SplitJointNorm(SplitRMSNorm):
    """A norm with one scale over the heads of all ranks; `cfg.n_heads` counts them all."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.ranks.enter(self.hook_scale(self._scale(x)))
        return self.apply_weights(self.hook_normalized((upcast(x) / scale).to(x.dtype)))

    def unhooked(self, x: Tensor) -> Tensor:
        """The same, without the hook points."""
        return self.apply_weights((upcast(x) / self.ranks.enter(self._scale(x))).to(x.dtype))

    def _scale(self, x: Tensor) -> Tensor:
        """The root of the mean square over all heads, replicated."""
        squares = self.ranks.add_up(upcast(x).square().sum((-2, -1), keepdim=True))
        n_heads, width = self.cfg.shape
        return (squares / (n_heads * width) + self.cfg.eps).sqrt()


def split_norm(norm: RMSNorm | LayerNorm, ranks: Ranks) -> SplitRMSNorm | SplitLayerNorm:
    """The norm with weights for each head of this rank for this one; its weights are split by the attention."""
    if isinstance(norm, RMSNorm) and norm.cfg.joint:
        return split_class(norm, SplitJointNorm, ranks)
    kind: type[SplitRMSNorm | SplitLayerNorm] = SplitRMSNorm if isinstance(norm, RMSNorm) else SplitLayerNorm
    split = split_class(norm, kind, ranks)
    split.cfg = replace(norm.cfg, n_heads=norm.cfg.n_heads // ranks.size)
    return split
