"""Lara 4 Mini (Translated 2026, huggingface.co/translated/Lara-4-Mini-Base): Gated DeltaNet, attention in windows, and a few
layers of full attention without positions; many small experts and a shared one."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.experts.router import GroupedSoftmaxRouter
from hooked_lm.families._shared import delta_net, llama_like, moe
from hooked_lm.families._shared.delta_net import LAYER, MIXER
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen3_vl_moe_text
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = moe.NO_EFFECT
RENAMED = {r"\.linear_attn\.out_norm\.": ".linear_attn.norm."}


def config(hf: HFConfig) -> DecoderConfig:
    norm, bias = llama_like.rms_norm(hf), hf.attention_bias
    attn = llama_like.attention(hf, qkv_bias=bias, out_bias=bias, qk_norm=llama_like.head_norm(hf))
    experts = moe.experts(
        hf, hf.num_experts, GroupedSoftmaxRouter(renormalize=hf.norm_topk_prob), hf.moe_intermediate_size
    )
    experts = replace(experts, shared=replace(experts.expert, d_mlp=hf.shared_expert_intermediate_size))
    around: dict[str, Any] = {"ln1": norm, "mlp": experts, "ln2": norm}
    kinds = {
        "linear_attention": MixerMLPBlock.Config(mixer=delta_net.mixer(hf), **around),
        "sliding_attention": PreNormBlock.Config(attn=replace(attn, window=hf.sliding_window), **around),
        "full_attention": PreNormBlock.Config(attn=replace(attn, rotary=None), **around),
    }
    if unknown := set(hf.layer_types) - set(kinds):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {', '.join(kinds)} are")
    return llama_like.around(hf, [kinds[kind] for kind in hf.layer_types[: hf.num_hidden_layers]], norm)


def rows(tree: DecoderConfig) -> list[Row]:
    parts = ("Q", "K", "V", "gate", "beta", "g")
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *(
            row
            for cfg in delta_net.mixers(tree)[:1]
            for row in (
                Row(
                    LAYER + "linear_attn.in_proj.weight",
                    MIXER + "W_{x}",
                    "x m -> m x",
                    x={name: cfg.widths[name] for name in parts},
                ),
                *delta_net.mixer_rows(cfg),
            )
        ),
        *(row for row in moe.sparse_rows(tree, shared="shared_expert") if ".experts." not in row.source),
        *qwen3_vl_moe_text.expert_rows(replace(tree, layout=1)),
    ]
