"""Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219): layer norms, biases, and experts chosen by a sparse mixer.

Prompts longer than in training use the long factors of LongRoPE, as in the paper; transformers keeps the short ones.
"""

from dataclasses import replace

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.rotary_scaling import LongRopeScaling
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SparseMixerRouter
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False

# noise in training; the other field is repeated in `rope_parameters`
NO_EFFECT = (*moe.NO_EFFECT, "input_jitter_noise", "original_max_position_embeddings")


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(num_experts_per_tok=2)  # its sparse mixer always chooses two
    norm = LayerNorm.Config(hf.hidden_size, hf.rms_norm_eps)
    attn = llama_like.attention(
        hf,
        rotary=_rotary(hf),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        window=hf.sliding_window,
    )
    experts = MoE.Config(
        llama_like.gated_mlp(hf),
        hf.num_local_experts,
        hf.num_experts_per_tok,
        SparseMixerRouter(hf.router_jitter_noise),
    )
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers, norm=norm, bias=hf.lm_head_bias)


def _rotary(hf: HFConfig) -> Rotary:
    """The rotary embedding; `short_mscale` and `long_mscale` are the attention factors."""
    given = dict(hf.rope_parameters)
    short, long = given.pop("short_mscale", None), given.pop("long_mscale", None)
    if short is not None:
        given["attention_factor"] = short
    found = rotary(hf.changed(rope_parameters=given), llama_like.head_dim(hf))
    if isinstance(found.scaling, LongRopeScaling) and long != short:
        return replace(found, scaling=replace(found.scaling, long_attention_factor=long))
    return found


def rows(tree: DecoderConfig) -> list[Row]:
    return [*llama_like.rows(tree), *moe.sparse_rows(tree, "block_sparse_moe", ("w1", "w3", "w2"))]
