"""The vision tower of CLIP (Radford et al. 2021, arXiv:2103.00020), with the projection into the space of texts."""

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.heads import ClassToken, Projection
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "vision_model."
IGNORED = ("*embeddings.position_ids",)
NO_EFFECT = ("tie_word_embeddings", "initializer_factor", "projection_dim")


def config(hf: HFConfig) -> VisionConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps)
    embed = vision_like.patch_embed(hf, bias=False, n_class_tokens=1)
    pos_embed = vision_like.positions(hf, embed.patch_size, n_class_tokens=1)
    projects = hf.holds("visual_projection.weight")
    return VisionConfig(
        n_ctx=pos_embed.n_ctx,
        embed=embed,
        pos_embed=pos_embed,
        ln_pre=norm,
        blocks=(vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps),) * hf.num_hidden_layers,
        ln_final=norm,
        pooler=ClassToken.Config(hf.hidden_size),
        projection=Projection.Config(hf.hidden_size, hf.projection_dim) if projects else None,
    )


def rows(tree: VisionConfig) -> list[Row]:
    embeddings = PREFIX + "embeddings."
    return [
        Row(embeddings + "class_embedding", "embed.W_cls", "m -> 1 m"),
        *vision_like.patch_rows(embeddings + "patch_embedding", tree.embed),
        Row(embeddings + "position_embedding.weight", "pos_embed.W_pos"),
        *classic.norm(PREFIX + "pre_layrnorm", "ln_pre"),
        *vision_like.of_layers(vision_like.clip_layer(PREFIX + "encoder.layers.{v}."), tree),
        *classic.norm(PREFIX + "post_layernorm", "ln_final"),
        Row("visual_projection.weight", "projection.W", "o m -> m o"),
    ]
