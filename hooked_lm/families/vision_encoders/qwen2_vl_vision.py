"""The vision tower of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191)."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic, qwen_tower
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ("*.rotary_pos_emb.inv_freq",)


def config(hf: HFConfig) -> VisionConfig:
    hf = qwen_tower.checked(hf)
    d_model, n_heads, norm = hf.embed_dim, hf.num_heads, LayerNorm.Config(hf.embed_dim, 1e-6)
    d_head = d_model // n_heads
    rotary = qwen_tower.rotary(hf, d_head)
    attn = Attention.Config(d_model, n_heads, d_head, qkv_bias=True, out_bias=True, rotary=rotary, causal=False)
    mlp = MLP.Config(d_model, int(d_model * hf.mlp_ratio), hf.hidden_act)
    tree = VisionConfig(
        n_ctx=qwen_tower.N_CTX,
        embed=qwen_tower.patch_embed(hf, d_model),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.depth,
        pixels=qwen_tower.pixels(hf),
    )
    return replace(tree, merger=qwen_tower.merger(tree, hf.hidden_size, norm))


def rows(tree: VisionConfig) -> list[Row]:
    layer, mlp = qwen_tower.LAYER + "mlp.", qwen_tower.PART + "mlp."
    return qwen_tower.rows(tree, [*classic.into_mlp(layer + "fc1", mlp), *classic.out_of_mlp(layer + "fc2", mlp)])
