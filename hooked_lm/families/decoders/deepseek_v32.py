"""DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv:2512.02556): DeepSeek-V3 with sparse attention, whose indexer chooses the keys."""

from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# An extra layer for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.61.*")
NO_EFFECT = deepseek.NO_EFFECT_OF_SPARSE


def config(hf: HFConfig) -> DecoderConfig:
    return moe.decoder(hf, deepseek.sparse_attention(hf, index_pairs=False), deepseek.mlps(hf))
