"""What every vision-language model of `tests/families/` buys: the numbers of transformers on images and text together, under
names that mean what they say."""

import copy
import warnings
from collections.abc import Iterator
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from hooked_lm import ActivationCache, HookedVisionLanguage, VisionInputs
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.engine.prompts import site_of_layer
from hooked_lm.patching import sweep
from tests.close import APART, GRADIENT, assert_apart, assert_close
from tests.families._alive import without_effect
from tests.families._models import (
    MODERATE,
    assert_as_near_the_truth,
    assert_same_files,
    assert_same_gradients_of,
    assert_same_tensors,
    backpropagate,
    has_routes,
    judged_on_more_where_few_decide,
)
from tests.families._vision import VisionCase, hooked_vlm, logits_of, reference, scenes, theirs, written
from tests.families.vision_languages import CASES
from tests.unchecked import unchecked

EACH_CASE = CASES
READER = HookedVisionLanguage
SCENES = ("text", "one", "two", "padded")


def at_words(inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """The logits at positions that are not padding."""
    return logits[inputs["attention_mask"].bool()]


def double_of(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with pixels of this dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


# ---- the same numbers ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
@torch.enable_grad()
def expected(case: VisionCase) -> tuple[Any, Tensor, Tensor]:
    """A model of transformers, the pixels of two images among words, and its logits, through which gradients flow."""
    model, given = theirs(case), with_gradients(written(case, scenes(case)["two"]))
    return model, given["pixel_values"], model(**given, **case.writer.more(given["input_ids"])).logits


@lru_cache(maxsize=1)
@torch.enable_grad()
def found(case: VisionCase) -> tuple[Tensor, Tensor]:
    """The same pixels, and our logits, through which gradients flow."""
    given = with_gradients(written(case, scenes(case)["two"]))
    return given["pixel_values"], hooked_vlm(case)(**given)


def with_gradients(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.requires_grad_() if name == "pixel_values" else x for name, x in inputs.items()}


@lru_cache(maxsize=1)
@torch.no_grad()
def of_padded(case: VisionCase) -> tuple[Tensor, ActivationCache]:
    """Our logits for rows of different lengths, and the stream before the second block."""
    inputs = written(case, scenes(case)["padded"])
    return hooked_vlm(case).run_with_cache(**inputs, names_filter="blocks.1.hook_resid_pre")


@pytest.mark.parametrize("scene", SCENES)
@torch.no_grad()
def test_logits(case: VisionCase, scene: str):
    inputs = written(case, scenes(case)[scene])
    logits = expected(case)[2].detach() if scene == "two" else logits_of(case, inputs)
    logits = at_words(inputs, logits)
    assert MODERATE[0] < logits.std() < MODERATE[1], f"the deviation of the logits is {logits.std():.2g}"
    of_scene = found(case)[1].detach() if scene == "two" else hooked_vlm(case)(**inputs)
    assert_close(at_words(inputs, of_scene), logits)


@torch.no_grad()
@unchecked()
def test_images_matter(case: VisionCase):
    """Each image changes what is said after it, and the order of images matters."""
    model = hooked_vlm(case)
    first, second = (written(case, scenes(case)["two"], seed) for seed in (0, 1))
    assert_apart(model(**{**first, **pixels_of(second)})[:, -1], found(case)[1][:, -1].detach())


def pixels_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name not in ("input_ids", "attention_mask")}


@unchecked()
def test_gradients(case: VisionCase):
    """For every weight, under the name that transformers gives it, and for the pixels."""
    inputs = written(case, scenes(case)["two"])

    def of_transformers(dtype: torch.dtype) -> Any:
        model, _, logits = expected(case)
        if dtype is not torch.float32:
            model = theirs(case, dtype)
            logits = model(**double_of(inputs, dtype), **case.writer.more(inputs["input_ids"])).logits
        backpropagate(logits)
        return model

    def ours(dtype: torch.dtype) -> Any:
        model, logits = hooked_vlm(case), found(case)[1]
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
            logits = model(**double_of(inputs, dtype))
        backpropagate(logits)
        return model

    assert_same_gradients_of(ours, of_transformers)
    assert_close(found(case)[0].grad, expected(case)[1].grad, GRADIENT)


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: VisionCase):
    ours = copy.deepcopy(hooked_vlm(case)).to(torch.bfloat16)

    def compare(n_prompts: int) -> None:
        inputs = written(case, [scenes(case)["two"][0]] * n_prompts)
        truth, rough = logits_of(case, inputs, torch.float64), logits_of(case, inputs, torch.bfloat16)
        assert_as_near_the_truth(ours(**double_of(inputs, torch.bfloat16)), rough, truth, has_routes(ours))

    judged_on_more_where_few_decide(compare, 16)


