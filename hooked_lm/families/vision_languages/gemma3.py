"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): images of pooled tokens that see each other in both directions."""

import math

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.vision.image_rules import BidirectionalImages
from hooked_lm.components.vision.image_text import ImageText
from hooked_lm.components.vision.projector import PoolingProjector
from hooked_lm.families._shared import vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages.llava import IGNORED, LANGUAGE, PREFIX, PROJECTOR, RENAMED, TOWER
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

IMAGE_TEXT = ImageText("<start_of_image>", before="\n\n<start_of_image>", after="<end_of_image>\n\n")
NO_EFFECT = ("boi_token_index", "eoi_token_index")


def config(hf: HFConfig) -> VisionLanguageConfig:
    hf.part("text_config").require(use_bidirectional_attention=False)
    sides = vision_like.both_sides(hf)
    tower, ln = (
        sides["vision"],
        RMSNorm.Config(hf.vision_config["hidden_size"], hf.vision_config["layer_norm_eps"], offset=1.0),
    )
    rows, columns = tower.grid
    if rows != columns:
        raise ValueError(f"the tower has {rows} x {columns} patches; Gemma 3 reads squares only")
    size = rows // math.isqrt(hf.mm_tokens_per_image)
    return VisionLanguageConfig(
        **sides,
        projector=PoolingProjector.Config(rows, columns, size, sides["embed"].d_model, ln),
        image_token=hf.image_token_index,
        rules=(BidirectionalImages(),),
        image_text=IMAGE_TEXT,
    )


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [
        *vision_like.tower_rows(tree, TOWER),
        Row(PROJECTOR + "mm_soft_emb_norm.weight", "projector.ln.w"),
        Row(PROJECTOR + "mm_input_projection_weight", "projector.W"),
        *vision_like.language_rows(tree, LANGUAGE, "language_model."),
    ]
