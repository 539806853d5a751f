"""Real processors of transformers on pillow: prompts with pictures, as the model of transformers reads them."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.smolvlm import processing_smolvlm

from hooked_lm import HookedVisionLanguage
from tests.core import IMAGES, thinned
from tests.families._case import reference
from tests.hub.processors import REALS, save

# of numpy's new version, in the processor of PaliGemma
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
BUILT = {real.family: real for real in REALS if real.family != "mistral3"}


def picture(height: int, width: int) -> Image.Image:
    drawn = np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        save(BUILT[family], path)
        return path

    return folder


@pytest.fixture(params=thinned(BUILT, IMAGES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> HookedVisionLanguage:
    if family == "smolvlm":  # which spells the lengths of videos with it
        monkeypatch.setattr(processing_smolvlm, "num2words", object())
    return HookedVisionLanguage.from_pretrained_no_processing(folders(family))


def their_logits(family: str, given: Any) -> Tensor:
    """What transformers says of the output of a processor."""
    names = {name: x for name, x in given.items() if name != "labels"}
    with torch.no_grad():
        return reference(BUILT[family].case)(**names).logits


def check_close(ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
    seen = mask.bool()
    assert ours.shape == theirs.shape
    assert (ours - theirs)[seen].abs().max() <= 1e-4 * theirs.abs().max()


@torch.no_grad()
def test_the_output_of_a_processor_is_read(family: str, model: Any):
    made, real = model.processor, BUILT[family]
    assert type(made).__name__ == real.processor
    text = [f"what {made.image_token} is {made.image_token} ?", f"{made.image_token} this"]
    pictures = [[picture(30, 50), picture(40, 20)], [picture(24, 24)]]
    given = made(text=text, images=pictures, return_tensors="pt", padding=True)
    check_close(model(**given), their_logits(family, given), given["attention_mask"])