# ---- the way in and out ----------------------------------------------------------------------------------------------


@unchecked()
def test_tensors_may_come_in_any_order(case: VisionCase, read: HookedVisionLanguage):
    assert_same_tensors(dict(read.named_parameters()), dict(hooked_vlm(case).named_parameters()))


@unchecked()
def test_names_of_modules_are_read_too(case: VisionCase, checkpoint: Path, tensors: dict[str, Tensor], tmp_path: Path):
    """transformers saves under older names than those of its modules; files of both kinds are published."""
    state = {name: x.contiguous().clone() for name, x in reference(case).state_dict().items()}
    if state.keys() == tensors.keys():  # the files that `read` has read
        return
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    model = HookedVisionLanguage.from_pretrained_no_processing(tmp_path)
    assert_same_tensors(dict(model.named_parameters()), dict(hooked_vlm(case).named_parameters()))


@unchecked()
def test_export_is_exact(read: HookedVisionLanguage, checkpoint: Path, tensors: dict[str, Tensor], tmp_path: Path):
    read.save_pretrained(tmp_path)
    assert_same_files(tmp_path, checkpoint, tensors)


@torch.no_grad()
@unchecked()
def test_the_model_of_transformers_comes_back(case: VisionCase):
    back, inputs = hooked_vlm(case).to_hf(), written(case, scenes(case)["two"])
    assert type(back) is type(reference(case))
    assert_same_tensors(back.state_dict(), reference(case).state_dict())
    back.set_attn_implementation("eager")
    assert_close(back(**inputs, **case.writer.more(inputs["input_ids"])).logits, expected(case)[2].detach())


# ---- sites -----------------------------------------------------------------------------------------------------------


@unchecked()
def test_identities(case: VisionCase):
    report = hooked_vlm(case).verify()
    assert report.ok, str(report)


@torch.no_grad()
def test_sites_of_both_sides_have_names(case: VisionCase):
    """The decoder's with and without its prefix; the tower's in the order of the image."""
    model, inputs = hooked_vlm(case), written(case, scenes(case)["one"])
    _, cache = model.run_with_cache(**inputs)
    attends = next(name for name in cache if name.startswith("blocks.") and name.endswith("attn.hook_z"))
    for name in (attends, "blocks.1.hook_resid_post", "hook_embed_merged"):
        assert cache[name] is cache[f"language.{name}"]
    assert cache["vision.blocks.0.attn.hook_pattern"].ndim == cache["projector.hook_out"].ndim + 1 == 4
    assert cache["resid_pre", 0].shape[:2] == inputs["input_ids"].shape


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: VisionCase):
    """An edit of any site changes the logits, but for parts of the tower beyond those that the projector reads.

    `hook_routed_positions` of experts only says which tokens there are.
    """
    model, row = hooked_vlm(case), scenes(case)["two"]

    def bend(value: Tensor, hook: Any) -> Tensor:
        if not value.is_floating_point():
            n_ids = 40 if hook.name == "hook_tokens" else int(value.max()) + 1
            return torch.where(value == model.tree.image_token, value, (value + 1) % n_ids)
        return value * torch.linspace(0.5, 1.5, value.shape[-1])

    def ask(n: int, hooks: list[tuple[str, Any]]) -> list[Tensor]:
        given = written(case, row)
        return [model.run_with_hooks(**copies(given, n), fwd_hooks=hooks)]

    dead = set(without_effect(model, ask, bend, least=1e-4))
    shown_only = {name for name in dead if name.endswith("hook_routed_positions")}
    assert dead - shown_only <= set(beyond_what_is_read(model))


