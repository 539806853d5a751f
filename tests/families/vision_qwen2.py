"""Qwen2-VL and Qwen2.5-VL: images of any size, and positions on three axes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.families._case import GROUPED, SIZES, Case, rope
from tests.families._vision import Size, VisionCase, Writer

IMAGE, BEGIN, END = 58, 41, 42  # ids: the token of images, and words around it
TEXT = {**SIZES, **GROUPED, "vocab_size": 61, "max_position_embeddings": 160}
AUTO = "AutoModelForImageTextToText"


def axes(*sections: int, theta: float = 100.0) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": [*sections]}}


def pixels(patch: int, n_channels: int = 3, n_frames: int = 2) -> Callable:
    """Draws the patches of images of any sizes."""

    def draw(images: Sequence[Sequence[Size]], generator: torch.Generator) -> dict[str, Tensor]:
        sizes = [size for row in images for size in row]
        n_patches = sum(rows * columns for rows, columns in sizes)
        drawn = torch.randn(n_patches, n_channels * n_frames * patch**2, generator=generator)
        return {"pixel_values": drawn, "image_grid_thw": torch.tensor([[1, *size] for size in sizes])}

    return draw


def select(images: dict[str, Tensor], sizes: Sequence[Sequence[Size]], row: int) -> dict[str, Tensor]:
    """The patches of the images of a row."""
    before = sum(rows * columns for each in sizes[:row] for rows, columns in each)
    n, first = sum(rows * columns for rows, columns in sizes[row]), sum(map(len, sizes[:row]))
    grids = images["image_grid_thw"][first : first + len(sizes[row])]
    return {"pixel_values": images["pixel_values"][before : before + n], "image_grid_thw": grids}


def writer(patch: int, *sizes: Size, merge: int = 2, **more: int) -> Writer:
    """Images of two sizes, with a word at both ends."""

    def ids(size: Size) -> list[int]:
        return [BEGIN, *[IMAGE] * (size[0] * size[1] // merge**2), END]

    def kinds(tokens: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": (tokens == IMAGE).int()}

    return Writer((sizes[0], sizes[1]), ids, pixels(patch, **more), select, kinds)


def whole(text: dict, vision: dict, tied: bool = False) -> dict:
    ids = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **ids}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, mrope_section=[2, 3, 3])
TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
OLD_TOWER = {"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "depth": 2}

# fmt: off
CASES = [
    VisionCase("qwen2_5_vl", "windows-of-two-squares", whole({**TEXT, **axes(2, 1, 1)}, {**TOWER, "depth": 3,
               "window_size": 16, "fullatt_block_indexes": [1]}), auto=AUTO, writer=writer(4, (6, 10), (4, 6))),
    VisionCase("qwen2_5_vl", "merging-three-one-frame-sliding", whole({**TEXT, **axes(2, 3, 3), "hidden_size": 64,
               "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
               {**TOWER, "depth": 2, "window_size": 100, "fullatt_block_indexes": [], "patch_size": 5,
               "spatial_merge_size": 3, "temporal_patch_size": 1, "in_channels": 1, "out_hidden_size": 64}), auto=AUTO,
               writer=writer(5, (6, 3), (9, 12), merge=3, n_channels=1, n_frames=1)),
    VisionCase("qwen2_vl", "two-layers", whole({**TEXT, **axes(2, 1, 1)}, OLD_TOWER), auto=AUTO, writer=writer(4, (6,
               4), (4, 8))),
    VisionCase("qwen2_vl", "merging-three-one-channel-yarn", whole({**TEXT, **YARN, "hidden_size": 64,
               "num_key_value_heads": 4}, {**OLD_TOWER, "hidden_size": 64, "spatial_merge_size": 3, "in_channels": 1,
               "patch_size": 5}), auto=AUTO, writer=writer(5, (3, 9), (6, 6), merge=3, n_channels=1)),
]
# fmt: on

# fmt: off
TOWERS = [
    Case("qwen2_5_vl_vision", "windows", {**TOWER, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1],
         "out_hidden_size": 20}, auto="AutoModel"),
    Case("qwen2_5_vl_vision", "gelu-merging-three-one-frame", {**TOWER, "depth": 2, "window_size": 32,
         "fullatt_block_indexes": [], "spatial_merge_size": 3, "temporal_patch_size": 1, "hidden_act": "gelu"},
         auto="AutoModel"),
]
# fmt: on
