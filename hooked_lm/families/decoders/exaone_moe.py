"""K-EXAONE (LG AI Research 2026, arXiv:2601.01739): EXAONE 4's attention after norms, DeepSeek-V3's experts."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

IGNORED = (*llama_like.IGNORED, "mtp*")  # multi-token prediction
# The first two repeat `layer_types` and `mlp_layer_types`; no model has biases, whatever the last says.
NO_EFFECT = (
    *(*moe.NO_EFFECT, "sliding_window_pattern", "first_k_dense_replace", "num_nextn_predict_layers"),
    "attention_bias",
)


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qk_norm=llama_like.head_norm(hf))
    experts = moe.deepseek_experts(hf, hf.num_experts, hf.num_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.of_sparse_type(hf))
    return moe.decoder(hf, llama_like.rotary_in_windows(hf, attn), mlps)


def rows(tree: DecoderConfig) -> list[Row]:
    return [*llama_like.rows(tree), *moe.sparse_rows(tree, correction="e_score_correction_bias")]
