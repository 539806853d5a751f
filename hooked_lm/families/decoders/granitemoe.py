"""Granite 3 MoE (IBM 2024): Granite's multipliers, and experts weighted by a softmax over the chosen ones."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    norm = llama_like.rms_norm(hf)
    attn = llama_like.attention(
        hf, scale=hf.attention_multiplier, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias
    )
    experts = MoE.Config(llama_like.gated_mlp(hf), hf.num_local_experts, hf.num_experts_per_tok, TopKRouter())
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=experts, ln2=norm, residual_scale=hf.residual_multiplier)
    blocks = [block] * hf.num_hidden_layers
    tree = llama_like.around(hf, blocks, norm, hf.embedding_multiplier)
    return replace(tree, unembed=replace(tree.unembed, scale=1 / hf.logits_scaling))


def rows(tree: DecoderConfig) -> list[Row]:
    own = [*llama_like.outer_rows(tree), *llama_like.norm_rows(), *llama_like.attention_rows()]
    return [*own, *sparse_rows(tree, "model.layers.{l}.block_sparse_moe.")]


def sparse_rows(tree: DecoderConfig, source: str) -> list[Row]:
    """Rows of a mixture whose experts are stored together, by tensor names that start with `source`."""
    target, e = "blocks.{l}.mlp.", moe.n_experts(tree)
    expert = target + "experts.{e}.W_"
    return [
        Row(source + "router.layer.weight", target + "W_router", "e m -> m e"),
        Row(source + "input_linear.weight", expert + "{x}", "e (x f) m -> m f", e=e, x=["gate", "in"]),
        Row(source + "output_linear.weight", expert + "out", "e m f -> f m", e=e),
    ]
