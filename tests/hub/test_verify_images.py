"""`hub.verify` of checkpoints whose models read images: they are compared on images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import hub
from tests.core import thinned
from tests.families import dual_encoders, vision_encoders, vision_languages
from tests.families._case import Case, reference

WITH_IMAGES = "logits as in transformers, with images"
OF_TEXT = ("logits as in transformers, on text alone", "wrong greedy tokens, on text alone")
COMPARED = {
    "llava": (WITH_IMAGES, *OF_TEXT),
    "mistral3": (WITH_IMAGES, *OF_TEXT),
    "qwen2_vl": (WITH_IMAGES, *OF_TEXT),
    "qwen3_vl": (WITH_IMAGES, *OF_TEXT),
    "gemma3": (WITH_IMAGES, *OF_TEXT),
    "paligemma": (WITH_IMAGES, *OF_TEXT),
    "clip": ("similarities as in transformers",),
    "clip_vision_model": ("projected as in transformers",),
    "vit": ("logits as in transformers",),
    "siglip_vision_model": ("pooled as in transformers",),
}


def first_case(family: str) -> Case:
    rows = [*vision_languages.CASES, *vision_encoders.CASES, *dual_encoders.CASES]
    return next(case for case in rows if case.family == family)


@pytest.mark.parametrize("family", thinned(COMPARED, keep=("llava", "clip", "vit")))
def test_verify(family: str, tmp_path: Path):
    reference(first_case(family)).save_pretrained(tmp_path)
    report = hub.verify(tmp_path, n_tokens=2)
    assert report.ok, str(report)
    names = [check.name for check in report.checks]
    assert tuple(names[: len(COMPARED[family])]) == COMPARED[family]
    assert len(names) > 10


@pytest.mark.slow
def test_what_images_change_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def badly(*args: Any) -> Any:
        model = hub.load(*args)
        with torch.no_grad():
            model.projector.b_out[0] += 1
        return model

    monkeypatch.setattr("hooked_lm.hub.compare.load", badly)
    reference(first_case("llava")).save_pretrained(tmp_path)
    assert hub.verify(tmp_path, n_tokens=2).failed == [WITH_IMAGES]
