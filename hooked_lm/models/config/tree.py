"""What a decoder is made of, as a tree of component configs."""

from dataclasses import dataclass
from typing import Any

from hooked_lm.components.blocks.per_layer import PerLayerEmbed
from hooked_lm.components.embed import Embed, PosEmbedConfig, Unembed
from hooked_lm.components.norm import NormConfig


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embeddings, a tuple of blocks (they may differ), a final norm, an unembedding.

    `n_ctx` is the longest prompt. With `shortformer` the position embedding is added to the inputs of queries and keys
    instead of the stream (Press et al. 2020, arXiv:2012.15832). `per_layer` embeds the tokens for each layer besides.
    """

    n_ctx: int
    embed: Embed.Config
    blocks: tuple[Any, ...]  # what builds them: the configs of any kinds of blocks
    unembed: Unembed.Config
    pos_embed: PosEmbedConfig | None = None
    ln_final: NormConfig | None = None
    shortformer: bool = False
    per_layer: PerLayerEmbed.Config | None = None
