"""Embeddings of tokens and positions."""

from torch import Tensor

from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.verification.registry import output_weights


@output_weights.register
def _(embed: Embed) -> list[Tensor]:
    """The weights and biases that write the stream; none if a norm follows."""
    return [] if embed.cfg.norm is not None else output_weights.dispatch(object)(embed)
