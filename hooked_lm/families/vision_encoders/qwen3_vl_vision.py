"""The vision tower of Qwen3-VL (Qwen Team 2025, arXiv:2511.21631): learned positions on a square grid, interpolated to that of an
image, besides axial rotary positions."""

import math
from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.deepstack import DeepstackMerger
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.components.vision.patch_embed import ImagePosEmbed
from hooked_lm.families._shared import classic, qwen_tower
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "merger", "merger_rows", "rows", "tower"]

PREFIX, EPS = "", 1e-6
IGNORED = ("*.rotary_pos_emb.inv_freq",)


def config(hf: HFConfig) -> VisionConfig:
    tree, depths = tower(hf), list(hf.deepstack_visual_indexes)
    if depths != sorted({*depths} & {*range(len(tree.blocks))}):
        raise ValueError(
            f"deepstack_visual_indexes={depths} must be blocks of the tower, which has {len(tree.blocks)}, in their order"
        )
    output = merger(hf, tree)
    inner = replace(output, norm=LayerNorm.Config(output.d_merged, EPS), norm_after=True)
    after = tuple(depth + 1 for depth in depths)
    return replace(tree, merger=DeepstackMerger.Config(**vars(output), deepstack=(inner,) * len(depths), depths=after))


def tower(hf: HFConfig) -> VisionConfig:
    """The tower before its merger."""
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


def merger(hf: HFConfig, tree: VisionConfig) -> PatchMerger.Config:
    """The merger of the tower's output."""
    return qwen_tower.merger(tree, hf.out_hidden_size, LayerNorm.Config(tree.embed.d_model, EPS))


def rows(tree: VisionConfig) -> list[Row]:
    layer, mlp = qwen_tower.LAYER + "mlp.linear_", qwen_tower.PART + "mlp."
    of_mlp = [*classic.into_mlp(layer + "fc1", mlp), *classic.out_of_mlp(layer + "fc2", mlp)]
    before = qwen_tower.rows(replace(tree, merger=None), of_mlp)
    return [*before, Row("pos_embed.weight", "pos_embed.W_pos"), *merger_rows(tree.merger)]


def merger_rows(cfg: PatchMerger.Config | None, prefix: str = "", target: str = "merger.") -> list[Row]:
    """The mergers of a tower whose tensors have this prefix; none without any."""
    n_depths = len(cfg.deepstack) if isinstance(cfg, DeepstackMerger.Config) else 0
    parts = {"merger.": target} if cfg is not None else {}
    parts |= {f"deepstack_merger_list.{i}.": f"{target}deepstack.{i}." for i in range(n_depths)}
    found = []
    for source, place in parts.items():
        found += classic.norm(prefix + source + "norm", place + "ln")
        found += classic.linear(prefix + source + "linear_fc1", place, "in")
        found += classic.linear(prefix + source + "linear_fc2", place, "out")
    return found
