"""Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923), and agents that see a screen, as UI-TARS and GUI-Owl: a tower with rotary
positions, a merger of squares of patches, and Qwen2.5 with rotary positions on three axes."""

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.vision.axis_positions import AxisPositions
from hooked_lm.families._shared import mrope, qwen_tower, vision_like
from hooked_lm.families._shared.qwen_tower import RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = ""
IGNORED = ("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq")
NO_EFFECT: tuple[str, ...] = ()


def config(hf: HFConfig) -> VisionLanguageConfig:
    sides = vision_like.both_sides(hf)
    sides["blocks"] = mrope.with_axes(sides["blocks"], hf.text_config["rope_parameters"], (16, 24, 24))
    vision = sides["vision"]
    norm = RMSNorm.Config(vision.embed.d_model, 1e-6)
    tree = VisionLanguageConfig(
        **sides,
        projector=qwen_tower.merger(vision, hf.vision_config["out_hidden_size"], norm),
        image_token=hf.image_token_id,
        rules=(AxisPositions(),),
    )
    vision_like.read_repeated(hf)
    return tree


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [
        *vision_like.tower_rows(tree, qwen_tower.VISUAL),
        *qwen_tower.merger_rows(),
        *vision_like.language_rows(tree, "model.", ""),
    ]
