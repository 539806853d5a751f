"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): normalised queries and keys instead of Gemma 2's soft caps, and
separate rotary frequencies in local layers. EmbeddingGemma (2025, arXiv:2509.20354) attends in both directions."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.families.decoders.gemma2 import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# `layer_types` repeat the pattern, `rope_parameters` the base; `hidden_activation` is used instead of `hidden_act`
# the class of transformers stores `attn_logit_softcapping`, and its attention does not take it
NO_EFFECT = ("sliding_window_pattern", "rope_local_base_freq", "hidden_act", "attn_logit_softcapping")


def config(hf: HFConfig) -> DecoderConfig:
    norm, is_causal = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0), not hf.use_bidirectional_attention
    if not is_causal:  # half of the window lies on either side
        hf = hf.changed(sliding_window=hf.sliding_window // 2 + 1)
    attn = llama_like.attention(
        hf,
        rotary=None,  # set below, separately for each layer type
        scale=hf.query_pre_attn_scalar**-0.5,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=RMSNorm.Config(hf.head_dim, hf.rms_norm_eps, offset=1.0),
        causal=is_causal,
    )
    attns = [
        replace(attn, window=window, rotary=rotary(hf, hf.head_dim, layer_type))
        for window, layer_type in zip(llama_like.windows(hf), hf.layer_types, strict=False)
    ]
    mlp = GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_activation)
    block = PreNormBlock.Config(attn=attn, ln1=norm, ln1_post=norm, mlp=mlp, ln2=norm, ln2_post=norm)
    blocks, cap = [replace(block, attn=attn) for attn in attns], hf.final_logit_softcapping
    tree = llama_like.around(hf, blocks, norm, scale=hf.hidden_size**0.5, soft_cap=cap)
    return replace(tree, n_ctx=n_ctx(hf, "full_attention"))
