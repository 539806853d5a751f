"""What every vision tower of `tests/families/` buys: the numbers of transformers, under names that mean what they say."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionEncoder
from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.pixels import PixelImages
from tests.close import GRADIENT, assert_close
from tests.families import Case, reference
from tests.families._alive import without_effect
from tests.families._models import (
    MODERATE,
    assert_as_near_the_truth,
    assert_same_files,
    assert_same_gradients_of,
    assert_same_tensors,
    backpropagate,
    judged_on_more_where_few_decide,
)
from tests.families._vision import answer, hooked_tower, theirs
from tests.families.vision_encoders import CASES
from tests.unchecked import unchecked

EACH_CASE = CASES


def images(case: Case, n_images: int = 3) -> Tensor:
    return hooked_tower(case).drawn_images(n_images, seed=1)["pixel_values"]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Of images; those of some towers are one row in transformers."""
    assert_close(found, expected.view_as(found))


@torch.no_grad()
def test_outputs(case: Case):
    pixels = images(case)
    expected = answer(theirs(case)(pixels))
    assert MODERATE[0] < expected.std() < MODERATE[1], f"the deviation of the output is {expected.std():.2g}"
    assert_same(hooked_tower(case)(pixels), expected)


@torch.no_grad()
def test_the_stream_is_that_of_transformers(case: Case):
    """The hidden states of transformers are the stream before each block, and after the last."""
    pixels, model = images(case), hooked_tower(case)
    _, cache = model.run_with_cache(pixels)
    expected = theirs(case)(pixels, output_hidden_states=True).hidden_states
    for layer in range(model.cfg.n_layers):
        assert_same(cache["resid_pre", layer], expected[layer])


@unchecked()
def test_gradients(case: Case):
    """For every weight, under the name that transformers gives it, and for the pixels."""
    pixels, of_pixels = images(case), dict[str, list[Tensor]](ours=[], theirs=[])

    def run(model: Any, dtype: torch.dtype, whose: str) -> Any:
        given = pixels.to(dtype, copy=True).requires_grad_()
        found = model(given)
        backpropagate(found if isinstance(found, Tensor) else answer(found))
        of_pixels[whose].append(given.grad)
        return model

    assert_same_gradients_of(
        lambda dtype: run(copy.deepcopy(hooked_tower(case)).to(dtype), dtype, "ours"),
        lambda dtype: run(theirs(case, dtype), dtype, "theirs"),
    )
    assert_close(of_pixels["ours"][0], of_pixels["theirs"][0], GRADIENT)


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    ours = copy.deepcopy(hooked_tower(case)).to(torch.bfloat16)

    def compare(n_images: int) -> None:
        pixels = images(case, n_images)
        truth = answer(theirs(case, torch.float64)(pixels.double()))
        rough = answer(theirs(case, torch.bfloat16)(pixels.bfloat16()))
        assert_as_near_the_truth(ours(pixels.bfloat16()).view_as(truth), rough, truth, routed=False)

    judged_on_more_where_few_decide(compare, 16)


@unchecked()
def test_tensors_may_come_in_any_order(case: Case, read: HookedVisionEncoder):
    assert type(read) is HookedVisionEncoder
    assert_same_tensors(dict(read.named_parameters()), dict(hooked_tower(case).named_parameters()))


@unchecked()
def test_export_is_exact(read: HookedVisionEncoder, checkpoint: Path, tensors: dict[str, Tensor], tmp_path: Path):
    read.save_pretrained(tmp_path)
    assert_same_files(tmp_path, checkpoint, tensors)


@torch.no_grad()
@unchecked()
def test_the_model_of_transformers_comes_back(case: Case):
    back, pixels = hooked_tower(case).to_hf(), images(case)
    assert type(back) is type(reference(case))
    assert_same_tensors(back.state_dict(), reference(case).state_dict())
    assert_close(answer(back(pixels)), answer(theirs(case)(pixels)))


@unchecked()
def test_identities(case: Case):
    report = hooked_tower(case).verify()
    assert report.ok, str(report)


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: Case):
    """An edit of any site changes the output."""
    model, pixels = hooked_tower(case), images(case)

    def bend(value: Tensor, hook: Any) -> Tensor:
        return value * torch.linspace(0.5, 1.5, value.shape[-1])

    def ask(n: int, hooks: list[tuple[str, Any]]) -> list[Tensor]:
        return [model.run_with_hooks(pixels.repeat(n, 1, 1, 1), fwd_hooks=hooks)]

    assert without_effect(model, ask, bend, least=1e-5) == []


@pytest.mark.parametrize("grid", [(3, 5), (7, 7)])
@torch.no_grad()
def test_another_size_is_refused_or_interpolated(case: Case, grid: tuple[int, int]):
    model, generator = hooked_tower(case), torch.Generator().manual_seed(3)
    size = [length * model.cfg.patch_size for length in grid]
    pixels = torch.randn(2, model.cfg.n_channels, *size, generator=generator)
    if model.tree.pos_embed is not None and not model.tree.pos_embed.fits_all:
        with pytest.raises(ValueError, match="does not fit: this tower has positions for"):
            model(pixels)
    else:
        assert_same(model(pixels), answer(theirs(case)(pixels)))
    if model.tree.grid[0] == model.tree.grid[1]:  # that of transformers assumes a square
        found = theirs(case)(pixels, interpolate_pos_encoding=True)
        assert_same(model(pixels, interpolate_pos_encoding=True), answer(found))


def test_pixels_that_no_patch_reads_are_refused(case: Case):
    """Unless the tower was trained on images of this size, as SigLIP's was, or what is read is given by a mask or sizes."""
    model, embed = hooked_tower(case), hooked_tower(case).tree.embed
    height, width = (length * embed.patch_size for length in model.tree.grid)
    pixels = torch.zeros(1, embed.n_channels, height + 1, width)
    if isinstance(model.tree.pixels, PixelImages):
        with pytest.raises(ValueError, match=f"{height + 1} x {width} pixels are not filled by patches of"):
            model(pixels)
    trained = PatchEmbed(replace(embed, image_size=(height + 1, width)))
    assert PixelImages().patches(trained, pixels).grids == (model.tree.grid,)
