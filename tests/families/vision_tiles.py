"""Models whose images are cut into tiles: LLaVA-NeXT, and InternVL with its tower."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families._case import Case
from tests.families._vision import (
    AUTO,
    CLIP,
    IMAGE,
    LLAMA,
    QWEN,
    TOWER,
    Size,
    VisionCase,
    Writer,
    of_one_size,
    one_by_one,
)

INTERNVL = {**TOWER, "layer_scale_init_value": 0.7}

# fmt: off
TOWERS = [
    Case("internvl_vision", "mean-pooled", INTERNVL, auto="AutoModel"),
    Case("internvl_vision", "no-positions-relu-one-channel", {**INTERNVL, "use_absolute_position_embeddings": False,
         "hidden_act": "relu", "num_channels": 1}, auto="AutoModel"),
]
# fmt: on


def in_tiles(tile: int, counts: dict[Size, tuple[int, int]]) -> Writer:
    """Two sizes of images in pixels, each with its numbers of tiles and of tokens."""

    def draw(images: Sequence[Sequence[Size]], generator: torch.Generator) -> dict[str, Tensor]:
        sizes = [size for row in images for size in row]
        pixels = torch.zeros(len(sizes), max(counts[size][0] for size in sizes), 3, tile, tile)
        for image, size in enumerate(sizes):
            n_tiles = counts[size][0]
            pixels[image, :n_tiles] = torch.randn(n_tiles, 3, tile, tile, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}

    first, second = counts
    return Writer((first, second), lambda size: [IMAGE] * counts[size][1], draw, one_by_one)


def llava_next(text: dict, tower: dict, resolutions: list[list[int]], **fields: object) -> dict:
    sides = {"text_config": text, "vision_config": tower, "tie_word_embeddings": False}
    return {**sides, "image_token_index": IMAGE, "image_grid_pinpoints": resolutions, **fields}


def onevision(text: dict, tower: dict, resolutions: list[list[int]], **fields: object) -> dict:
    return {**llava_next(text, tower, resolutions), "video_token_index": 57, **fields}


def internvl(text: dict, tower: dict, **fields: object) -> dict:
    sides = {"text_config": text, "vision_config": {**INTERNVL_TOWER, **tower}, "tie_word_embeddings": False}
    return {**sides, "image_token_id": IMAGE, **fields}


CLIP_TOWER = {**CLIP, "num_hidden_layers": 3, "model_type": "clip_vision_model"}
SIGLIP_TOWER = {
    **TOWER,
    "num_hidden_layers": 3,
    "patch_size": 8,
    "vision_use_head": False,
    "model_type": "siglip_vision_model",
}
INTERNVL_TOWER = {**INTERNVL, "num_hidden_layers": 3, "model_type": "internvl_vision"}

# fmt: off
CASES = [
    VisionCase("llava_next", "wide-and-narrow", llava_next(LLAMA, CLIP_TOWER, [[24, 48], [48, 24], [48, 48], [72, 24],
               [24, 72]]), auto=AUTO, writer=in_tiles(24, {(30, 50): (5, 16 + 4 * 9), (20, 13): (3, 16 + 4 * 3)})),
    VisionCase("llava_next", "siglip-unused-head-two-layers-unbiased-qwen2", llava_next(QWEN,
               SIGLIP_TOWER | {"vision_use_head": True}, [[24, 24], [72, 24], [48, 48]], vision_feature_layer=[-3, 1],
               vision_feature_select_strategy="full", multimodal_projector_bias=False), auto=AUTO, writer=in_tiles(24,
               {(70, 17): (4, 9 + 9 * 4), (24, 24): (2, 9 + 3 * 4)})),
    VisionCase("internvl", "tied-qwen2", {"text_config": {**QWEN, "tie_word_embeddings": True},
               "vision_config": INTERNVL_TOWER, "image_token_id": IMAGE}, auto=AUTO, writer=of_one_size(4)),
    VisionCase("internvl", "first-layer-larger-images-relu-llama", internvl(LLAMA, {"attention_bias": True},
               vision_feature_layer=1, projector_hidden_act="relu"), auto=AUTO, writer=of_one_size(9, rows=6,
               columns=6)),
    VisionCase("internvl", "normed-rms-squares-of-four-qwen3", internvl({**LLAMA, "model_type": "qwen3", "head_dim": 8},
               {"use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True,
               "use_mean_pooling": False} | {"patch_size": 3, "image_size": [24, 24]}, downsample_ratio=0.25),
               auto=AUTO, writer=of_one_size(4, patch=3, rows=8, columns=8)),
    VisionCase("llava_onevision", "siglip-shrunk", onevision(QWEN, SIGLIP_TOWER | {"patch_size": 6}, [[24, 48], [48,
               24], [48, 48]], vision_aspect_ratio="anyres_max_1", vision_feature_select_strategy="full"), auto=AUTO,
               writer=in_tiles(24, {(30, 50): (5, 16 + 2 * 6), (20, 13): (3, 16 + 4 * 3)})),
    VisionCase("llava_onevision", "clip-two-layers-relu-llama", onevision(LLAMA, CLIP_TOWER, [[24, 24], [72, 24], [48,
               48]], vision_aspect_ratio="anyres_max_2", vision_feature_layer=[-2, 0],
               vision_feature_select_strategy="default", projector_hidden_act="relu"), auto=AUTO, writer=in_tiles(24,
               {(48, 40): (5, 16 + 6 * 5), (24, 24): (2, 16 + 4 * 5)})),
]
# fmt: on
