"""Granite 4 (IBM 2025, huggingface.co/ibm-granite/granite-4.0-h-small): Granite's multipliers, Mamba-2 layers and attention
without positions, experts beside a shared MLP or that MLP alone."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import bamba, granitemoe, granitemoeshared
from hooked_lm.families.decoders.mamba2 import mixer_rows
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# derived fields, chunk size of the scan
NO_EFFECT = (*moe.NO_EFFECT, "mamba_expand", "mamba_chunk_size", "layers_block_type", "rope_theta")


def config(hf: HFConfig) -> DecoderConfig:
    norm, is_turned = llama_like.rms_norm(hf), hf.position_embedding_type == "rope"
    attn = llama_like.attention(
        hf,
        scale=hf.attention_multiplier,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        rotary=rotary(hf, llama_like.head_dim(hf)) if is_turned else None,
    )
    shared, n_experts = (
        GatedMLP.Config(hf.hidden_size, hf.shared_intermediate_size, hf.hidden_act),
        hf.num_local_experts,
    )
    experts = MoE.Config(llama_like.gated_mlp(hf), n_experts, hf.num_experts_per_tok, TopKRouter(), shared=shared)
    mlp = experts if n_experts else shared
    scale = float(hf.residual_multiplier)
    blocks = {
        "linear_attention": MixerMLPBlock.Config(
            mixer=bamba.mixer(hf), ln1=norm, mlp=mlp, ln2=norm, residual_scale=scale
        ),
        "full_attention": PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm, residual_scale=scale),
    }
    if unknown := set(hf.layer_types) - set(blocks):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {' and '.join(blocks)} are")
    layers = [blocks[layer_type] for layer_type in hf.layer_types[: hf.num_hidden_layers]]
    return llama_like.around(hf, layers, norm, float(hf.embedding_multiplier), logit_scale=1 / hf.logits_scaling)


def rows(tree: DecoderConfig) -> list[Row]:
    mixers = [block.mixer for block in tree.blocks if not isinstance(block, PreNormBlock.Config)]
    shared = "blocks.{l}.mlp.shared." if moe.n_experts(tree) else "blocks.{l}.mlp."
    return [
        *granitemoe.rows(tree),
        *granitemoeshared.shared_rows(shared),
        *(row for mixer in mixers[:1] for row in mixer_rows(mixer, "model.layers.{l}.mamba.")),
    ]
