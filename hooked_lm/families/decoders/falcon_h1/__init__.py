"""Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448): attention and Mamba-2 side by side in each layer, with multipliers of all
projections.

The multiplier of the input of attention is part of the scale of the scores and of its output; that of Mamba-2 is part of those of
its projections. `hook_q`, `hook_k` and `hook_v` are before them. Beside biases, which it does not multiply, an input's multiplier
would be an option of every projection that only this family has; no published model has both, and it is refused.
"""

from dataclasses import replace

from hooked_lm.components.activations import ScaledAct
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import bamba
from hooked_lm.families.decoders.falcon_h1.hybrid import HybridBlock
from hooked_lm.families.decoders.mamba2 import mixer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# derived fields, chunk size of the scan, the number of logits that are returned
NO_EFFECT = (
    "mamba_expand",
    "mamba_d_ssm",
    "mamba_chunk_size",
    "num_logits_to_keep",
    "layers_block_type",
    "layer_types",
)


def config(hf: HFConfig) -> DecoderConfig:
    norm, into = llama_like.rms_norm(hf), hf.attention_in_multiplier
    _check_biases(hf)
    attn = llama_like.attention(
        hf,
        scale=llama_like.head_dim(hf) ** -0.5 * into**2 * hf.key_multiplier,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
    )
    gate_scale, mlp_scale = hf.mlp_multipliers
    block = HybridBlock.Config(
        attn=attn,
        mixer=_mixer(hf),
        ln1=norm,
        mlp=GatedMLP.Config(hf.hidden_size, hf.intermediate_size, ScaledAct(hf.hidden_act, gate_scale), hf.mlp_bias),
        ln2=norm,
        attn_scale=into * hf.attention_out_multiplier,
        mixer_scale=hf.ssm_out_multiplier,
        mlp_scale=mlp_scale,
    )
    blocks = (block,) * hf.num_hidden_layers
    return llama_like.around(hf, blocks, norm, hf.embedding_multiplier, hf.lm_head_multiplier)


def _check_biases(hf: HFConfig) -> None:
    """Raises ValueError for an input multiplier of projections with biases, which it does not multiply."""
    for multiplier, bias in (("attention_in_multiplier", "attention_bias"), ("ssm_in_multiplier", "mamba_proj_bias")):
        if hf.get(bias) and hf.get(multiplier) != 1.0:
            raise ValueError(f"{multiplier}={hf.get(multiplier)} is not supported together with {bias}=True")


def _mixer(hf: HFConfig) -> Mamba2.Config:
    scales = [hf.ssm_in_multiplier * scale for scale in hf.ssm_multipliers]
    return replace(
        bamba.mixer(hf),
        out_bias=hf.projectors_bias,
        norm=hf.mamba_rms_norm,
        norm_before_gate=hf.mamba_norm_before_gate,
        scaled=tuple(scales),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    layer = "model.layers.{l}."
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row(layer + "input_layernorm.weight", "blocks.{l}.ln1.w"),
        *llama_like.attention_rows(),
        *mixer_rows(tree.blocks[0].mixer, layer + "mamba."),
        Row(layer + "pre_ff_layernorm.weight", "blocks.{l}.ln2.w"),
        *classic.gated_mlp(layer + "feed_forward."),
        Row("model.final_layernorm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
