"""LLaVA (Liu et al. 2023, arXiv:2304.08485 and arXiv:2310.03744): the tower of CLIP or SigLIP before any language model."""

from collections.abc import Callable

from hooked_lm.components.vision.projector import MLPProjector
from hooked_lm.families._shared import classic, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = ""
IGNORED = ("*.position_ids", "*.rotary_emb.inv_freq")
NO_EFFECT = ("image_seq_length", "ignore_index", "vocab_size")
LANGUAGE, TOWER, PROJECTOR = "language_model.model.", "vision_tower.", "multi_modal_projector."
RENAMED = {
    r"^vision_tower\.vision_model\.": TOWER,
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    r"^model\.language_model\.": LANGUAGE,
    r"^lm_head\.": "language_model.lm_head.",
}


def config(hf: HFConfig) -> VisionLanguageConfig:
    return whole(hf, MLPProjector.Config)


def whole(hf: HFConfig, projector: Callable[..., MLPProjector.Config]) -> VisionLanguageConfig:
    """The tree of a config, with a projector of this kind."""
    sides = vision_like.both_sides(hf)
    layers, keeps_class_tokens = vision_like.features_read(hf, sides["vision"])
    widths = (sides["vision"].embed.d_model * len(layers), sides["embed"].d_model)
    options = (hf.projector_hidden_act, hf.multimodal_projector_bias, keeps_class_tokens)
    return VisionLanguageConfig(
        **sides,
        projector=projector(*widths, *options),
        image_token=hf.image_token_index,
        feature_layers=layers,
    )


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [
        *vision_like.tower_rows(tree, TOWER),
        *classic.linear(PROJECTOR + "linear_1", "projector.", "in"),
        *classic.linear(PROJECTOR + "linear_2", "projector.", "out"),
        *vision_like.language_rows(tree, LANGUAGE, "language_model."),
    ]
