"""Pixtral's tower alone, in Mistral Small 3.1 and in LLaVA: images of any size, with padding below and at the right."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families._case import Case
from tests.families._vision import AUTO, IMAGE, LLAMA, QWEN, Size, VisionCase, Writer, one_by_one
from tests.families.attention_options import steep

LINE, END = 44, 45  # the words after each row of an image, and after the last one
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 6,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None, "head_dim": 8}


def sized(first: Size, second: Size, patch: int = 6, merge: int = 2, channels: int = 3) -> Writer:
    """Images of these sizes in patches."""

    def ids(size: Size) -> list[int]:
        rows, columns = size[0] // merge, size[1] // merge
        return [*([*[IMAGE] * columns, LINE] * rows)[:-1], END]

    def draw(images: Sequence[Sequence[Size]], generator: torch.Generator) -> dict[str, Tensor]:
        sizes = torch.tensor([size for row in images for size in row]) * patch
        pixels = torch.zeros(len(sizes), channels, *sizes.amax(0).tolist())
        for image, (height, width) in zip(pixels, sizes.tolist(), strict=True):
            image[:, :height, :width] = torch.randn(channels, height, width, generator=generator)
        return {"pixel_values": pixels, "image_sizes": sizes}

    return Writer((first, second), ids, draw, one_by_one)


def mistral3(text: dict, tower: dict, **fields: object) -> dict:
    return {
        "text_config": text,
        "vision_config": {**tower, "model_type": "pixtral"},
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        **fields,
    }


GREY = {**TOWER, "num_channels": 1, "patch_size": 5, "hidden_act": "silu", "num_attention_heads": 2}
STEEP = {**TOWER, "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}

PUBLISHED = {**TOWER, "head_dim": 8, "vocab_size": 61, "rope_theta": 10000.0}

# fmt: off
CASES = [
    VisionCase("mistral3", "published", mistral3(MISTRAL, PUBLISHED), auto=AUTO, writer=sized((4, 2), (2, 6))),
    VisionCase("mistral3", "last-but-one-biased-relu-tied", mistral3(LLAMA, {**STEEP, "num_hidden_layers": 3},
               vision_feature_layer=-2, multimodal_projector_bias=True, projector_hidden_act="relu",
               tie_word_embeddings=True), auto=AUTO, writer=sized((2, 4), (6, 4))),
    VisionCase("mistral3", "merging-three-one-channel-qwen2", mistral3(QWEN, GREY, spatial_merge_size=3), auto=AUTO,
               writer=sized((3, 6), (6, 3), patch=5, merge=3, channels=1)),
    VisionCase("llava", "pixtral", mistral3(MISTRAL, TOWER, vision_feature_layer=-1,
               vision_feature_select_strategy="full"), auto=AUTO, writer=sized((2, 3), (3, 1), merge=1)),
]
# fmt: on
# On its own: transformers counts the padding of its prompts as positions
MINISTRAL = VisionCase(
    "mistral3",
    "ministral3",
    mistral3({**LLAMA, "model_type": "ministral3", "head_dim": 8, **steep(5, 0.4, factor=4.0)}, TOWER),
    auto=AUTO,
    writer=sized((4, 2), (2, 6)),
)
TOWERS = [
    Case("pixtral", name, fields, auto="AutoModel")
    for name, fields in {"published": TOWER, "one-channel": GREY}.items()
]
