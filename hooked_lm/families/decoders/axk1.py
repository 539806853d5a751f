"""A.X K1 (SK Telecom 2026, arXiv:2601.09200): DeepSeek-V3 with a norm after the experts."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import deepseek, llama_like
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import glm4_moe_lite
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

NORM = "model.layers.{l}.post_mlp_layernorm.weight"
IGNORED = (*llama_like.IGNORED, NORM.replace("{l}", "*"))  # published dense layers have such a norm, which is not used
NO_EFFECT = (*deepseek.NO_EFFECT, "num_nextn_predict_layers", "moe_layer_freq", "first_k_dense_replace")


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(head_dim=hf.qk_rope_head_dim)  # only the rotary embedding of transformers reads it
    norm = llama_like.rms_norm(hf)
    return _with_mixtures(glm4_moe_lite.config(hf), lambda block, mixture: replace(block, ln2_post=norm))


def adjusted_to_tensors(tree: DecoderConfig, tensors: Mapping[str, Tensor]) -> DecoderConfig:
    """The tree without corrections of the experts' choice if there are none, as in published checkpoints."""
    if not tensors or any(name.endswith("e_score_correction_bias") for name in tensors):
        return tree

    def uncorrected(block: PreNormBlock.Config, mixture: MoE.Config) -> PreNormBlock.Config:
        assert isinstance(mixture.router, GroupedSigmoidRouter)
        return replace(block, mlp=replace(mixture, router=replace(mixture.router, corrected=False)))

    return _with_mixtures(tree, uncorrected)


def _with_mixtures(
    tree: DecoderConfig, change: Callable[[PreNormBlock.Config, MoE.Config], PreNormBlock.Config]
) -> DecoderConfig:
    """The tree with changed blocks where they have experts."""
    blocks = [change(block, block.mlp) if isinstance(block.mlp, MoE.Config) else block for block in tree.blocks]
    return replace(tree, blocks=tuple(blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    return [*deepseek.rows(tree), Row(NORM, "blocks.{l}.ln2_post.w")]
