"""ViT (Dosovitskiy et al. 2020, arXiv:2010.11929), with a pooler or a classifier of images."""

from hooked_lm.components.heads import Classifier, Pooler
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.heads import ClassToken
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "vit."
IGNORED = ("embeddings.mask_token", "decoder.*")  # of masked image modelling
NO_EFFECT = ("encoder_stride",)


def config(hf: HFConfig) -> VisionConfig:
    embed = vision_like.patch_embed(hf, n_class_tokens=1)
    pos_embed = vision_like.positions(hf, embed.patch_size, n_class_tokens=1)
    pooler = Pooler.Config(hf.hidden_size, hf.pooler_act, d_out=hf.pooler_output_size)
    has_pooler, has_classifier = hf.holds("pooler.dense.weight"), hf.holds("classifier.weight")
    return VisionConfig(
        n_ctx=pos_embed.n_ctx,
        embed=embed,
        pos_embed=pos_embed,
        blocks=(vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps, hf.qkv_bias),) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps),
        pooler=pooler if has_pooler else ClassToken.Config(hf.hidden_size),
        classifier=Classifier.Config(hf.hidden_size, len(hf.id2label)) if has_classifier else None,
    )


def rows(tree: VisionConfig) -> list[Row]:
    layer, attn, mlp = PREFIX + "encoder.layer.{v}.", vision_like.ATTENTION, vision_like.MLP_PART
    q, k, v = (f"{layer}attention.attention.{name}" for name in ("query", "key", "value"))
    of_layer = [
        *classic.norm(layer + "layernorm_before", "blocks.{v}.ln1"),
        *classic.into_attention(q, k, v, attn),
        *classic.out_of_attention(layer + "attention.output.dense", attn),
        *classic.norm(layer + "layernorm_after", "blocks.{v}.ln2"),
        *classic.into_mlp(layer + "intermediate.dense", mlp),
        *classic.out_of_mlp(layer + "output.dense", mlp),
    ]
    return [
        Row(PREFIX + "embeddings.cls_token", "embed.W_cls", "1 n m -> n m"),
        *vision_like.patch_rows(PREFIX + "embeddings.patch_embeddings.projection", tree.embed),
        Row(PREFIX + "embeddings.position_embeddings", "pos_embed.W_pos", "1 p m -> p m"),
        *vision_like.of_layers(of_layer, tree),
        *classic.norm(PREFIX + "layernorm", "ln_final"),
        Row(PREFIX + "pooler.dense.weight", "pooler.W", "o m -> m o"),
        Row(PREFIX + "pooler.dense.bias", "pooler.b"),
        Row("classifier.weight", "classifier.W", "o m -> m o"),
        Row("classifier.bias", "classifier.b"),
    ]
