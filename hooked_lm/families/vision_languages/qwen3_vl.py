"""Qwen3-VL (Qwen Team 2025, arXiv:2511.21631): features of several depths of the tower enter the first layers of the decoder."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.blocks.deepstack import DeepstackBlock
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.vision.axis_positions import AxisPositions
from hooked_lm.components.vision.deepstack import Deepstack, DeepstackMerger
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.families._shared import classic, mrope, qwen_tower, vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders.qwen3_vl_vision import EPS
from hooked_lm.models.config.tree import VisionConfig, VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "merger", "merger_rows", "rows", "sides", "sides_rows"]

PREFIX = ""
IGNORED = ("*.inv_freq",)
LANGUAGE, TOWER = "model.language_model.", "model.visual."


def config(hf: HFConfig) -> VisionLanguageConfig:
    fields, depths = sides(hf, (24, 20, 20)), list(hf.vision_config["deepstack_visual_indexes"])
    n_layers, n_depths, output = len(fields["vision"].blocks), len(depths), merger(hf, fields["vision"])
    if depths != sorted({*depths} & {*range(n_layers)}) or n_depths > len(fields["blocks"]):
        raise ValueError(
            f"deepstack_visual_indexes={depths} must be blocks of the tower, which has {n_layers}, in their order, and no more "
            f"than the {len(fields['blocks'])} layers of the decoder"
        )
    inner = replace(output, norm=LayerNorm.Config(output.d_merged, EPS), norm_after=True)
    deep = [DeepstackBlock.Config(**vars(block)) for block in fields["blocks"][:n_depths]]
    return VisionLanguageConfig(
        **{**fields, "blocks": (*deep, *fields["blocks"][n_depths:])},
        projector=DeepstackMerger.Config(**vars(output), deepstack=(inner,) * n_depths),
        feature_layers=(n_layers, *(depth + 1 for depth in depths)),
        rules=(AxisPositions(), Deepstack()),
    )


def sides(hf: HFConfig, sections: tuple[int, ...]) -> dict[str, Any]:
    """The fields of both sides, with interleaved positions on three axes."""
    fields = vision_like.both_sides(hf)
    blocks = mrope.with_axes(fields["blocks"], hf.text_config["rope_parameters"], sections, interleaved=True)
    return {**fields, "blocks": blocks, "image_token": hf.image_token_id}


def merger(hf: HFConfig, vision: VisionConfig) -> PatchMerger.Config:
    """The merger of the tower's output."""
    return qwen_tower.merger(vision, hf.vision_config["out_hidden_size"], LayerNorm.Config(vision.embed.d_model, EPS))


def rows(tree: VisionLanguageConfig) -> list[Row]:
    n_depths = len(tree.projector.deepstack)
    deep = [(f"{TOWER}deepstack_merger_list.{i}.", f"projector.deepstack.{i}.") for i in range(n_depths)]
    return [*sides_rows(tree), *(row for names in deep for row in merger_rows(*names))]


def sides_rows(tree: VisionLanguageConfig) -> list[Row]:
    """Both sides, and the merger of the tower's output."""
    return [
        *vision_like.tower_rows(tree, TOWER),
        *merger_rows(TOWER + "merger.", "projector."),
        *vision_like.language_rows(tree, LANGUAGE, ""),
    ]


def merger_rows(source: str, target: str) -> list[Row]:
    """A merger."""
    return [
        *classic.norm(source + "norm", target + "ln"),
        *classic.linear(source + "linear_fc1", target, "in"),
        *classic.linear(source + "linear_fc2", target, "out"),
    ]
