"""InternViT, the vision tower of InternVL (Chen et al. 2023, arXiv:2312.14238)."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.norms.scales import LayerScale
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ()
NO_EFFECT = ("initializer_factor", "layer_scale_init_value")  # the scales are in the checkpoint
NORMS = {"layer_norm": LayerNorm.Config, "rms_norm": RMSNorm.Config}
QK_EPS = 1e-6


def config(hf: HFConfig) -> VisionConfig:
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    if hf.norm_type not in NORMS:
        raise ValueError(f"norm_type={hf.norm_type!r}: known are {', '.join(map(repr, NORMS))}")
    vision_like.square(hf.image_size, "image_size")
    embed = vision_like.patch_embed(hf, n_class_tokens=1, mask_token=hf.use_mask_token)
    pos_embed = vision_like.positions(hf, embed.patch_size, n_class_tokens=1, interpolation="bicubic")
    block = vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps, hf.attention_bias)
    norm, scale = NORMS[hf.norm_type](d_model, hf.layer_norm_eps), LayerScale.Config(d_model)
    qk_norm = RMSNorm.Config(d_model // n_heads, QK_EPS, n_heads=n_heads, joint=True) if hf.use_qk_norm else None
    assert isinstance(block.attn, Attention.Config), "the attention of a ViT"
    attn = replace(block.attn, qk_norm=qk_norm)
    block = replace(block, attn=attn, ln1=norm, ln1_post=scale, ln2=norm, ln2_post=scale)
    return VisionConfig(
        n_ctx=pos_embed.n_ctx,
        embed=embed,
        pos_embed=pos_embed if hf.use_absolute_position_embeddings else None,
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=None if hf.use_mean_pooling else LayerNorm.Config(d_model, hf.layer_norm_eps),
    )


def rows(tree: VisionConfig) -> list[Row]:
    layer, attn, mlp = "encoder.layer.{v}.", vision_like.ATTENTION, vision_like.MLP_PART
    q, k, v = (f"{layer}attention.{name}_proj" for name in "qkv")
    n_heads = tree.blocks[0].attn.n_heads
    of_layer = [
        *classic.norm(layer + "layernorm_before", "blocks.{v}.ln1"),
        *classic.into_attention(q, k, v, attn),
        *(Row(f"{layer}attention.{x}_norm.weight", f"{attn}{x}_norm.w", "(n h) -> n h", n=n_heads) for x in "qk"),
        *classic.out_of_attention(layer + "attention.projection_layer", attn),
        Row(layer + "lambda_1", "blocks.{v}.ln1_post.w"),
        *classic.norm(layer + "layernorm_after", "blocks.{v}.ln2"),
        *classic.into_mlp(layer + "mlp.fc1", mlp),
        *classic.out_of_mlp(layer + "mlp.fc2", mlp),
        Row(layer + "lambda_2", "blocks.{v}.ln2_post.w"),
    ]
    return [
        Row("embeddings.cls_token", "embed.W_cls", "1 n m -> n m"),
        Row("embeddings.mask_token", "embed.W_mask", "1 1 m -> m"),
        *vision_like.patch_rows("embeddings.patch_embeddings.projection", tree.embed),
        Row("embeddings.position_embeddings", "pos_embed.W_pos", "1 p m -> p m"),
        *vision_like.of_layers(of_layer, tree),
        *classic.norm("layernorm", "ln_final"),
    ]
