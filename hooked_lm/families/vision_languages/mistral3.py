"""Mistral Small 3.1 (Mistral AI 2025): the tower of Pixtral, whose patches are merged before any language model."""

from dataclasses import replace

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.merger import MergingProjector
from hooked_lm.components.vision.pixels import SizedImages
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages import llava
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "RENAMED", "config", "rows"]

PREFIX, RENAMED = llava.PREFIX, llava.RENAMED
IMAGE_TEXT = ImageText(end_of_row="[IMG_BREAK]", after="[IMG_END]")
IGNORED = (*llava.IGNORED, "*patch_positional_embedding.inv_freq")


def config(hf: HFConfig) -> VisionLanguageConfig:
    sides = vision_like.both_sides(hf)
    vision, layer = sides["vision"], hf.vision_feature_layer
    if not isinstance(layer, int):
        raise ValueError(f"vision_feature_layer={layer!r}: the norm before the projector is as wide as one layer")
    norm = RMSNorm.Config(vision.embed.d_model, hf.part("text_config").rms_norm_eps)
    projector = MergingProjector.Config(
        vision.embed.d_model,
        sides["embed"].d_model,
        norm,
        hf.spatial_merge_size,
        hf.projector_hidden_act,
        hf.multimodal_projector_bias,
    )
    return VisionLanguageConfig(
        **{**sides, "vision": replace(vision, pixels=SizedImages(hf.spatial_merge_size))},
        projector=projector,
        image_token=hf.image_token_index,
        image_text=IMAGE_TEXT,
        feature_layers=(layer % (len(vision.blocks) + 1),),
    )


def rows(tree: VisionLanguageConfig) -> list[Row]:
    source, target, merge = llava.PROJECTOR, "projector.", tree.projector.merge
    return [
        *vision_like.tower_rows(tree, llava.TOWER),
        *classic.norm(source + "norm", target + "ln"),
        Row(
            source + "patch_merger.merging_layer.weight", target + "W_merge", "o (m a b) -> (a b m) o", a=merge, b=merge
        ),
        *classic.linear(source + "linear_1", target, "in"),
        *classic.linear(source + "linear_2", target, "out"),
        *vision_like.language_rows(tree, llava.LANGUAGE, "language_model."),
    ]
