"""LLaVA-NeXT (Liu et al. 2024): LLaVA with images cut into tiles, at the resolution that fits them best."""

from dataclasses import replace
from functools import partial

from hooked_lm.components.vision.tiles import TiledImages, TileImages
from hooked_lm.families._shared import vision_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages import llava
from hooked_lm.families.vision_languages.llava_next.tile_projector import TileProjector
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX, IGNORED, NO_EFFECT = llava.PREFIX, llava.IGNORED, llava.NO_EFFECT
RENAMED = {**llava.RENAMED, r"^model\.image_newline": "image_newline"}


def config(hf: HFConfig) -> VisionLanguageConfig:
    return tiled(hf, TileImages)


def tiled(hf: HFConfig, images: type[TiledImages], max_tiles: int | None = None) -> VisionLanguageConfig:
    """The tree of a model that reads such images, in pictures of at most so many tiles."""
    tree = llava.whole(hf, partial(TileProjector.Config, max_tiles=max_tiles))
    if tree.projector.keeps_class_tokens and tree.vision.embed.n_class_tokens:
        raise ValueError("vision_feature_select_strategy='full' keeps a class token, which has no place among tiles")
    hf.ignored_by_transformers(use_image_newline_parameter=True)
    size = vision_like.square(hf.vision_config["image_size"], "image_size")
    resolutions = tuple((int(height), int(width)) for height, width in hf.image_grid_pinpoints)
    for height, width in resolutions:
        if height % size or width % size:
            raise ValueError(
                f"image_grid_pinpoints has {height} x {width}, which is no whole number of tiles of {size} x {size}"
            )
    return replace(tree, vision=replace(tree.vision, pixels=images(size, resolutions)))


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return [*llava.rows(tree), Row("image_newline", "projector.image_newline")]
