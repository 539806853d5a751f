"""The vision tower of Pixtral (Agrawal et al. 2024, arXiv:2410.07073): rotary positions of rows and columns."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.vision.pixels import SizedImages
from hooked_lm.families._shared import classic, qwen_tower, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ("*patch_positional_embedding.inv_freq",)
NO_EFFECT = ("vocab_size",)


def config(hf: HFConfig) -> VisionConfig:
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    hf.require(head_dim=d_model // n_heads)
    embed, norm = vision_like.patch_embed(hf, bias=False), RMSNorm.Config(d_model, 1e-5)
    height, width = vision_like.image_size(hf.image_size)
    rotary = qwen_tower.rotary(hf, d_model // n_heads, alternating=True)
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, rotary=rotary, causal=False)
    block = PreNormBlock.Config(
        attn=attn, ln1=norm, mlp=GatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act), ln2=norm
    )
    return VisionConfig(
        n_ctx=(height // embed.patch_size)
        * (width // embed.patch_size),  # that the processor makes; positions have no end
        embed=embed,
        ln_pre=norm,
        blocks=(block,) * hf.num_hidden_layers,
        pixels=SizedImages(),
    )


def rows(tree: VisionConfig) -> list[Row]:
    layer, part = "transformer.layers.{v}.", "blocks.{v}."
    of_layer = [
        *classic.norm(layer + "attention_norm", part + "ln1"),
        *classic.attention(layer + "attention.", part + "attn."),
        *classic.norm(layer + "ffn_norm", part + "ln2"),
        *classic.gated_mlp(layer + "feed_forward.", part + "mlp."),
    ]
    return [
        *vision_like.patch_rows("patch_conv", tree.embed),
        *classic.norm("ln_pre", "ln_pre"),
        *vision_like.of_layers(of_layer, tree),
    ]
