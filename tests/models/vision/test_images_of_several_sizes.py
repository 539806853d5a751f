"""Images of several sizes run one size at a time where nothing listens, and padded where something does."""

import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from tests.close import assert_close
from tests.families._vision import VisionCase, hooked_vlm, scenes, written
from tests.families.vision_languages import CASES

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "mistral3")
OF_SEVERAL_SIZES = [next(case for case in CASES if case.family == family) for family in FAMILIES]


@torch.no_grad()
@pytest.mark.parametrize("case", OF_SEVERAL_SIZES, ids=str)
def test_a_listener_changes_how_images_run_and_not_what_they_give(case: VisionCase):
    model, inputs = hooked_vlm(case), written(case, scenes(case)["padded"])
    images = {name: inputs[name] for name in model.image_arguments if name in inputs}
    shapes: list[torch.Size] = []

    def see(value: Tensor, hook: HookPoint) -> None:
        shapes.append(value.shape)

    with model.hooks(fwd_hooks=[("vision.hook_patch_embed", see)]):
        padded = model.image_features(images)
    apart = model.image_features(images)
    assert [shape[0] for shape in shapes] == [3]
    assert torch.equal(apart.cells, padded.cells)
    assert apart.counts == padded.counts
    assert apart.counts is not None
    assert_close(apart.in_order(apart.vectors), padded.in_order(padded.vectors))
    for one, other in zip(apart.deepstack, padded.deepstack, strict=True):
        assert_close(apart.in_order(one), padded.in_order(other))
