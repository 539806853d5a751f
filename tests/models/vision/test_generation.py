"""Generation from prompts with images: what a step reads, what is kept, and what comes back."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionLanguage, VisionInputs
from hooked_lm.models.generation.sampling import sample_logits
from tests.close import assert_close
from tests.families._vision import hooked_vlm, scenes, written
from tests.families.vision_languages import CASES
from tests.unchecked import unchecked

CASE = next(case for case in CASES if case.name == "last-but-one")
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad(), unchecked():
        yield


@pytest.fixture(scope="module")
def model() -> HookedVisionLanguage:
    return hooked_vlm(CASE)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return written(CASE, scenes(CASE)["padded"])


def test_prompts_may_come_in_any_form(model: HookedVisionLanguage, inputs: dict[str, Tensor]):
    expected = model.generate(**inputs, **GREEDY)
    pixels = {"pixel_values": inputs["pixel_values"]}
    assert torch.equal(model.generate(inputs, **GREEDY), expected)
    whole = VisionInputs(inputs["input_ids"], pixels, inputs["attention_mask"])
    assert torch.equal(model.generate(whole, **GREEDY), expected)
    given = {"attention_mask": inputs["attention_mask"], **pixels}
    assert torch.equal(model.generate(inputs["input_ids"], **given, **GREEDY), expected)


def test_padding_moves_to_the_left_and_images_with_it(model: HookedVisionLanguage, inputs: dict[str, Tensor]):
    """Rows padded on the right, and with a column of padding that no row needs."""
    ids, mask = (torch.nn.functional.pad(inputs[name], (1, 2)) for name in ("input_ids", "attention_mask"))
    order = (1 - mask).argsort(dim=1, stable=True)
    moved = {**inputs, "input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}
    assert moved["attention_mask"][:, 0].all()
    assert torch.equal(model.generate(**moved, **GREEDY), model.generate(**inputs, **GREEDY))


def test_pieces_are_the_whole(model: HookedVisionLanguage, inputs: dict[str, Tensor]):
    pieces = list(model.generate_stream(**inputs, max_tokens_per_yield=2, **GREEDY))
    assert len(pieces) == 3
    assert torch.equal(torch.cat(pieces, 1), model.generate(**inputs, **GREEDY))


def test_text_alone_continues_as_before(model: HookedVisionLanguage):
    ids = torch.tensor([[5, 9, 14]])
    found = model.generate(ids, **GREEDY)
    assert torch.equal(found[:, :3], ids)
    assert found.shape == (1, 8)
    assert torch.equal(found[:, 3], model(ids)[:, -1].argmax(-1))


def test_images_are_read_once_with_a_cache(model: HookedVisionLanguage, inputs: dict[str, Tensor]):
    for use_cache, n_passes in ((True, 1), (False, 5)):
        steps: list[Any] = []
        with model.hooks([("projector.hook_out", lambda value, hook, steps=steps: steps.append(hook.step))]):
            model.generate(**inputs, use_past_kv_cache=use_cache, **GREEDY)
        assert steps == list(range(n_passes))


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_a_record_has_both_sides(model: HookedVisionLanguage, inputs: dict[str, Tensor], use_past_kv_cache: bool):
    """The text's sites at all positions, those of images as they were read."""
    options = {"use_past_kv_cache": use_past_kv_cache, "return_cache": True}
    tokens, record = model.generate(**inputs, **options, **GREEDY)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], 1)
    pixels = inputs["pixel_values"]
    _, cache = model.run_with_cache(tokens, pixel_values=pixels, attention_mask=mask)
    assert set(record) == set(cache)
    for name in ("vision.blocks.1.attn.hook_pattern", "projector.hook_out", "hook_image_features", "hook_embed_merged"):
        assert_close(record[name], cache[name])
    assert_close(record["resid_post", 1][mask.bool()], cache["resid_post", 1][mask.bool()])


def test_sites_of_images_have_no_positions_in_the_text(model: HookedVisionLanguage, inputs: dict[str, Tensor]):
    found: dict[str, Any] = {}

    def keep(value: Tensor, hook: Any) -> None:
        found.setdefault(hook.name, hook.positions)

    model_sites = ["vision.blocks.0.hook_resid_pre", "hook_image_features", "hook_embed_merged"]
    with model.hooks([(name, keep) for name in model_sites]):
        model.generate(**inputs, **GREEDY)
    assert found["vision.blocks.0.hook_resid_pre"] is found["hook_image_features"] is None
    assert found["hook_embed_merged"].shape == inputs["input_ids"].shape


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_a_generated_token_of_images_is_a_word(inputs: dict[str, Tensor], use_past_kv_cache: bool):
    """transformers reads it as a word with a cache, and fails without one."""
    model = copy.deepcopy(hooked_vlm(CASE))
    image = model.tree.image_token
    with model.hooks([("unembed.hook_out", lambda value, hook: value.index_fill(-1, torch.tensor(image), 1e4))]):
        found = model.generate(**inputs, use_past_kv_cache=use_past_kv_cache, **GREEDY)
    assert (found[:, -5:] == image).all()


def test_penalties_ignore_a_token_outside_of_the_vocabulary():
    logits = torch.tensor([[0.0, 1.0, 0.9]])
    tokens = torch.tensor([[7, 1, 7]])
    assert sample_logits(logits, temperature=0.0, freq_penalty=0.5, tokens=tokens).item() == 2
