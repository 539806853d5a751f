"""Qwen3-VL (Qwen Team 2025, arXiv:2511.21631): features of several depths of the tower enter the first layers of the decoder."""

from typing import Any

from hooked_lm.components.vision.deepstack import Deepstack, DeepstackBlock, DeepstackMerger
from hooked_lm.components.vision.image_rules import AxisPositions
from hooked_lm.families._shared import mrope, qwen_tower, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders import qwen3_vl_vision
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows", "sides"]

PREFIX = ""
IGNORED = ("*.inv_freq",)
LANGUAGE, TOWER = "model.language_model.", "model.visual."


def config(hf: HFConfig) -> VisionLanguageConfig:
    fields = sides(hf, (24, 20, 20))
    merger, blocks = qwen3_vl_vision.config(hf.part("vision_config")).merger, fields["blocks"]
    assert isinstance(merger, DeepstackMerger.Config), "that of this tower"
    if len(merger.depths) > len(blocks):
        raise ValueError(
            f"the features of {len(merger.depths)} depths are more than the {len(blocks)} layers of the decoder"
        )
    deep = [DeepstackBlock.Config(**vars(block)) for block in blocks[: len(merger.depths)]]
    return VisionLanguageConfig(
        **{**fields, "blocks": (*deep, *blocks[len(deep) :])},
        projector=merger,
        feature_layers=(len(fields["vision"].blocks), *merger.depths),
        rules=(AxisPositions(), Deepstack()),
    )


def sides(hf: HFConfig, sections: tuple[int, ...]) -> dict[str, Any]:
    """The fields of both sides, with interleaved positions on three axes."""
    fields = vision_like.both_sides(hf)
    blocks = mrope.with_axes(fields["blocks"], hf.text_config["rope_parameters"], sections, interleaved=True)
    return {**fields, "blocks": blocks, "image_token": hf.image_token_id, "image_text": qwen_tower.IMAGE_TEXT}


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [
        *vision_like.tower_rows(tree, TOWER),
        *qwen3_vl_vision.merger_rows(tree.projector, TOWER, "projector."),
        *vision_like.language_rows(tree, LANGUAGE, ""),
    ]
