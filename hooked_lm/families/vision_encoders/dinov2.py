"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193): scaled sublayers, and positions for images of any size."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.heads import Classifier
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.scales import LayerScale
from hooked_lm.components.vision.heads import ClassAndMean, ClassToken
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "dinov2."
IGNORED = ()
# of the class that gives several layers to detectors; the scales are in the checkpoint
NO_EFFECT = ("apply_layernorm", "reshape_hidden_states", "out_*", "stage_names", "layerscale_value", "drop_path_rate")


def config(hf: HFConfig) -> VisionConfig:
    return tower(hf, hf.use_mask_token)


def tower(hf: HFConfig, mask_token: bool, n_registers: int = 0, **positions: Any) -> VisionConfig:
    """The tree of a config with so many registers; `positions` are fields of the position embedding."""
    d_model = hf.hidden_size
    embed = vision_like.patch_embed(hf, n_class_tokens=1, n_registers=n_registers, mask_token=mask_token)
    pos_embed = vision_like.positions(
        hf, embed.patch_size, n_class_tokens=1, n_registers=n_registers, interpolation="bicubic", **positions
    )
    has_classifier = hf.holds("classifier.weight")
    pooler = ClassAndMean.Config(d_model, embed.n_before) if has_classifier else ClassToken.Config(d_model)
    return VisionConfig(
        n_ctx=pos_embed.n_ctx,
        embed=embed,
        pos_embed=pos_embed,
        blocks=(_block(hf),) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(d_model, hf.layer_norm_eps),
        pooler=pooler,
        classifier=Classifier.Config(2 * d_model, len(hf.id2label)) if has_classifier else None,
    )


def _block(hf: HFConfig) -> vision_like.Block:
    d_model, scale, d_mlp = hf.hidden_size, LayerScale.Config(hf.hidden_size), int(hf.hidden_size * hf.mlp_ratio)
    narrow = (int(d_mlp * 2 / 3) + 7) // 8 * 8
    mlp = (
        GatedMLP.Config(d_model, narrow, bias=True) if hf.use_swiglu_ffn else MLP.Config(d_model, d_mlp, hf.hidden_act)
    )
    block = vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps, hf.qkv_bias, mlp=mlp)
    return replace(block, ln1_post=scale, ln2_post=scale)


def rows(tree: VisionConfig) -> list[Row]:
    return tower_rows(tree, PREFIX)


def tower_rows(tree: VisionConfig, prefix: str) -> list[Row]:
    """The rows of a tower whose tensors have this prefix."""
    layer, attn, mlp = prefix + "encoder.layer.{v}.", vision_like.ATTENTION, vision_like.MLP_PART
    q, k, v = (f"{layer}attention.attention.{name}" for name in ("query", "key", "value"))
    of_layer = [
        *classic.norm(layer + "norm1", "blocks.{v}.ln1"),
        *classic.into_attention(q, k, v, attn),
        *classic.out_of_attention(layer + "attention.output.dense", attn),
        Row(layer + "layer_scale1.lambda1", "blocks.{v}.ln1_post.w"),
        *classic.norm(layer + "norm2", "blocks.{v}.ln2"),
        *_mlp_rows(tree, layer + "mlp.", mlp),
        Row(layer + "layer_scale2.lambda1", "blocks.{v}.ln2_post.w"),
    ]
    embeddings = prefix + "embeddings."
    return [
        Row(embeddings + "cls_token", "embed.W_cls", "1 n m -> n m"),
        Row(embeddings + "register_tokens", "embed.W_reg", "1 n m -> n m"),
        Row(embeddings + "mask_token", "embed.W_mask", "1 m -> m"),
        *vision_like.patch_rows(embeddings + "patch_embeddings.projection", tree.embed),
        Row(embeddings + "position_embeddings", "pos_embed.W_pos", "1 p m -> p m"),
        *vision_like.of_layers(of_layer, tree),
        *classic.norm(prefix + "layernorm", "ln_final"),
        Row("classifier.weight", "classifier.W", "o m -> m o"),
        Row("classifier.bias", "classifier.b"),
    ]


def _mlp_rows(tree: VisionConfig, source: str, target: str) -> list[Row]:
    if not isinstance(tree.blocks[0].mlp, GatedMLP.Config):
        return [*classic.into_mlp(source + "fc1", target), *classic.out_of_mlp(source + "fc2", target)]
    return [
        Row(source + "weights_in.weight", target + "W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "weights_in.bias", target + "b_{x}", "(x f) -> f", x=["gate", "in"]),
        *classic.out_of_mlp(source + "weights_out", target),
    ]
