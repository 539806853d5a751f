"""Attention that bounds queries and keys after their norms (OLMoE, Muennighoff et al. 2024, arXiv:2409.02060)."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import KEY, QUERY, Attention
from hooked_lm.components.norms.norm import NormConfig, RMSNorm


class ClippedRMSNorm(RMSNorm):
    """An RMS norm whose output is bounded to [-clip, clip]."""

    def __init__(self, cfg: RMSNorm.Config, dims: tuple[str, ...], clip: float) -> None:
        super().__init__(cfg, dims)
        self.clip = clip

    def bounded(self, out: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return out.clamp(-self.clip, self.clip)


class Clip(nn.Module):
    """Bounds every entry to [-clip, clip]."""

    def __init__(self, clip: float) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return x.clamp(-self.clip, self.clip)


class NormThenClipAttention(Attention):
    """Attention whose `clip` bounds values, and queries and keys after their RMS norms. `hook_q` and `hook_k` are before both."""

    clips_projections = False  # the norms bound their outputs

    @dataclass(frozen=True)
    class Config(Attention.Config):
        def build(self) -> "NormThenClipAttention":
            return NormThenClipAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.q_norm = self._norm(self.cfg.qk_norm, QUERY)
        self.k_norm = self._norm(self.cfg.k_norm or self.cfg.qk_norm, KEY)
        self.v_norm = Clip(self._bound)  # no norm: it only bounds values

    def _norm(self, cfg: NormConfig | None, dims: tuple[str, ...]) -> ClippedRMSNorm:
        if not isinstance(cfg, RMSNorm.Config):
            raise ValueError("NormThenClipAttention needs RMS norms of queries and keys: set qk_norm")
        return ClippedRMSNorm(cfg, dims, self._bound)

    @property
    def _bound(self) -> float:
        if self.cfg.clip is None:
            raise ValueError("NormThenClipAttention needs a bound: set clip")
        return self.cfg.clip
