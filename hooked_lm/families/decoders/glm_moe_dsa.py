"""GLM-5 (Z.ai 2026, arXiv:2602.15763): DeepSeek-V3.2, in which layers may share the keys that an earlier one chose."""

from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# An extra layer for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.78.*")
# `indexer_types` repeats them.
NO_EFFECT = (*deepseek.NO_EFFECT_OF_SPARSE, "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")


def config(hf: HFConfig) -> DecoderConfig:
    return moe.decoder(hf, deepseek.sharing_indices(hf), deepseek.mlps(hf))
