"""Vision-language models: LLaVA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families._case import GROUPED, SIZES
from tests.families._vision import Size, VisionCase, Writer
from tests.families.vision_encoders import CLIP

IMAGE = 58  # the token of images
TEXT = {**SIZES, **GROUPED, "vocab_size": 61, "max_position_embeddings": 120}


def pixels(n_channels: int = 3, patch: int = 6, rows: int = 4, columns: int = 4):
    """Draws images of one size."""

    def draw(images: Sequence[Sequence[Size]], generator: torch.Generator) -> dict[str, Tensor]:
        n_images = sum(map(len, images))
        size = (n_images, n_channels, rows * patch, columns * patch)
        return {"pixel_values": torch.randn(size, generator=generator)}

    return draw


def one_by_one(images: dict[str, Tensor], sizes: Sequence[Sequence[Size]], row: int) -> dict[str, Tensor]:
    """The images of a row, where every tensor has one entry for each image."""
    first = sum(map(len, sizes[:row]))
    return {name: x[first : first + len(sizes[row])] for name, x in images.items()}


def of_one_size(n_tokens: int, **size: int) -> Writer:
    """All images have as many tokens, without others around them."""
    return Writer(((4, 4), (4, 4)), lambda size: [IMAGE] * n_tokens, pixels(**size), one_by_one)


def llava(text: dict, tower: dict, **fields: object) -> dict:
    return {
        "text_config": text,
        "vision_config": tower,
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        **fields,
    }


LLAMA, QWEN = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
TOWER = {**CLIP, "num_hidden_layers": 3, "model_type": "clip_vision_model"}
AUTO = "AutoModelForImageTextToText"

CASES = [
    VisionCase("llava", "last-but-one", llava(LLAMA, TOWER), auto=AUTO, writer=of_one_size(16)),
    VisionCase(
        "llava",
        "three-layers-full-unbiased-qwen2",
        llava(
            QWEN,
            TOWER,
            vision_feature_layer=[-3, 1, -1],
            vision_feature_select_strategy="full",
            multimodal_projector_bias=False,
        ),
        auto=AUTO,
        writer=of_one_size(17),
    ),
    VisionCase(
        "llava",
        "last-relu-small-patches",
        llava(LLAMA, {**TOWER, "patch_size": 8}, vision_feature_layer=-1, projector_hidden_act="relu"),
        auto=AUTO,
        writer=of_one_size(9),
    ),
]
