"""Sarvam 30B (Sarvam AI 2026, huggingface.co/sarvamai/sarvam-30b): GLM-4.5 with whole heads turned, in files with the names of
Ling's tensors."""

from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families.decoders.glm4_moe import NO_EFFECT, config
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def rows(tree: DecoderConfig) -> list[Row]:
    attn, source, target = tree.blocks[0].attn, "model.layers.{l}.attention.", "blocks.{l}.attn."
    heads = {"Q": attn.n_heads, "K": attn.n_kv, "V": attn.n_kv}
    return [
        *llama_like.outer_rows(tree, embed="model.word_embeddings"),
        *llama_like.norm_rows(),
        Row(source + "query_key_value.weight", target + "W_{x}", "(x h) m -> x m h", x=heads),
        Row(source + "query_key_value.bias", target + "b_{x}", "(x h) -> x h", x=heads),
        *classic.out_of_attention(source + "dense"),
        Row(source + "query_layernorm.weight", target + "q_norm.w"),
        Row(source + "key_layernorm.weight", target + "k_norm.w"),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree, correction="gate.expert_bias"),
    ]
