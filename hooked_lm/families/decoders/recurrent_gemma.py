"""RecurrentGemma (Botev et al. 2024, arXiv:2404.07839): Griffin's recurrent blocks, and local attention in between."""

import torch

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba import N_CTX
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
PREPENDS_BOS = False
IGNORED = ("*.rotary_emb.inv_freq",)
# initialisation and derived fields
NO_EFFECT = ("*w_init_variance_scale", "partial_rotary_factor")


def config(hf: HFConfig) -> DecoderConfig:
    d_model = hf.hidden_size
    hf.ignored_by_transformers(embeddings_scale_by_sqrt_dim=True)
    norm = RMSNorm.Config(d_model, hf.rms_norm_eps, offset=1.0)
    mlp = GatedMLP.Config(d_model, hf.intermediate_size // 2, hf.hidden_activation, bias=True)
    mixer = RGLRU.Config(d_model, hf.lru_width, hf.num_attention_heads, hf.conv1d_width, hf.hidden_activation)
    blocks = {
        "recurrent": MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm),
        "attention": PreNormBlock.Config(attn=_attention(hf), ln1=norm, mlp=mlp, ln2=norm),
    }
    kinds = (list(hf.block_types) * hf.num_hidden_layers)[: hf.num_hidden_layers]
    if unknown := {*kinds} - {*blocks}:
        raise ValueError(f"block_types {sorted(unknown)} are not supported; {' and '.join(blocks)} are")
    return DecoderConfig(
        n_ctx=N_CTX,  # neither states nor local attention set a limit
        # the scale is rounded to bf16 for every dtype of the model
        embed=Embed.Config(hf.vocab_size, d_model, scale=torch.tensor(d_model**0.5).bfloat16().item()),
        blocks=tuple(blocks[kind] for kind in kinds),
        ln_final=norm,
        unembed=Unembed.Config(d_model, hf.vocab_size, soft_cap=float(hf.logits_soft_cap), tied=hf.tie_word_embeddings),
    )


def _attention(hf: HFConfig) -> Attention.Config:
    rope = dict(hf.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported for recurrent_gemma; 'default' is")
    d_head = hf.head_dim
    return Attention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_head=d_head,
        n_key_value_heads=hf.num_key_value_heads,
        qkv_bias=hf.attention_bias,
        out_bias=True,
        rotary=Rotary(int(d_head * rope.get("partial_rotary_factor", 1.0)), float(rope["rope_theta"])),
        window=hf.attention_window_size,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    layer = "model.layers.{l}."
    temporal, mixer, gates = layer + "temporal_block.", "blocks.{l}.mixer.", {"input": "i", "recurrent": "r"}
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row(layer + "temporal_pre_norm.weight", "blocks.{l}.ln1.w"),
        *classic.attention(temporal),
        *classic.linear(temporal + "linear_x", mixer, "x"),
        *classic.linear(temporal + "linear_y", mixer, "gate"),
        Row(temporal + "conv_1d.weight", mixer + "conv.W_conv", "i 1 k -> k i"),
        Row(temporal + "conv_1d.bias", mixer + "conv.b_conv"),
        *(Row(f"{temporal}rg_lru.{source}_gate_weight", f"{mixer}W_{target}") for source, target in gates.items()),
        *(Row(f"{temporal}rg_lru.{source}_gate_bias", f"{mixer}b_{target}") for source, target in gates.items()),
        Row(temporal + "rg_lru.recurrent_param", mixer + "Lambda"),
        *classic.linear(temporal + "linear_out", mixer, "out"),
        Row(layer + "channel_pre_norm.weight", "blocks.{l}.ln2.w"),
        *classic.gated_mlp(layer + "mlp_block."),
        Row("model.final_norm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
