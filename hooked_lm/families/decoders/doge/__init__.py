"""Doge (Shi et al. 2024, arXiv:2412.11834): values say which keys are seen, and the stream has weights. Without its experts."""

from hooked_lm.components.blocks.weighted import WeightedResidualBlock
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.doge import identities as identities
from hooked_lm.families.decoders.doge.value_mask import ValueMaskedAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("num_experts*", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef")  # of experts


def config(hf: HFConfig) -> DecoderConfig:
    if hf.is_moe:  # DogeCDMoE.forward in transformers' modeling_doge.py takes scores of one token for another's
        raise ValueError(
            "is_moe=True is not supported for doge: its experts in transformers are not causal, "
            "as earlier logits depend on later tokens"
        )
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=llama_like.head_norm(hf),
        window=hf.sliding_window,
    )
    masked = ValueMaskedAttention.Config(**vars(attn), keep=hf.keep_window_size)
    norm = llama_like.rms_norm(hf)
    block = WeightedResidualBlock.Config(attn=masked, ln1=norm, mlp=llama_like.gated_mlp(hf, hf.mlp_bias), ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    layer, attn = "model.layers.{l}.", "blocks.{l}.attn."
    return [
        *llama_like.rows(tree),
        Row(layer + "self_attn.A", attn + "A"),
        Row(layer + "self_attn.dt_proj.weight", attn + "W_dt", "o (n h) -> n h o"),
        Row(layer + "self_attn.dt_proj.bias", attn + "b_dt"),
        Row(layer + "input_residual", "blocks.{l}.w_attn"),
        Row(layer + "post_attention_residual", "blocks.{l}.w_mlp"),
    ]
