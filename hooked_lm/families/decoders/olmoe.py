"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): queries and keys are normalised over all heads together."""

from hooked_lm.components.norm import RMSNorm
from hooked_lm.components.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.hidden_size // hf.num_attention_heads
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=RMSNorm.Config(d_head, hf.rms_norm_eps, n_heads=hf.num_attention_heads, joint=True),
        k_norm=RMSNorm.Config(d_head, hf.rms_norm_eps, n_heads=hf.num_key_value_heads, joint=True),
    )
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter(hf.norm_topk_prob))
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    attention = [row for row in llama_like.attention_rows(tree) if "_norm." not in row.source]
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(tree),
        *attention,
        Row("model.layers.{l}.self_attn.q_norm.weight", "blocks.{l}.attn.q_norm.w", "(n h) -> n h"),
        Row("model.layers.{l}.self_attn.k_norm.weight", "blocks.{l}.attn.k_norm.w", "(n h) -> n h"),
        *moe.sparse_rows(tree),
    ]
