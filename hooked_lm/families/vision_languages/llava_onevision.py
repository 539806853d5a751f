"""LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): LLaVA-NeXT with smaller pictures, and several images in one tile each."""

from hooked_lm.components.vision.tiles import TileOrWholeImages
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages import llava_next
from hooked_lm.models.config.tree import VisionLanguageConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX, IGNORED, RENAMED, rows = llava_next.PREFIX, llava_next.IGNORED, llava_next.RENAMED, llava_next.rows
NO_EFFECT = (*llava_next.NO_EFFECT, "video_token_index")
LARGEST = "anyres_max_"


def config(hf: HFConfig) -> VisionLanguageConfig:
    n_tiles = hf.vision_aspect_ratio.removeprefix(LARGEST)
    if not n_tiles.isdecimal() or hf.vision_aspect_ratio != LARGEST + n_tiles:
        raise ValueError(f"vision_aspect_ratio={hf.vision_aspect_ratio!r}: known is '{LARGEST}' with a number of tiles")
    return llava_next.tiled(hf, TileOrWholeImages, int(n_tiles))
