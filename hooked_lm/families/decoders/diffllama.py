"""DiffLlama: LLaMA with differential attention (Ye et al. 2024, arXiv:2410.05258), whose norm of differences has no weight."""

from dataclasses import replace
from math import exp

from hooked_lm.components.attention.differential import LAMBDAS, DifferenceNorm, DifferentialAttention
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("lambda_std_dev",)  # initialisation


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    tree = llama_like.decoder(hf, attn)
    blocks = []
    for layer, block in enumerate(tree.blocks):
        norm = DifferenceNorm.Config(2 * attn.d_head, hf.rms_norm_eps, lam_init=0.8 - 0.6 * exp(-0.3 * layer))
        blocks.append(replace(block, attn=DifferentialAttention.Config(**{**vars(attn), "z_norm": norm})))
    return replace(tree, blocks=tuple(blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *(row for row in llama_like.rows(tree) if not row.target.endswith(".W_O")),
        Row(source + "o_proj.weight", target + "W_O_pair", "m (n h) -> n h m"),
        *(Row(source + name, f"{target}z_norm.{name}") for name in LAMBDAS),
    ]
