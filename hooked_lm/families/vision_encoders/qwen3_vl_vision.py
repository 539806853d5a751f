"""The vision tower of Qwen3-VL (Qwen Team 2025, arXiv:2511.21631): learned positions on a square grid, interpolated to that of an
image, besides axial rotary positions."""

import math

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.patch_embed import ImagePosEmbed
from hooked_lm.families._shared import classic, qwen_tower
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["EPS", "IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX, EPS = "", 1e-6
IGNORED = ("*.rotary_pos_emb.inv_freq",)
NO_EFFECT = ("out_hidden_size", "deepstack_visual_indexes")  # of the mergers


def config(hf: HFConfig) -> VisionConfig:
    d_model, n_heads, norm = hf.hidden_size, hf.num_heads, LayerNorm.Config(hf.hidden_size, EPS)
    side, d_head = math.isqrt(hf.num_position_embeddings), d_model // n_heads
    if side**2 != hf.num_position_embeddings:
        raise ValueError(f"num_position_embeddings={hf.num_position_embeddings} are not those of a square grid")
    shape = {"d_model": d_model, "n_heads": n_heads, "d_head": d_head, "qkv_bias": True, "out_bias": True}
    attn = Attention.Config(**shape, rotary=qwen_tower.rotary(hf, d_head), causal=False)
    mlp = MLP.Config(d_model, hf.intermediate_size, hf.hidden_act)
    return VisionConfig(
        n_ctx=qwen_tower.N_CTX,
        embed=qwen_tower.patch_embed(hf, d_model, bias=True),
        pos_embed=ImagePosEmbed.Config(side, side, d_model, interpolation="bilinear", align_corners=True),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.depth,
        pixels=qwen_tower.pixels(hf),
    )


def rows(tree: VisionConfig) -> list[Row]:
    layer, mlp = qwen_tower.LAYER + "mlp.linear_", qwen_tower.PART + "mlp."
    of_mlp = [*classic.into_mlp(layer + "fc1", mlp), *classic.out_of_mlp(layer + "fc2", mlp)]
    return [*qwen_tower.rows(tree, of_mlp), Row("pos_embed.weight", "pos_embed.W_pos")]
