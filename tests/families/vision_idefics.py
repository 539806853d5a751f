"""Idefics3 and SmolVLM: images in several tiles, in rows of a batch that may have none, with padding around pictures."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families._case import Case
from tests.families._vision import AUTO, IMAGE, LLAMA, QWEN, TOWER, Size, VisionCase, Writer

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 30}
EDGE, WHOLE, PLACES, LINE = (
    44,
    45,
    46,
    54,
)  # words around image tokens: ends, the whole image, the place of a tile, a line's end


def n_tiles(size: Size) -> int:
    """The tiles of an image, and the whole image after them if there are several."""
    return size[0] * size[1] + (size != (1, 1))


def tiles(n_tokens: int, side: int, channels: int = 3, masked: bool = True) -> Writer:
    """Images of 1 x 1 and 1 x 2 tiles with `side` pixels; if they are masked, pictures do not fill them."""

    def ids(size: Size) -> list[int]:
        tile, found = [IMAGE] * n_tokens, list[int]()
        if size != (1, 1):
            for row in range(size[0]):
                for column in range(size[1]):
                    found += [EDGE, PLACES + 3 * row + column, *tile]
                found += [LINE]
        return [*found, EDGE, WHOLE, *tile, EDGE]

    def draw(images: Sequence[Sequence[Size]], generator: torch.Generator) -> dict[str, Tensor]:
        of_rows = [sum(map(n_tiles, row)) for row in images]
        pixels = torch.zeros(len(images), max(of_rows), channels, side, side)
        mask = torch.zeros(len(images), max(of_rows), side, side, dtype=torch.long)
        for row, n in enumerate(of_rows):
            for i in range(n):
                height, width = (
                    torch.randint(side // 2, side + 1, (2,), generator=generator) if masked else (side, side)
                )
                pixels[row, i, :, :height, :width] = torch.randn(channels, height, width, generator=generator)
                mask[row, i, :height, :width] = 1
        return {"pixel_values": pixels, "pixel_attention_mask": mask} if masked else {"pixel_values": pixels}

    return Writer(((1, 1), (1, 2)), ids, draw, of_row)


def of_row(images: dict[str, Tensor], sizes: Sequence[Sequence[Size]], row: int) -> dict[str, Tensor]:
    """The tiles of a row, without empty ones."""
    before, n = (
        sum(n_tiles(size) for sizes_of in part for size in sizes_of) for part in (sizes[:row], sizes[row : row + 1])
    )
    kept = images["pixel_values"].flatten(0, 1).flatten(1).any(1)
    return {name: x.flatten(0, 1)[kept][before : before + n][None] for name, x in images.items()}


def idefics(text: dict, tower: dict, scale_factor: int, **fields: object) -> dict:
    return {
        "text_config": text,
        "vision_config": tower,
        "image_token_id": IMAGE,
        "scale_factor": scale_factor,
        "tie_word_embeddings": False,
        **fields,
    }


THIRDS = {**TOWER, "patch_size": 4}
# Fields of published configs that nothing reads
PUBLISHED_TEXT = {
    "is_llama_config": True,
    "neftune_noise_alpha": 0.0,
    "perceiver_config": {"hidden_act": "silu", "resampler_depth": 6},
    "pixel_shuffle_factor": 4,
    "qk_layer_norms": False,
    "rope_interleaved": False,
    "use_resampler": False,
}
PUBLISHED_TOWER = {"max_image_size": {"longest_edge": 24}, "size": {"longest_edge": 96}, "use_base_siglip": False}
PUBLISHED = idefics(
    {**LLAMA, **PUBLISHED_TEXT}, {**TOWER, **PUBLISHED_TOWER}, 2, vocab_size=61, use_reentrant_checkpointing=False
)
GREY = {**TOWER, "num_channels": 1, "hidden_act": "gelu", "num_attention_heads": 2}

# fmt: off
CASES = [
    VisionCase("idefics3", "halves-published", PUBLISHED, auto=AUTO, writer=tiles(4, 24, masked=False)),
    VisionCase("smolvlm", "thirds-masked-qwen2-tied", idefics(QWEN, THIRDS, 3, tie_word_embeddings=True), auto=AUTO,
               writer=tiles(4, 24)),
]
TOWERS = [
    Case("idefics3_vision", "fourths", TOWER, auto="AutoModel"),
    Case("smolvlm_vision", "grey", GREY, auto="AutoModel"),
]
# fmt: on
