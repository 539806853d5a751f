"""The vision tower of any composite, alone: the same weights and numbers, and what was left out is said."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_lm import HookedVisionEncoder
from tests.close import assert_close
from tests.families import Case, reference
from tests.families._models import assert_same_tensors
from tests.families._vision import hooked_pair, hooked_vlm
from tests.families.dual_encoders import CASES as PAIRS
from tests.families.vision_languages import CASES as LANGUAGES
from tests.unchecked import unchecked

ONE_OF_EACH = list({case.family: case for case in reversed(LANGUAGES)}.values())


def saved(case: Case, folder: Path) -> Path:
    reference(case).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@unchecked()
def test_tower_of_a_vision_language_model(case: Any, tmp_path: Path):
    """The tower has the weights that the whole model has, whatever the projector reads of it."""
    model = HookedVisionEncoder.from_pretrained(saved(case, tmp_path))
    whole = dict(hooked_vlm(case).vision.named_parameters())
    found = {name: x for name, x in model.named_parameters() if name in whole}
    assert_same_tensors(found, whole)
    beside = {name.split(".")[0] for name, _ in model.named_parameters() if name not in whole}
    assert beside <= {"pooler", "merger"}
    assert model.verify().ok
    assert model.cfg.left_out
    with pytest.raises(ValueError, match="cannot be written back: left out were"):
        model.to_hf()


@torch.no_grad()
@unchecked()
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_tower_of_a_pair(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        model = HookedVisionEncoder.from_pretrained(saved(case, tmp_path))
    assert [r.message for r in caplog.records if "loaded the vision tower" in r.message] == [
        f"loaded the vision tower ({case.family}_vision_model) of a {type(reference(case)).__name__}; left out: "
        + ", ".join(f"{name} ({n} tensor{'s' * (n != 1)})" for name, n in (model.cfg.left_out or {}).items())
    ]
    left_out = {"logit_scale", "text_model", "text_projection" if case.family != "siglip" else "logit_bias"}
    assert set(model.cfg.left_out or {}) == left_out
    pixels = model.drawn_images()["pixel_values"]
    expected = hooked_pair(case).encode_image(pixels)
    found = model(pixels)
    assert_close(found / found.norm(dim=-1, keepdim=True), expected)
    model.cfg.left_out = None
    back = model.to_hf()
    names = {"clip": "CLIPVisionModelWithProjection", "metaclip_2": "MetaClip2VisionModelWithProjection"}
    assert type(back).__name__ == names.get(case.family, "SiglipVisionModel")
    output = back(pixels)
    assert_close(output.image_embeds if case.family != "siglip" else output.pooler_output, found)


def test_what_is_not_of_a_tower_is_refused(tmp_path: Path):
    file = saved(PAIRS[0], tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "vision_model.encoder.layers.0.twist": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"tensors that a clip_vision_model has not: vision_model.encoder.layers.0.twist"
    ):
        HookedVisionEncoder.from_pretrained(tmp_path)
    embedding = "vision_model.embeddings.patch_embedding.weight"
    save_file({name: x for name, x in tensors.items() if name != embedding}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"0 tensors have the name of a vision tower's embedding of patches"):
        HookedVisionEncoder.from_pretrained(tmp_path)
    save_file({**tensors, f"other.{embedding.removeprefix('vision_model.')}": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"2 tensors have the name of a vision tower's embedding of patches"):
        HookedVisionEncoder.from_pretrained(tmp_path)
