"""Sweeps over a dual encoder: each cell is what a run with its hook gives, measured on the similarities [image, text]."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedDualEncoder, HookedTransformer, HookedVisionEncoder, VisionInputs, analysis, patching
from hooked_lm.interventions import Patch, ZeroAblate
from tests.close import assert_apart, assert_close
from tests.families._case import Case
from tests.families._vision import hooked_pair, pair_inputs
from tests.families.dual_encoders import CASES
from tests.unchecked import unchecked

BOTH = [next(case for case in CASES if case.family == family) for family in ("clip", "siglip")]
WHOLE = pytest.mark.filterwarnings("ignore:a HookedDualEncoder is not a causal decoder")
Runs = tuple[HookedDualEncoder, VisionInputs, VisionInputs]


@pytest.fixture(params=BOTH, ids=str)
def runs(request: pytest.FixtureRequest) -> Runs:
    """Three texts and four images, and others."""
    case: Case = request.param
    given = pair_inputs(case)
    ids, pixels = given["input_ids"], given["pixel_values"]
    other = VisionInputs(ids.roll(1, 0), {"pixel_values": pixels.flip(0) * 0.5})
    return hooked_pair(case), VisionInputs(ids, {"pixel_values": pixels}), other


def lead(logits: Tensor) -> Tensor:
    """By how much each image is nearer to the first text than to the second."""
    return logits[:, 0] - logits[:, 1]


@WHOLE
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "heads"), [("vision.resid_pre", None), ("text.resid_post", None), ("vision.z", [1]), ("text.pattern", [0])]
)
def test_a_sweep_is_a_loop_of_runs(runs: Runs, name: str, heads: list[int] | None):
    model, corrupted, clean = runs
    _, cache = model.run_with_cache(clean)
    result = patching.sweep(model, corrupted, clean, metric=lead, sites=name, positions=[0, 2], heads=heads)
    assert list(result.axes) == [
        "layer",
        "patch" if name.startswith("vision.") else "position",
        *["head"] * bool(heads),
    ]
    values = result.values if heads is None else result.values[:, :, 0]
    for layer in range(values.shape[0]):
        for place, position in enumerate([0, 2]):

            def patch(value: Tensor, hook: Any, position: int = position) -> Tensor:
                at: tuple[Any, ...] = (slice(None), position) if heads is None else (slice(None), position, heads[0])
                at = (slice(None), 0, position) if name.endswith("pattern") else at
                value[at] = cache[hook.name][at]
                return value

            expected = lead(model.run_with_hooks(corrupted, fwd_hooks=[((name, layer), patch)]))
            assert_close(values[layer, place], expected)
    assert_close(result.corrupted, lead(model(corrupted)))
    assert_close(result.clean, lead(model(clean)))


@WHOLE
@torch.no_grad()
def test_sites_after_the_towers(runs: Runs):
    """With the vectors of images of the clean run, its similarities to the texts of the corrupted one are there."""
    model, corrupted, clean = runs
    mixed = VisionInputs(corrupted.tokens, clean.images)
    for site, inputs in (("hook_image_embeds", mixed), ("hook_logits_per_image", clean)):
        found = patching.sweep(model, corrupted, clean, metric=lead, sites=site, positions=None)
        assert_close(found.values, lead(model(inputs)))


@torch.no_grad()
def test_cells_of_hooks(runs: Runs):
    model, inputs, other = runs
    _, cache = model.run_with_cache(other)
    cells: list[Any] = [
        ZeroAblate("vision.z", -1, heads=[0]),
        Patch("text.mlp_out", 1, positions=[0, 1], source=cache),
    ]
    result = patching.run_each(model, inputs, cells, metric={"lead": lead, "best": lambda logits: logits.max(1)[0]})
    for cell, hook in enumerate(cells):
        assert_close(result.values[0, cell], lead(model.run_with_hooks(inputs, fwd_hooks=[hook])))
    assert_apart(result.values[0, 0], result.values[0, 1])


@torch.no_grad()
def test_inputs_are_those_of_the_processor(runs: Runs):
    """Masks of texts are kept; texts may be ids."""
    model, inputs, _ = runs
    mask = torch.ones_like(inputs.tokens)
    mask[:, -1] = 0
    ids, pixels = inputs.tokens, inputs.images["pixel_values"]
    masked = VisionInputs(ids, inputs.images, mask)
    assert_close(model(masked), model(ids, pixels, attention_mask=mask))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = patching.run_each(model, masked, [ZeroAblate("text.z", 0, heads=[0])], metric=lead)
    assert_close(found.corrupted, lead(model(masked)))


def test_what_does_not_fit_is_refused(runs: Runs):
    model, inputs, _ = runs
    fewer = VisionInputs(inputs.tokens[:2], inputs.images)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: patching.sweep(model, inputs.tokens, metric=lead, replace_with="zero"), TypeError, "are VisionInputs"),
        (
            lambda: patching.sweep(model, inputs, fewer, metric=lead, sites="vision.z"),
            ValueError,
            "as many texts; they",
        ),
        (
            lambda: patching.sweep(model, inputs, inputs, metric=lead),
            KeyError,
            "is named with its side: 'vision.resid_pre'",
        ),
        (lambda: model(VisionInputs(inputs.tokens)), ValueError, "got images with no tensors"),
        (lambda: model(inputs, inputs.images["pixel_values"]), ValueError, "are part of VisionInputs"),
        (lambda: patching.ablate(model, inputs, metric=lead), TypeError, "ablate supports models with one stack"),
        (
            lambda: analysis.attribute(model, inputs, inputs, metric=lead),
            TypeError,
            "has two towers; patching.sweep and",
        ),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


STUDIES: dict[str, Any] = {
    "sweep": lambda model, x: patching.sweep(model, x, x, metric=lead, sites="z"),
    "run_each": lambda model, x: patching.run_each(model, x, [ZeroAblate("z", 0)], metric=lead),
    "ablate": lambda model, x: patching.ablate(model, x, metric=lead),
    "attention_knockout": lambda model, x: patching.attention_knockout(model, x, {"a": (0, 1)}, metric=lead),
    "get_act_patch_resid_pre": lambda model, x: patching.get_act_patch_resid_pre(model, x, {}, lead),
    "path_patch": lambda model, x: patching.path_patch(model, x, x, receivers="logits", metric=lead),
    "causal_trace": lambda model, x: patching.causal_trace(model, x, [0], metric=lead),
    "attribute": lambda model, x: analysis.attribute(model, x, x, metric=lead),
    "attribute_edges": lambda model, x: analysis.attribute_edges(model, x, x, metric=lead),
    "logit_lens": lambda model, x: analysis.logit_lens(model, x),
    "train_tuned_lens": lambda model, x: analysis.train_tuned_lens(model, x),
    "direct_logit_attribution": lambda model, x: analysis.direct_logit_attribution(model, x, [0]),
    "head_scores": lambda model, x: analysis.head_scores(model, x),
    "attention_to_images": lambda model, x: analysis.attention_to_images(model, x),
    "nearest_words": lambda model, x: analysis.nearest_words(model, x),
    "patchscope": lambda model, x: analysis.patchscope(model, x, x),
}


@pytest.mark.parametrize("study", STUDIES)
def test_studies_refuse_towers_by_name(runs: Runs, study: str):
    dual, inputs, _ = runs
    tower = HookedVisionEncoder(
        {"n_layers": 1, "d_model": 8, "n_heads": 2, "image_size": 8, "patch_size": 4, "act_fn": "gelu"}
    )
    with unchecked(), pytest.raises(TypeError, match="HookedVisionEncoder"):
        STUDIES[study](tower, torch.zeros(2, 3, 8, 8))
    if study not in ("sweep", "run_each"):
        with unchecked(), pytest.raises(TypeError, match="HookedDualEncoder"):
            STUDIES[study](dual, inputs)


def test_errors_do_not_print_pixels(runs: Runs):
    _, inputs, _ = runs
    text = HookedTransformer({"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 8, "d_vocab": 9, "act_fn": "gelu"})
    given: Any
    for given in ({"pixel_values": inputs.images["pixel_values"]}, [inputs]):
        with unchecked(), pytest.raises(TypeError, match=r"tensor of ids, or VisionInputs .* got a ") as refused:
            patching.sweep(text, given, given, metric=lead)
        assert len(str(refused.value)) < 250
