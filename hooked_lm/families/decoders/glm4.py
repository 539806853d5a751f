"""GLM-4 of 2025 (Z.ai, GLM-4-0414): GLM with a second norm after attention and after the MLP."""

from dataclasses import replace

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import glm
from hooked_lm.families.decoders.glm import NO_EFFECT
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    tree, norm = glm.config(hf), llama_like.rms_norm(hf)
    return replace(tree, blocks=tuple(replace(block, ln1_post=norm, ln2_post=norm) for block in tree.blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *glm.rows(tree),  # they map post_attention_layernorm to the norm before the MLP
        Row("model.layers.{l}.post_self_attn_layernorm.weight", "blocks.{l}.ln1_post.w"),
        Row("model.layers.{l}.post_mlp_layernorm.weight", "blocks.{l}.ln2_post.w"),
    ]
