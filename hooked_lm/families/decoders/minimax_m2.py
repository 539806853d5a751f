"""MiniMax-M2 (MiniMax 2025, huggingface.co/MiniMaxAI/MiniMax-M2): OLMoE's attention with partial rotary, and experts weighted
by sigmoids and chosen with a correction."""

from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import olmo2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# noise in training; the other field is repeated in `rope_parameters`
NO_EFFECT = (*moe.NO_EFFECT, "router_jitter_noise", "rotary_dim")


def config(hf: HFConfig) -> DecoderConfig:
    qk_norm, k_norm = olmo2.joint_norms(hf)
    attn = llama_like.attention(hf, partial=True, qk_norm=qk_norm, k_norm=k_norm)
    experts = moe.experts(hf, hf.num_local_experts, GroupedSigmoidRouter())
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *olmo2.attention_rows(),
        *moe.sparse_rows(tree, "block_sparse_moe", ("w1", "w3", "w2"), correction="e_score_correction_bias"),
    ]
