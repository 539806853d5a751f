"""The block classes of TransformerLens."""

from typing import Any

from hooked_lm.compat.parts.attention import has_relative_bias
from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, block_of, encoder_tree
from hooked_lm.components.blocks.block import AttentionPart, PreNormBlock
from hooked_lm.components.blocks.cross import CrossPart, PreNormCrossBlock
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock, MLPOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock, PostNormPart
from hooked_lm.models.config.flat import HookedEncoderDecoderConfig

BLOCKS = {
    kind.Config: kind for kind in (AttentionOnlyBlock, PreNormBlock, ParallelBlock, PreNormCrossBlock, PostNormBlock)
}


class TransformerBlock(Part, PreNormBlock, metaclass=PublicName):
    """A decoder block."""

    @staticmethod
    def plan(cfg: Flat, block_index: int) -> Plan:
        config = block_of(cfg, block_index)
        return BLOCKS[type(config)], config, block_index

    @staticmethod
    def is_one(module: Any) -> bool:
        is_block = isinstance(module, (AttentionPart, MixerPart, MLPOnlyBlock))
        return is_block and not BertBlock.is_one(module) and not T5Block.is_one(module)


class BertBlock(Part, PostNormBlock, metaclass=PublicName):
    """An encoder block with norms in the residual stream."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return PostNormBlock, encoder_tree(cfg).blocks[0], 0

    @staticmethod
    def is_one(module: Any) -> bool:
        attends = isinstance(module, PostNormPart) and hasattr(module, "attn")
        return attends and not getattr(module.attn.cfg, "causal", False)


class T5Block(Part, PreNormCrossBlock, metaclass=PublicName):
    """A block of an encoder-decoder, whose stack has a shared position bias."""

    @staticmethod
    def plan(cfg: Flat, block_index: int, is_decoder: bool) -> Plan:
        tree: Any = HookedEncoderDecoderConfig.unwrap(cfg).tree
        config = (tree.decoder if is_decoder else tree.encoder).blocks[block_index]
        return BLOCKS[type(config)], config, block_index

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, CrossPart) or (
            isinstance(module, PreNormBlock) and has_relative_bias(module.attn) and not module.attn.cfg.causal
        )
