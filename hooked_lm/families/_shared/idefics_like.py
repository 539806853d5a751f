"""Idefics3 and SmolVLM: SigLIP's layers on pictures of any size in square images, and squares of patches for the decoder."""

from dataclasses import replace

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.merger import LinearMerger
from hooked_lm.components.vision.patch_embed import BucketPosEmbed
from hooked_lm.components.vision.pixels import ImageRows, MaskedImages
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionConfig, VisionLanguageConfig
from hooked_lm.weights import Row

AROUND = "<fake_token_around_image>"
PREFIX, IGNORED = "", ("*.position_ids", "*.rotary_emb.inv_freq")
# Written for the processor and for other architectures of the code that trained these models.
NO_EFFECT = ("max_image_size", "size", "perceiver_config", "pixel_shuffle_factor", "vocab_size")


def tower(hf: HFConfig) -> VisionConfig:
    embed = vision_like.patch_embed(hf)
    side = vision_like.square(hf.image_size, "image_size") // embed.patch_size
    return VisionConfig(
        n_ctx=side**2,
        embed=embed,
        pos_embed=BucketPosEmbed.Config(side, hf.hidden_size),
        blocks=(vision_like.block(hf, hf.hidden_act, hf.layer_norm_eps),) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps),
        pixels=MaskedImages(),
    )


def tower_rows(tree: VisionConfig) -> list[Row]:
    return [
        *vision_like.patch_rows("embeddings.patch_embedding", tree.embed),
        Row("embeddings.position_embedding.weight", "pos_embed.W_pos"),
        *vision_like.of_layers(vision_like.clip_layer("encoder.layers.{v}."), tree),
        *classic.norm("post_layernorm", "ln_final"),
    ]


def composite(hf: HFConfig, pixels: ImageRows) -> VisionLanguageConfig:
    sides = vision_like.both_sides(hf)
    return VisionLanguageConfig(
        **{**sides, "vision": replace(sides["vision"], pixels=pixels)},
        projector=LinearMerger.Config(sides["vision"].embed.d_model, sides["embed"].d_model, hf.scale_factor),
        image_token=hf.image_token_id,
        image_text=ImageText(before=f"{AROUND}<global-img>", after=AROUND),
    )


def composite_rows(tree: VisionLanguageConfig) -> list[Row]:
    return [
        *vision_like.tower_rows(tree, "model.vision_model."),
        Row("model.connector.modality_projection.proj.weight", "projector.W", "o m -> m o"),
        *vision_like.language_rows(tree, "model.text_model.", ""),
    ]
