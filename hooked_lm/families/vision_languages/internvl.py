"""InternVL 2.5 to 3.5 (Chen et al. 2024, arXiv:2412.05271): squares of patches become tokens; each tile is an image."""

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages import llava
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX, IGNORED, RENAMED = llava.PREFIX, llava.IGNORED, llava.RENAMED
NO_EFFECT = ("image_seq_length",)
NORM_EPS = 1e-5


def config(hf: HFConfig) -> VisionLanguageConfig:
    sides = vision_like.both_sides(hf)
    vision, d_model = sides["vision"], sides["embed"].d_model
    layers, keeps_class_tokens = vision_like.features_read(hf, vision)
    if keeps_class_tokens or len(layers) > 1:
        raise ValueError(
            f"vision_feature_select_strategy={hf.vision_feature_select_strategy!r} with vision_feature_layer="
            f"{hf.vision_feature_layer!r} is not supported: squares of patches need one layer without class tokens"
        )
    merge = round(1 / hf.downsample_ratio)
    if abs(merge * hf.downsample_ratio - 1) > 1e-6:
        raise ValueError(
            f"downsample_ratio={hf.downsample_ratio!r} is not supported: it must be one over a whole number"
        )
    d_merged = vision.embed.d_model * merge**2
    return VisionLanguageConfig(
        **sides,
        projector=PatchMerger.Config(
            vision.embed.d_model,
            d_model,
            LayerNorm.Config(d_merged, NORM_EPS),
            merge,
            hf.projector_hidden_act,
            norm_after=True,
            d_mlp=d_model,
        ),
        image_token=hf.image_token_id,
        image_text=ImageText(before="<img>", after="</img>"),
        feature_layers=None if hf.vision_feature_layer == -1 else layers,  # -1 is the output of the tower
    )


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [*llava.rows(tree), *classic.norm(llava.PROJECTOR + "layer_norm", "projector.ln")]
