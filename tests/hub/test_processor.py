"""The processor of a checkpoint that reads images: attached where there is one, never needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hooked_lm import HookedVisionLanguage
from tests.families._case import reference
from tests.families.vision_languages import CASES

CASE = next(case for case in CASES if case.name == "last-but-one")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    reference(CASE).save_pretrained(tmp_path)
    return tmp_path


def load(path: Path) -> Any:
    return HookedVisionLanguage.from_pretrained_no_processing(path)


def test_a_checkpoint_without_a_processor_loads(checkpoint: Path):
    model = load(checkpoint)
    assert model.processor is model.why_no_processor is None


def test_a_processor_that_cannot_be_made_is_named_when_it_is_needed(checkpoint: Path):
    (checkpoint / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    model = load(checkpoint)
    assert model.processor is None
    with pytest.raises(
        ValueError, match=r"pictures are read by the checkpoint's processor, and that in .* cannot be made"
    ):
        model.prepare("<image>", [torch.zeros(3, 24, 24, dtype=torch.uint8)])


def test_a_processor_is_attached(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    (checkpoint / "processor_config.json").write_text("{}")
    made = object()
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda folder, **options: made)
    assert load(checkpoint).processor is made
