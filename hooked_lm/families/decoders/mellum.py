"""Mellum 2 (JetBrains 2026): Qwen3-MoE with local layers, whose rotary embedding has a base of its own."""

from dataclasses import replace

from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

IGNORED = (*llama_like.IGNORED, "mtp.*")  # multi-token prediction
NO_EFFECT = (
    *(*moe.NO_EFFECT, "num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    *("use_sliding_window", "max_window_layers", "decoder_sparse_step", "mlp_only_layers"),  # repeat lists of types
)


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(
        hf, rotary=None, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, qk_norm=llama_like.head_norm(hf)
    )
    rotaries = {name: rotary(hf, attn.d_head, name) for name in dict.fromkeys(hf.layer_types)}
    attns = zip(llama_like.by_window(hf, attn), hf.layer_types, strict=False)
    experts = moe.experts(hf, hf.num_local_experts, SoftmaxRouter(hf.norm_topk_prob), hf.moe_intermediate_size)
    mlps = moe.some_sparse(hf, experts, moe.of_sparse_type(hf))
    return moe.decoder(hf, [replace(each, rotary=rotaries[layer_type]) for each, layer_type in attns], mlps)
