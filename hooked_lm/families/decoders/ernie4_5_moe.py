"""ERNIE 4.5 with experts (Baidu 2025): adjacent rotary pairs, expert choice with a correction bias, shared experts."""

from collections.abc import Callable
from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import CorrectedSoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
IGNORED = (*llama_like.IGNORED, "*mtp*")  # multi-token prediction
# options of load balancing and multi-token prediction in training
NO_EFFECT = (*moe.NO_EFFECT, "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")


def config(hf: HFConfig) -> DecoderConfig:
    first, last, step = hf.moe_layer_start_index, hf.moe_layer_end_index, hf.moe_layer_interval
    return decoder(hf, lambda layer: (layer + 1) % step == 0 and first <= layer <= last, bias=hf.use_bias)


def decoder(hf: HFConfig, is_sparse: Callable[[int], bool], bias: bool) -> DecoderConfig:
    """The decoder with experts in the layers that `is_sparse`; `bias` is that of the unembedding."""
    d_head = llama_like.head_dim(hf)
    attn = llama_like.attention(
        hf, rotary=rotary(hf, d_head, adjacent_pairs=True), qkv_bias=hf.use_bias, out_bias=hf.use_bias
    )
    expert = GatedMLP.Config(hf.hidden_size, hf.moe_intermediate_size, hf.hidden_act)
    n_shared = hf.moe_num_shared_experts
    shared = replace(expert, d_mlp=hf.moe_intermediate_size * n_shared, bias=hf.use_bias) if n_shared else None
    router = CorrectedSoftmaxRouter(hf.moe_norm_min)
    experts = MoE.Config(expert, hf.moe_num_experts, hf.moe_k, router, shared=shared)
    return moe.decoder(hf, attn, moe.some_sparse(hf, experts, is_sparse, hf.use_bias), bias=bias)


def rows(tree: DecoderConfig) -> list[Row]:
    correction = Row("model.layers.{l}.mlp.moe_statics.e_score_correction_bias", "blocks.{l}.mlp.b_choice", "1 e -> e")
    return [*(row for row in moe.rows(tree) if row.target != correction.target), correction]
