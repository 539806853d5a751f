"""What is peculiar to Gemma 3 and PaliGemma: which tokens see each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionLanguage
from hooked_lm.components.vision.image_context import ImageContext
from tests.close import assert_apart, assert_close
from tests.families._vision import IMAGE, VisionCase, hooked_vlm, logits_of, theirs, written
from tests.families.vision_gemma import CASES

GEMMA, PALIGEMMA = ({case.name: case for case in CASES if case.family == family} for family in ("gemma3", "paligemma"))


@pytest.fixture
def causal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Runs a model with the mask of text alone."""

    def run(model: HookedVisionLanguage, inputs: dict[str, Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(
                ImageContext, "runs", property(lambda context: None, lambda context, runs: None), raising=False
            )
            return model(**inputs)

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_causal_mask_is_another_model(case: VisionCase, causal: Callable[..., Tensor]):
    """Logits differ from the first image token on, or from the first token of a prompt that is read as a whole."""
    model, whole, a = hooked_vlm(case), case.writer.whole_prompts, case.writer.sizes[0]
    inputs, text = written(case, [[3, a, 2]]), written(case, [[6]])
    expected, found = logits_of(case, inputs), causal(model, inputs)
    first = 0 if whole else 3 + case.writer.ids(a).index(IMAGE)
    assert_close(found[:, :first], expected[:, :first])
    for pos in range(first, first + 3):
        assert_apart(found[:, pos], expected[:, pos])
    (assert_apart if whole else assert_close)(causal(model, text), logits_of(case, text))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_types_of_tokens_are_derived(case: VisionCase):
    """Without them transformers has the mask of text alone, and says nothing."""
    inputs = written(case, [[3, case.writer.sizes[0], 2]])
    silent = theirs(case)(**inputs).logits
    assert_apart(silent[:, -1], logits_of(case, inputs)[:, -1])
    given = hooked_vlm(case)(**inputs, **case.writer.more(inputs["input_ids"]))
    assert torch.equal(given, hooked_vlm(case)(**inputs))


@pytest.mark.parametrize("name", GEMMA)
@torch.no_grad()
def test_adjacent_images_see_each_other(name: str):
    """As transformers counts runs of image tokens, not images."""
    case = GEMMA[name]
    n_tokens, a = case.writer.ids(case.writer.sizes[0]).count(IMAGE), case.writer.sizes[0]
    inputs = written(case, [[2, a, a, 3], [2, a, 3, a]])
    ids = torch.full((2, 5 + 2 * n_tokens), 7)
    ids[0, 2 : 2 + 2 * n_tokens] = ids[1, 2 : 2 + n_tokens] = ids[1, 5 + n_tokens :] = IMAGE
    given = {"input_ids": ids, "pixel_values": inputs["pixel_values"]}
    model = hooked_vlm(case)
    assert_close(model(**given), logits_of(case, given))
    _, cache = model.run_with_cache(**given)
    for layer in range(model.cfg.n_layers):  # later tokens are within any window
        first_of_next = cache["pattern", layer][:, :, 2, 2 + n_tokens]
        assert (first_of_next[0] > 0).all()
        assert (first_of_next[1] == 0).all()


@pytest.mark.parametrize("name", GEMMA)
@torch.no_grad()
def test_patterns_are_those_of_transformers(name: str):
    case = GEMMA[name]
    inputs = written(case, [[3, case.writer.sizes[0], 2], [1, case.writer.sizes[0], 1]])
    more = case.writer.more(inputs["input_ids"])
    expected = theirs(case)(**inputs, **more, output_attentions=True).attentions
    _, cache = hooked_vlm(case).run_with_cache(**inputs)
    real = inputs["attention_mask"].bool()
    for layer, pattern in enumerate(expected):
        found = cache["pattern", layer].transpose(1, 2)[real]
        assert_close(found, pattern.transpose(1, 2)[real])


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_run_from_a_later_layer_has_the_same_masks(case: VisionCase):
    model, inputs = hooked_vlm(case), written(case, [[3, case.writer.sizes[0], 2], [1, case.writer.sizes[0], 1]])
    whole, cache = model.run_with_cache(**inputs)
    given: dict[str, Any] = {"start_at_layer": 1, "attention_mask": inputs["attention_mask"]}
    found = model(cache["resid_pre", 1], tokens=inputs["input_ids"], **given)
    assert_close(found, whole)
    with pytest.raises(ValueError, match=r"needs the ids of the stream, tokens=\.\.\."):
        model(cache["resid_pre", 1], **given)
