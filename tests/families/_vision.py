"""Prompts with images for vision-language models, written as a processor writes them, and both models of a case."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hooked_lm import HookedDualEncoder, HookedVisionEncoder, HookedVisionLanguage
from hooked_lm.families import supported
from tests.families._case import GROUPED, SIZES, Case, reference

Size = tuple[int, int]  # of an image, in patches: rows and columns
Row = Sequence[int | Size]  # a number of words, or an image
PAD = 0


@dataclass(frozen=True)
class Writer:
    """How a family's processor writes images.

    `sizes` are two sizes of images that the case reads, equal if it reads one size only. `ids` are the tokens that stand for an
    image of a size; `pixels` draws images of these sizes, under the names of the processor; `select` takes those of one row;
    `more` is what transformers wants to know besides, from the token ids. With `whole_prompts` all tokens of a prompt see each
    other, so that a second turn is not what it would be in one prompt.
    """

    sizes: tuple[Size, Size]
    ids: Callable[[Size], list[int]]
    pixels: Callable[[Sequence[Sequence[Size]], torch.Generator], dict[str, Tensor]]
    select: Callable[[dict[str, Tensor], Sequence[Sequence[Size]], int], dict[str, Tensor]]
    more: Callable[[Tensor], dict[str, Tensor]] = lambda tokens: {}
    whole_prompts: bool = False
    first_word: int = 3  # ids of words are from here on
    n_words: int = 40


@dataclass(frozen=True)
class VisionCase(Case):
    """A vision-language model: what a `Case` says, and how prompts are written."""

    writer: Writer = field(kw_only=True, hash=False, compare=False)


def written(case: VisionCase, rows: Sequence[Row], seed: int = 0) -> dict[str, Tensor]:
    """Prompts [batch, pos], padded on the left, with their images, as the processor gives them."""
    generator, writer = torch.Generator().manual_seed(seed), case.writer
    tokens = [torch.cat([_ids(part, writer, generator) for part in row]) for row in rows]
    longest = max(map(len, tokens))
    ids = torch.stack([torch.cat([row.new_full((longest - len(row),), PAD), row]) for row in tokens])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in tokens])
    images = [[part for part in row if isinstance(part, tuple)] for row in rows]
    pixels = writer.pixels(images, generator) if any(images) else {}
    return {"input_ids": ids, "attention_mask": mask, **pixels}


def _ids(part: int | Size, writer: Writer, generator: torch.Generator) -> Tensor:
    if isinstance(part, tuple):
        return torch.tensor(writer.ids(part))
    return torch.randint(writer.first_word, writer.n_words, (part,), generator=generator)


def scenes(case: VisionCase) -> dict[str, list[Row]]:
    """Prompts of all kinds: without an image, with one, with two of different sizes, and rows of different lengths."""
    a, b = case.writer.sizes
    return {
        "text": [[9], [9]],
        "one": [[4, a, 5]],
        "two": [[2, a, 3, b, 4]],
        "padded": [[3, b, 2], [4], [2, a, 1, b, 3]],
    }


@lru_cache(maxsize=2)
def hooked_vlm(case: VisionCase) -> HookedVisionLanguage:
    """The case's model as we load it; whoever wants to change it takes a copy."""
    return HookedVisionLanguage.from_pretrained_no_processing("tiny", hf_model=reference(case))


@lru_cache(maxsize=2)
def hooked_tower(case: Case) -> HookedVisionEncoder:
    """The case's model as we load it; whoever wants to change it takes a copy."""
    return HookedVisionEncoder.from_pretrained_no_processing("tiny", hf_model=reference(case))


@lru_cache(maxsize=2)
def hooked_pair(case: Case) -> HookedDualEncoder:
    """The case's model as we load it; whoever wants to change it takes a copy."""
    return HookedDualEncoder.from_pretrained("tiny", hf_model=reference(case))


def theirs(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers, in a copy."""
    return copy.deepcopy(reference(case)).to(dtype)


def logits_of(case: VisionCase, inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """What transformers says; pixels are in this dtype."""
    given = {**inputs, **case.writer.more(inputs["input_ids"])}
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    with torch.no_grad():
        return theirs(case, dtype)(**given).logits


# ---- sizes, and how images of one size are written ----------------------------------------------------------------------

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 6,
    "layer_norm_eps": 0.02,
}
CLIP = {**TOWER, "projection_dim": 20}
IMAGE = 58  # the token of images
TEXT = {**SIZES, **GROUPED, "vocab_size": 61, "max_position_embeddings": 120}
LLAMA, QWEN = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
AUTO = "AutoModelForImageTextToText"


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


Inputs = dict[str, Tensor]


def pair_inputs(case: Case, n: int = 3, dtype: torch.dtype = torch.float32) -> Inputs:
    """Texts of one length with an end token each, not at the same place, and one image more."""
    model = hooked_pair(case)
    tokens, _ = model.drawn_inputs(n, seed=1)
    _, images = model.drawn_inputs(n + 1, seed=1)
    if (end := getattr(model.tree.text.pooler, "end", None)) is not None:
        tokens = tokens.masked_fill(tokens == end, 3)
        tokens[torch.arange(n), 2 + torch.arange(n) % 5] = end
    return {"input_ids": tokens, "pixel_values": images["pixel_values"].to(dtype)}


def is_pair(case: Case) -> bool:
    """Whether a row is of a pair of towers."""
    return case.family in supported("HookedDualEncoder")


def hooked_any(case: Case) -> Any:
    """The model of a row of any class that reads images."""
    if isinstance(case, VisionCase):
        return hooked_vlm(case)
    return hooked_pair(case) if is_pair(case) else hooked_tower(case)


def answer(found: Any) -> Tensor:
    """The output of a tower of transformers that is ours by default."""
    names = ("logits", "image_embeds", "pooler_output", "last_hidden_state")
    return next(found[name] for name in names if found.get(name) is not None)


@torch.no_grad()
def vision_outputs(case: Case) -> tuple[Tensor, Tensor]:
    """What our model gives and what that of transformers gives, in fp32: for two images among words, or for images alone, or
    for images and texts."""
    if isinstance(case, VisionCase):
        inputs = written(case, scenes(case)["two"])
        return hooked_vlm(case)(**inputs), logits_of(case, inputs)
    if is_pair(case):
        inputs = pair_inputs(case)
        return hooked_pair(case)(**inputs), theirs(case)(**inputs).logits_per_image
    images = hooked_tower(case).drawn_images(3, seed=1)
    ours = hooked_tower(case)(**images)
    return ours, answer(theirs(case)(**images)).view_as(ours)  # images of some towers are one row in transformers
