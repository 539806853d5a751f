"""The vision tower of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923): attention within windows, and to all patches in a few
layers."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, qwen_tower
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders.qwen2_5_vl_vision.windowed import PatchWindowAttention
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ("*.rotary_pos_emb.inv_freq",)
NO_EFFECT = ("tokens_per_second",)  # of videos


def config(hf: HFConfig) -> VisionConfig:
    hf = qwen_tower.checked(hf)
    d_model, n_heads, pixels = hf.hidden_size, hf.num_heads, qwen_tower.pixels(hf)
    embed, norm = qwen_tower.patch_embed(hf, d_model), RMSNorm.Config(d_model, 1e-6)
    shape = {"d_model": d_model, "n_heads": n_heads, "d_head": d_model // n_heads, "qkv_bias": True, "out_bias": True}
    rotary, mlp = (
        qwen_tower.rotary(hf, d_model // n_heads),
        GatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act, True),
    )
    side = hf.window_size // pixels.merge // embed.patch_size * pixels.merge
    if side < 1:
        raise ValueError(
            f"window_size={hf.window_size} holds no square of {pixels.merge} patches of {embed.patch_size} pixels"
        )
    full = Attention.Config(**shape, rotary=rotary, causal=False)
    windowed = PatchWindowAttention.Config(**shape, rotary=rotary, causal=False, side=side)
    attns = [full if layer in hf.fullatt_block_indexes else windowed for layer in range(hf.depth)]
    tree = VisionConfig(
        n_ctx=qwen_tower.N_CTX,
        embed=embed,
        blocks=tuple(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm) for attn in attns),
        pixels=pixels,
    )
    return replace(tree, merger=qwen_tower.merger(tree, hf.out_hidden_size, norm))


def rows(tree: VisionConfig) -> list[Row]:
    return qwen_tower.rows(tree, classic.gated_mlp(qwen_tower.LAYER + "mlp.", qwen_tower.PART + "mlp."))