def copies(inputs: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """The inputs of one prompt, so many times."""
    return {name: x.repeat(n, *[1] * (x.ndim - 1)) for name, x in inputs.items()}


def beyond_what_is_read(model: HookedVisionLanguage) -> Iterator[str]:
    """The tower's sites after the last layer that the projector reads, and its pooler."""
    yield from (name for name in model.all_points() if name.startswith("vision.pooler."))
    layers = model.tree.feature_layers
    if layers is not None:
        unread = ("vision.ln_final.", *(f"vision.blocks.{i}." for i in range(max(layers), len(model.vision.blocks))))
        yield from (name for name in model.all_points() if name.startswith(unread))


# ---- places of images ------------------------------------------------------------------------------------------------


@torch.no_grad()
@unchecked()
def test_places_of_image_tokens(case: VisionCase):
    """Those of the features, which are known without a run; from a position to a place and back."""
    model, inputs = hooked_vlm(case), written(case, scenes(case)["padded"])
    features, places = model.image_features(pixels_of(inputs)), model.image_positions(inputs)
    layout = model.image_layout(pixels_of(inputs))
    assert torch.equal(layout.cells, features.cells)
    assert layout.n_tokens == features.n_tokens
    is_image = model.images_among(inputs["input_ids"])
    assert torch.equal(places.cells[..., 0] >= 0, is_image)
    grids = model.patch_grid(inputs)
    assert len(grids) == places.n_images == len(features.n_tokens)
    for prompt, position in is_image.nonzero().tolist():
        image, row, column = places.cell(position, prompt)
        assert prompt == places.prompt(image)
        if min(row, column) >= 0:
            assert places.position(image, row, column) == (prompt, grids[image][row, column])
    with pytest.raises(ValueError, match="position 0 of prompt 0 is no image token; its image tokens are at"):
        places.cell(0)


# ---- batches and generation ------------------------------------------------------------------------------------------


@torch.no_grad()
@unchecked()
def test_padded_rows_are_what_they_are_alone(case: VisionCase):
    rows, model = scenes(case)["padded"], hooked_vlm(case)
    inputs, sizes = written(case, rows), [[part for part in row if isinstance(part, tuple)] for row in rows]
    together, _ = of_padded(case)
    for i, real in enumerate(inputs["attention_mask"].bool()):
        images = case.writer.select(pixels_of(inputs), sizes, i) if sizes[i] else {}
        assert_close(together[i][real], model(VisionInputs(inputs["input_ids"][i][real][None], images))[0])
    some = model.rows(VisionInputs(inputs["input_ids"], pixels_of(inputs), inputs["attention_mask"]), [2, 1])
    real = some.attention_mask.bool()
    assert_close(model(some)[real], together[[2, 1]][real])


@torch.no_grad()
@unchecked()
def test_steps_with_a_cache_are_the_full_run(case: VisionCase):
    """The second image comes in a second turn."""
    model, (a, b) = hooked_vlm(case), case.writer.sizes
    inputs = written(case, [[2, a, 3, b, 4]])
    ids, first = inputs["input_ids"], len(case.writer.ids(a)) + 3
    images = [case.writer.select(pixels_of(inputs), [[a], [b]], i) for i in (0, 1)]
    n, cache = ids.shape[1], KeyValueCache(model.cfg.n_layers)
    turns = [
        (0, first, images[0]),
        (first, first + 1, {}),
        (first + 1, n - 2, images[1]),
        (n - 2, n - 1, {}),
        (n - 1, n, {}),
    ]
    pieces = [model(VisionInputs(ids[:, i:j], given), past_kv_cache=cache) for i, j, given in turns]
    assert_close(
        torch.cat(pieces, 1), turns_of_transformers(case, ids, turns) if case.writer.whole_prompts else model(**inputs)
    )


def turns_of_transformers(case: VisionCase, ids: Tensor, turns: list[tuple[int, int, dict[str, Tensor]]]) -> Tensor:
    """The logits of transformers for one turn after the other, each of which is a prompt of its own."""
    other, past = theirs(case), transformers.DynamicCache(config=reference(case).config)
    keep = {"cache" if "cache" in signature(other.forward).parameters else "past_key_values": past}  # before 5.24
    pieces = []
    for start, stop, images in turns:
        more = {name: F.pad(x, (start, 0), value=1) for name, x in case.writer.more(ids[:, start:stop]).items()}
        pieces.append(other(ids[:, start:stop], **images, **more, **keep, use_cache=True).logits)
    return torch.cat(pieces, 1)


@torch.no_grad()
@unchecked()
def test_greedy_tokens(case: VisionCase):
    inputs, other = written(case, scenes(case)["padded"]), theirs(case)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    other.generation_config.eos_token_id = None
    more = case.writer.more(inputs["input_ids"])
    expected = other.generate(**inputs, **more, pad_token_id=0, **options)
    n_all = expected.shape[1]
    for use_cache, n in ((True, 12), (False, 4)):
        more = options | {"max_new_tokens": n, "use_past_kv_cache": use_cache}
        found = hooked_vlm(case).generate(**inputs, stop_at_eos=False, verbose=False, **more)
        assert torch.equal(found, expected[:, : n_all - 12 + n]), f"use_past_kv_cache={use_cache}"


@torch.no_grad()
@unchecked()
def test_a_run_may_start_at_a_layer(case: VisionCase):
    """With the prompt of the stream, on which positions and masks depend."""
    model, inputs = hooked_vlm(case), written(case, scenes(case)["padded"])
    logits, cache = of_padded(case)
    more: dict[str, Any] = {"attention_mask": inputs["attention_mask"], "start_at_layer": 1, **pixels_of(inputs)}
    again = model(cache["resid_pre", 1], tokens=inputs["input_ids"], **more)
    assert_close(at_words(inputs, again), at_words(inputs, logits))
    with pytest.raises(ValueError, match=r"starts at a layer needs tokens=\.\.\., and the images"):
        model(cache["resid_pre", 1], **more)
    if model.tree.rules:
        with pytest.raises(ValueError, match="but there are no images"):
            model(cache["resid_pre", 1], tokens=inputs["input_ids"], start_at_layer=1)


# ---- studies ---------------------------------------------------------------------------------------------------------


def runs(case: VisionCase) -> tuple[VisionInputs, VisionInputs]:
    """Two prompts with two images each, at other places, and the same prompts with other images."""
    a, b = case.writer.sizes
    rows = [[2, a, 3, b, 4], [4, a, 1, b, 4]]
    inputs, others = (written(case, rows, seed) for seed in (0, 1))
    return VisionInputs(inputs["input_ids"], pixels_of(inputs)), VisionInputs(inputs["input_ids"], pixels_of(others))


def answer(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -2, 7]


def some_positions(model: HookedVisionLanguage, inputs: VisionInputs) -> list[int]:
    """Positions before, in and after images: the first and the last of an image, one in between, words around."""
    places = (inputs.tokens[0] == model.tree.image_token).nonzero()[:, 0].tolist()
    middle = places[len(places) // 2]
    return sorted(
        {0, places[0], places[0] + 1, middle, middle + 1, places[-1], places[-1] + 1, len(inputs.tokens[0]) - 1}
    )


@torch.no_grad()
@unchecked()
@pytest.mark.parametrize(("site", "head"), [("resid_pre", None), ("z", 1), ("mlp_out", None)])
def test_a_sweep_over_text_and_images_is_a_loop_of_runs(case: VisionCase, site: str, head: int | None):
    model, (corrupted, clean) = hooked_vlm(case), runs(case)
    positions, heads = some_positions(model, corrupted), None if head is None else [head]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no cell runs as a whole forward pass
        layers = [layer for layer in range(model.cfg.n_layers) if site_of_layer(model, site, layer)]
        result = sweep(
            model, corrupted, clean, metric=answer, sites=site, layers=layers, positions=positions, heads=heads
        )
    cache = model.run_with_cache(clean)[1]

    def run(layer: int, position: int) -> Tensor:
        def patch(value: Tensor, hook: Any) -> Tensor:
            part = (slice(None), position, slice(None) if head is None else head)
            value[part] = cache[hook.name][part]
            return value

        return answer(model.run_with_hooks(corrupted, fwd_hooks=[(model.names((site, layer))[0], patch)]))

    values = result.values if head is None else result.values.squeeze(2)
    expected = torch.stack([torch.stack([run(i, pos) for pos in positions]) for i in layers])
    assert_close(values, expected)
    assert_apart(values, result.corrupted.expand_as(values))


@torch.no_grad()
@unchecked()
@pytest.mark.parametrize(
    "site", ["vision.hook_patch_embed", "vision.resid_pre", "projector.hook_out", "hook_image_features"]
)
def test_a_sweep_over_patches_is_a_loop_of_runs(case: VisionCase, site: str):
    """The tower runs again; the text shares what is before the images."""
    model, (corrupted, clean) = hooked_vlm(case), runs(case)
    layers = [0, 1] if site == "vision.resid_pre" else "each"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no cell runs as a whole forward pass
        result = sweep(model, corrupted, clean, metric=answer, sites=site, layers=layers, positions=[0, -1])
    assert list(result.axes) == ["layer", "patch"][isinstance(layers, str) :]
    cache = model.run_with_cache(clean)[1]

    def run(name: str, position: int) -> Tensor:
        def patch(value: Tensor, hook: Any) -> Tensor:
            value[:, position] = cache[name][:, position]
            return value

        return answer(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))

    names = [site] if isinstance(layers, str) else [model.names((site, layer))[0] for layer in layers]
    expected = torch.stack([torch.stack([run(name, pos) for pos in (0, -1)]) for name in names])
    assert_close(result.values.view(expected.shape), expected)
    assert_apart(result.values, result.corrupted.expand_as(result.values))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_images_without_tokens_and_tokens_without_images_are_refused(case: VisionCase):
    model, one, two = hooked_vlm(case), *(written(case, scenes(case)[name]) for name in ("one", "two"))
    n_tokens = int((one["input_ids"] == model.tree.image_token).sum())
    with pytest.raises(ValueError, match=f"the prompts have {n_tokens} image tokens .* there are no images"):
        model(one["input_ids"])
    with pytest.raises(ValueError, match=f"the prompts have {n_tokens} image tokens .* the \\d images have"):
        model(one["input_ids"], **pixels_of(two))


def test_a_wrong_image_is_noticed(case: VisionCase):
    """The gates see an image that is turned over: they would see wrong positions, windows or an order of patches."""
    inputs = written(case, scenes(case)["one"])
    pixels = inputs["pixel_values"]
    turned = {**inputs, "pixel_values": pixels.flip(-1) if pixels.ndim > 2 else pixels.flip(0)}
    with torch.no_grad():
        found, expected = hooked_vlm(case)(**turned), logits_of(case, inputs)
    with pytest.raises(AssertionError):
        assert_close(found[:, -1], expected[:, -1], depth=APART)
