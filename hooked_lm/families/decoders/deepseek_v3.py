"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, experts balanced by a correction."""

from hooked_lm.components.router import GroupedSigmoidRouter
from hooked_lm.families._shared import deepseek, llama_like
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# The layer after the last one predicts further tokens ahead; it takes no part in the next token's logits.
IGNORED = (*llama_like.IGNORED, "model.layers.61.*")
NO_EFFECT = (*deepseek.NO_EFFECT, "num_mtp_layers", "num_nextn_predict_layers")


def config(hf: HFConfig) -> DecoderConfig:
    router = GroupedSigmoidRouter(hf.n_group, hf.topk_group, hf.norm_topk_prob, hf.routed_scaling_factor)
    return deepseek.decoder(hf, deepseek.attention(hf, adjacent_pairs=hf.rope_interleave), router)
