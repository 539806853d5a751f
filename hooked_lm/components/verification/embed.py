"""Embeddings of tokens and positions."""

from torch import Tensor

from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.factored_embed import FactoredEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed, SinusoidalEmbed
from hooked_lm.components.embeddings.replaced_embed import ReplacedEmbed
from hooked_lm.components.verification.registry import output_weights


@output_weights.register
def _(embed: Embed) -> list[Tensor]:
    """The weights and biases whose last axis is that of the stream; none if a norm follows."""
    return [embed.W_E] if embed.cfg.norm is None else []


@output_weights.register
def _(embed: ReplacedEmbed) -> list[Tensor]:
    """The weights whose last axis is that of the stream; none if a norm follows."""
    return [embed.W_E, embed.w_replaced] if embed.cfg.norm is None else []


@output_weights.register
def _(embed: FactoredEmbed) -> list[Tensor]:
    """The weights and biases whose last axis is that of the stream; none if a norm follows."""
    if embed.cfg.norm is not None:
        return []
    return [embed.W_proj] if embed.b_proj is None else [embed.W_proj, embed.b_proj]


@output_weights.register
def _(embed: PosEmbed) -> list[Tensor]:
    """The weights whose last axis is that of the stream."""
    return [embed.W_pos]


@output_weights.register
def _(embed: SinusoidalEmbed) -> list[Tensor]:
    """There are no weights."""
    return []
