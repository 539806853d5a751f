"""Models that read images, of the widths of small real ones: towers, a prompt with an image, a cache, a sweep.

python -m tests.benchmarks vision
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from hooked_lm import HookedVisionEncoder, HookedVisionLanguage, VisionInputs, patching
from tests.benchmarks.timing import Figure, compare

PAIRS = 7
IMAGE = 999  # the token of images
TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
TEXT = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
QWEN_TOWER = {
    "depth": 4,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_heads": 12,
    "out_hidden_size": 768,
    "fullatt_block_indexes": [1, 3],
}
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}


def ours_of(theirs: nn.Module, load: Callable[..., Any]) -> Any:
    """Our model with the same weights."""
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return load(directory, mmap=False)


def clip() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    theirs = CLIPVisionModel(CLIPVisionConfig(**TOWER, attn_implementation="sdpa")).eval()
    return ours_of(theirs, HookedVisionEncoder.from_pretrained_no_processing), theirs


def llava() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    cfg = LlavaConfig(vision_config=CLIPVisionConfig(**TOWER), text_config=LlamaConfig(**TEXT), image_token_index=IMAGE)
    theirs = LlavaForConditionalGeneration(cfg).eval()
    return ours_of(theirs, HookedVisionLanguage.from_pretrained_no_processing), theirs


def qwen() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    cfg = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROTARY}, vision_config=QWEN_TOWER, image_token_id=IMAGE
    )
    theirs = Qwen2_5_VLForConditionalGeneration(cfg).eval()
    return ours_of(theirs, HookedVisionLanguage.from_pretrained_no_processing), theirs


@torch.no_grad()
def tower_figures() -> list[Figure]:
    """The forward pass of towers, without hooks and with a bare cache."""
    ours, theirs = clip()
    figures = []
    for n_images in (1, 4):
        pixels = torch.randn(n_images, 3, 224, 224)
        mine = partial(ours, pixels)
        figures.append(compare(f"CLIP, {n_images} images", mine, "HF sdpa", partial(theirs, pixels), 1.05, PAIRS))
    figures.append(
        compare("CLIP, run_with_cache, 4 images", lambda: ours.run_with_cache(pixels), "our forward", mine, 1.5, PAIRS)
    )
    model, theirs = qwen()
    alike, others = [(16, 24)] * 4, [(16, 24), (8, 8), (24, 32), (12, 4)]
    for what, grids in {"4 images of one size": alike, "4 images of different sizes": others}.items():
        images = of_grids(grids, model.vision.tree.embed.d_patch)
        mine = partial(model.image_features, images)
        tower = partial(theirs.model.visual, images["pixel_values"], grid_thw=images["image_grid_thw"])
        figures.append(compare(f"Qwen2.5-VL, {what}", mine, "HF sdpa", tower, 1.05, PAIRS))
    return figures


def of_grids(grids: list[tuple[int, int]], d_patch: int) -> dict[str, Tensor]:
    """Random images with so many rows and columns of patches."""
    n_patches = sum(rows * columns for rows, columns in grids)
    grid_thw = torch.tensor([[1, rows, columns] for rows, columns in grids])
    return {"pixel_values": torch.randn(n_patches, d_patch), "image_grid_thw": grid_thw}


def prompt(n_tokens: int) -> Tensor:
    """Words around an image with so many tokens."""
    return torch.cat([torch.randint(900, (1, 20)), torch.full((1, n_tokens), IMAGE), torch.randint(900, (1, 40))], 1)


@torch.no_grad()
def language_figures() -> list[Figure]:
    """A prompt with an image: the forward pass, a bare cache, and a sweep over patches against a loop of runs."""
    ours, theirs = llava()
    given = {"input_ids": prompt(196), "pixel_values": torch.randn(1, 3, 224, 224)}
    mine = partial(ours, **given)
    figures = [
        compare(
            "LLaVA, a prompt with an image", mine, "HF sdpa", partial(theirs, **given, use_cache=False), 1.05, PAIRS
        ),
        compare("LLaVA, run_with_cache", lambda: ours.run_with_cache(**given), "our forward", mine, 1.5, PAIRS),
    ]
    return [*figures, *sweep_figures(ours, given)]


def sweep_figures(model: Any, given: dict[str, Tensor]) -> list[Figure]:
    """Some patches in each layer of the tower, and some tokens of an image in each layer of the text."""
    corrupted, clean = (
        VisionInputs(given["input_ids"], {"pixel_values": pixels})
        for pixels in (given["pixel_values"], torch.randn(1, 3, 224, 224))
    )
    _, cache = model.run_with_cache(clean)
    figures = []
    for short, positions in {"vision.resid_pre": [30, 60, 90, 120, 150, 180], "resid_pre": [60, 150]}.items():
        n_layers = 3 if short.startswith("vision") else 4  # LLaVA does not read the last block
        sites = [model.names((short, layer))[0] for layer in range(n_layers)]
        cells = [(site, position) for site in sites for position in positions]

        def sweep(short: str = short, n_layers: int = n_layers, positions: list[int] = positions) -> None:
            patching.sweep(
                model,
                corrupted,
                metric=metric,
                sites=short,
                layers=range(n_layers),
                positions=positions,
                replace_with=cache,
                progress=False,
            )

        def loop(cells: list[tuple[str, int]] = cells) -> None:
            for site, position in cells:
                metric(model.run_with_hooks(corrupted, fwd_hooks=[(site, partial(patch, cache[site], position))]))

        figures.append(compare(f"LLaVA, {short}, {len(cells)} cells", sweep, "a loop of runs", loop, 0.85, 3))
    return figures


def patch(new: Tensor, position: int, value: Tensor, hook: Any) -> Tensor:
    value[:, position] = new[:, position]
    return value


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 11] - logits[:, -1, 7]


def vision_figures() -> list[Figure]:
    """Towers, prompts with images, sweeps."""
    return [*tower_figures(), *language_figures()]
