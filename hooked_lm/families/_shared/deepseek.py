"""Shared code for DeepSeek models: latent attention, and the tensor names."""

from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.rotary_scaling import YarnScaling
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

# `head_dim` and `qk_head_dim` follow from the sizes of the two parts of a head.
NO_EFFECT = (*moe.NO_EFFECT, "head_dim", "qk_head_dim", "num_key_value_heads")


def attention(hf: HFConfig, adjacent_pairs: bool) -> LatentAttention.Config:
    """The attention of a layer. YaRN's temperature is part of the scale of the scores."""
    turning = rotary(hf, hf.qk_rope_head_dim, adjacent_pairs=adjacent_pairs)
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    if isinstance(turning.scaling, YarnScaling) and turning.scaling.mscale_all_dim:
        scale *= turning.scaling.temperature(turning.scaling.mscale_all_dim) ** 2
    return LatentAttention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_nope=hf.qk_nope_head_dim,
        d_value=hf.v_head_dim,
        d_kv_latent=hf.kv_lora_rank,
        d_q_latent=hf.q_lora_rank,
        rotary=turning,
        scale=scale,
        down_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
    )


def dense_block(hf: HFConfig, adjacent_pairs: bool, mlp_bias: bool = False) -> PreNormBlock.Config:
    """A layer with latent attention and one MLP."""
    norm, mlp = llama_like.rms_norm(hf), llama_like.gated_mlp(hf, mlp_bias)
    return PreNormBlock.Config(attn=attention(hf, adjacent_pairs), ln1=norm, mlp=mlp, ln2=norm)


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of every weight that such a decoder can have."""
    attn = tree.blocks[0].attn
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    down = {"DKV": attn.d_kv_latent, "KR": attn.rotary.dim}
    up = {"UK": attn.d_nope, "UV": attn.d_value}
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        Row(source + "q_proj.weight", target + "W_Q", "(n h) m -> n m h"),
        Row(source + "q_a_proj.weight", target + "W_DQ", "d m -> m d"),
        Row(source + "q_a_proj.bias", target + "b_DQ"),
        Row(source + "q_a_layernorm.weight", target + "q_norm.w"),
        Row(source + "q_b_proj.weight", target + "W_UQ", "(n h) d -> n d h"),
        Row(source + "kv_a_proj_with_mqa.weight", target + "W_{x}", "x m -> m x", x=down),
        Row(source + "kv_a_proj_with_mqa.bias", target + "b_{x}", "x -> x", x=down),
        Row(source + "kv_a_layernorm.weight", target + "kv_norm.w"),
        Row(source + "kv_b_proj.weight", target + "W_{x}", "(n x) d -> n d x", x=up, n=attn.n_heads),
        *classic.out_of_attention(source + "o_proj"),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree),
    ]
