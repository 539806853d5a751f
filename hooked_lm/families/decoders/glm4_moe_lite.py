"""GLM-4.7-Flash (Z.ai 2026, huggingface.co/zai-org/GLM-4.7-Flash): DeepSeek-V3 with a list of the layers that are dense."""

from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# An extra layer for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.47.*")
# The last two repeat `mlp_layer_types` and `rope_parameters`.
NO_EFFECT = (*deepseek.NO_EFFECT, "num_nextn_predict_layers", "first_k_dense_replace", "partial_rotary_factor")


def config(hf: HFConfig) -> DecoderConfig:
    return moe.decoder(hf, deepseek.attention(hf, adjacent_pairs=hf.rope_interleave), deepseek.mlps(hf))
