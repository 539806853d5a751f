"""Attention whose scores grow with the query's position (Nakanishi 2025, arXiv:2501.19399), as in Llama 4 and Ministral 3."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.multihead import Attention, Keys, PerHead, SelfAttention
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import upcast


@dataclass(frozen=True)
class PositionScale:
    """The factor `1 + weight * log(1 + floor((position + offset) / length))` of a query: 1 in texts shorter than `length`."""

    weight: float
    length: int
    offset: int = 0

    def factors(self, context: Context) -> Float[Tensor, "#batch pos 1 1"]:
        """The factor of each query of a run, in fp32."""

        def compute() -> Tensor:
            steps = ((context.positions.float() + self.offset) / self.length).floor()
            return (1 + self.weight * steps.log1p())[..., None, None]

        return context.once(self, compute)


class ScaledQueries(SelfAttention):
    """Attention with `scores = position_scale(query position) * q k^T * scale`.

    Patterns over long contexts stay sharp. `hook_q` and `hook_rot_q` are before the factor.
    """

    cfg: "PositionScaledAttention.Config | PositionScaledLatentAttention.Config"

    def scaled(self, q: PerHead, context: Context) -> PerHead:
        """The queries times the factors of their positions."""
        return (upcast(q) * self.cfg.position_scale.factors(context)).to(q.dtype)

    def scored(self, q: PerHead, k: Keys, context: Context) -> tuple[PerHead, Keys, Context]:
        """What the scores are computed from: the scaled queries, and the keys."""
        return self.scaled(q, context), k, context


class PositionScaledAttention(ScaledQueries, Attention):
    """Attention over heads with such scores."""

    @dataclass(frozen=True)
    class Config(Attention.Config):
        position_scale: PositionScale = field(kw_only=True)

        def build(self) -> "PositionScaledAttention":
            return PositionScaledAttention(self)

    cfg: Config


class PositionScaledLatentAttention(ScaledQueries, LatentAttention):
    """Latent attention with such scores."""

    @dataclass(frozen=True)
    class Config(LatentAttention.Config):
        position_scale: PositionScale = field(kw_only=True)

        def build(self) -> "PositionScaledLatentAttention":
            return PositionScaledLatentAttention(self)

    cfg: Config
