"""Hunyuan's dense models (Tencent 2025, huggingface.co/tencent/Hunyuan-7B-Pretrain): queries and keys are normalised
after rotary; the rotary base is scaled by a constant factor."""

from dataclasses import replace

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# fields for related models with images, experts or shared keys, and switches that are always on
NO_EFFECT = (
    *("*_id", "anyres_*", "vit_*", "num_media_embeds", "class_num", "pool_type", "norm_type", "dense_list"),
    *("moe_*", "num_experts", "num_shared_expert", "cla_share_factor", "attention_head_dim", "org_vocab_size"),
    *("*_lora_rank", "qk_*_head_dim", "v_head_dim", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
    *("use_qk_norm", "use_rotary_pos_emb", "enable_*fp32*"),
)


def config(hf: HFConfig) -> DecoderConfig:
    d_head = llama_like.head_dim(hf)
    given, turn = hf.rope_parameters, None
    if given["rope_type"] == "dynamic" and given.get("alpha"):  # independent of prompt length, despite the name
        turn = Rotary(d_head, given["rope_theta"] * given["alpha"] ** (d_head / (d_head - 2)))
    attn = llama_like.attention(
        hf,
        rotary=turn or rotary(hf, d_head),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=llama_like.head_norm(hf),
        rotary_first=True,
    )
    tree = llama_like.decoder(hf, attn)
    return tree if turn is None else replace(tree, n_ctx=hf.max_position_embeddings)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *(row for row in llama_like.rows(tree) if not row.target.endswith(("q_norm.w", "k_norm.w"))),
        Row(source + "query_layernorm.weight", target + "q_norm.w"),
        Row(source + "key_layernorm.weight", target + "k_norm.w"),
    ]
