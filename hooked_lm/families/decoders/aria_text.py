"""The text part of Aria (Li et al. 2024, arXiv:2410.05993): Llama's attention, experts and a shared MLP."""

from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    mlp = llama_like.gated_mlp(hf)
    shared = replace(mlp, d_mlp=hf.intermediate_size * hf.moe_num_shared_experts, bias=hf.mlp_bias)
    expert = replace(mlp, act_fn="silu")  # `hidden_act` is that of the shared MLP only
    experts = MoE.Config(expert, hf.moe_num_experts, hf.moe_topk, TopKRouter(), shared=shared)
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.mlp.", "blocks.{l}.mlp.", moe.n_experts(tree)
    return [
        *llama_like.rows(tree),
        *classic.gated_mlp(source + "shared_experts.", target + "shared."),
        Row(source + "router.weight", target + "W_router", "e m -> m e"),
        Row(source + "experts.fc1.weight", target + "experts.{e}.W_{x}", "e m (x f) -> m f", e=e, x=["gate", "in"]),
        Row(source + "experts.fc2.weight", target + "experts.{e}.W_out", "e f m -> f m", e=e),
    ]
