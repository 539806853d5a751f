"""What is peculiar to Gemma 3 and PaliGemma: which tokens see each other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooked_lm import HookedVisionLanguage
from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.families import family as family_of
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.patching import sweep
from tests.close import assert_apart, assert_close
from tests.families._vision import IMAGE, VisionCase, hooked_vlm, logits_of, reference, scenes, theirs, written
from tests.families.vision_gemma import CASES, GEMMA3, SIGLIP, composite

GEMMA, PALIGEMMA = ({case.name: case for case in CASES if case.family == family} for family in ("gemma3", "paligemma"))


@pytest.fixture
def causal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Runs a model with the mask of text alone."""

    def run(model: HookedVisionLanguage, inputs: dict[str, Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(
                ImageContext, "groups", property(lambda context: None, lambda context, groups: None), raising=False
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
    """As transformers counts contiguous image tokens, not images."""
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
    types = case.writer.more(inputs["input_ids"])["token_type_ids"]
    types[:, -2:] = 1  # which makes them causal in a model that reads prompts in both directions
    whole, cache = model.run_with_cache(**inputs, token_type_ids=types)
    given = {name: x for name, x in inputs.items() if name != "input_ids"}
    found = model(cache["resid_pre", 1], start_at_layer=1, tokens=inputs["input_ids"], token_type_ids=types, **given)
    assert_close(found, whole)


# ---- tokens after a prompt -------------------------------------------------------------------------------------------


def with_suffix(case: VisionCase) -> dict[str, Tensor]:
    """Two prompts with an image, the last three and five tokens of which are no part of them."""
    inputs = written(case, [[2, case.writer.sizes[0], 6], [case.writer.sizes[0], 6]])
    types = torch.zeros_like(inputs["input_ids"])
    types[0, -3:], types[1, -5:] = 1, 1
    return {**inputs, "token_type_ids": types}


@pytest.mark.parametrize("name", PALIGEMMA)
@torch.no_grad()
def test_tokens_after_a_prompt_are_causal(name: str):
    case, model = PALIGEMMA[name], hooked_vlm(PALIGEMMA[name])
    inputs = with_suffix(case)
    real, expected = inputs["attention_mask"].bool(), theirs(case)(**inputs).logits
    found = model(**inputs)
    assert_close(found[real], expected[real])
    assert torch.equal(model(inputs), found), "a processor's output may come as it is"
    whole = model(**{key: x for key, x in inputs.items() if key != "token_type_ids"})
    assert_apart(whole[:, 3], found[:, 3], "earlier tokens see a suffix only if it is part of the prompt")


@pytest.mark.parametrize("name", PALIGEMMA)
@torch.no_grad()
def test_a_prompt_with_a_suffix_is_continued(name: str):
    case = PALIGEMMA[name]
    inputs, other, options = with_suffix(case), theirs(case), {"max_new_tokens": 4, "do_sample": False}
    other.generation_config.eos_token_id = None
    expected = other.generate(**inputs, pad_token_id=0, **options)
    for cached in (True, False):
        found = hooked_vlm(case).generate(
            **inputs, stop_at_eos=False, verbose=False, use_past_kv_cache=cached, **options
        )
        assert torch.equal(found, expected)


@torch.no_grad()
def test_types_of_tokens_that_do_not_fit_are_refused():
    case = PALIGEMMA["gemma"]
    model, inputs = hooked_vlm(case), with_suffix(case)
    with pytest.raises(ValueError, match=r"token_type_ids has shape \(2, 5\), but the tokens \(2, 24\)"):
        model(**{**inputs, "token_type_ids": inputs["token_type_ids"][:, :5]})


@torch.no_grad()
def test_logits_are_capped_as_those_of_the_language_model():
    """`Gemma3ForConditionalGeneration` leaves the cap out, as the class for text alone does not."""
    line = GEMMA["window-in-images"]
    fields = {**line.fields, "text_config": {**line.fields["text_config"], "final_logit_softcapping": 3.0}}
    case = replace(line, name="capped", fields=fields)
    inputs = written(case, scenes(case)["two"])
    expected = reference(case)(**inputs, **case.writer.more(inputs["input_ids"])).logits
    assert_apart(hooked_vlm(case)(**inputs), expected)
    assert_close(hooked_vlm(case)(**inputs), 3.0 * (expected / 3.0).tanh())


# ---- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "gemma3",
            {"text_config": {**GEMMA3, "use_bidirectional_attention": True}},
            "use_bidirectional_attention=True",
        ),
        ("gemma3", {"vision_config": {**SIGLIP, "image_size": [24, 36]}}, "4 x 6 patches; Gemma 3 reads squares only"),
        ("paligemma", {"projection_dim": 16}, "projection_dim=16 is not supported"),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(family: str, fields: dict[str, Any], message: str):
    given = composite(GEMMA3, SIGLIP, mm_tokens_per_image=4) if family == "gemma3" else PALIGEMMA["gemma"].fields
    config = transformers.CONFIG_MAPPING[family](**{**given, **fields})
    with pytest.raises(ValueError, match=message):
        read_config(family_of(family, "HookedVisionLanguage"), config)


# ---- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["pattern", "v"])
@pytest.mark.parametrize("case", [GEMMA["window-in-images"], PALIGEMMA["gemma2-window-in-prompts"]], ids=str)
@torch.no_grad()
def test_sweeps_know_which_tokens_see_each_other(case: VisionCase, site: str):
    """Also where tokens after a prompt are marked: a sweep is a loop of runs."""
    model, head, a = hooked_vlm(case), 1, case.writer.sizes[0]
    given = [written(case, [[2, a, 3, a, 4]], seed) for seed in (0, 1)]
    types = case.writer.more(given[0]["input_ids"])["token_type_ids"]
    types[:, -3:] = 1
    corrupted, clean = (model.inputs({**inputs, "token_type_ids": types}) for inputs in given)
    n_tokens = corrupted.shape[1]
    found = sweep(model, corrupted, clean, metric=answer, sites=site, layers=[0, 1], heads=[head])
    _, cache = model.run_with_cache(clean)

    def run(layer: int, position: int) -> Tensor:
        part = (slice(None), head, position) if site == "pattern" else (slice(None), position, head)

        def patch(value: Tensor, hook: Any) -> Tensor:
            value[part] = cache[hook.name][part]
            return value

        return answer(model.run_with_hooks(corrupted, fwd_hooks=[(model.names((site, layer))[0], patch)]))

    expected = torch.stack([torch.stack([run(layer, pos) for pos in range(n_tokens)]) for layer in (0, 1)])
    assert_close(found.values.squeeze(2), expected)
    assert_apart(found.values.squeeze(2), found.corrupted.expand_as(expected))


def answer(logits: Tensor) -> Tensor:
    """What a sweep measures."""
    return logits[:, -1, 5] - logits[:, -1, 7]


@torch.no_grad()
def test_the_head_of_a_tower_is_kept_although_nothing_reads_it(tmp_path: Path):
    """It runs if something listens there; a checkpoint may lack it, whatever its config says, but not a part of it."""
    case = GEMMA["windows-patches-left-over-unused-head"]
    reference(case).save_pretrained(tmp_path)
    inputs, tensors = written(case, [[3, case.writer.sizes[0], 2]]), load_file(tmp_path / "model.safetensors")
    model = hooked_vlm(case)
    logits, cache = model.run_with_cache(**inputs, names_filter="vision.pooler.hook_pooler_out")
    expected = theirs(case).model.vision_tower(inputs["pixel_values"]).pooler_output
    assert_close(cache["vision.pooler.hook_pooler_out"], expected)
    kept = {name: x for name, x in tensors.items() if ".head." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    without = HookedVisionLanguage.from_pretrained_no_processing(tmp_path)
    assert without.vision.pooler is None
    assert torch.equal(without(**inputs), logits)
    probe = next(name for name in tensors if name.endswith("head.probe"))
    save_file({**kept, probe: tensors[probe]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"head\.attention\.in_proj_weight"):
        HookedVisionLanguage.from_pretrained_no_processing(tmp_path)
