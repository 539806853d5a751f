"""Qwen2-VL and Qwen2.5-VL beyond what every vision-language model is asked: published configs, windows, positions, refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hooked_lm import HookedVisionEncoder, HookedVisionLanguage, VisionInputs
from hooked_lm.components.embeddings.axis_rotary import AxialRotary, MultimodalRotary
from hooked_lm.components.kv_cache import KeyValueCache
from tests.close import assert_apart, assert_close
from tests.families import vision_qwen3
from tests.families._case import Case
from tests.families._models import assert_same_tensors
from tests.families._vision import VisionCase, hooked_tower, hooked_vlm, reference, scenes, theirs, written
from tests.families.vision_qwen2 import BEGIN, CASES, END, IMAGE, TOWERS
from tests.unchecked import unchecked

FIRST = {case.family: case for case in reversed(CASES)}
WINDOWS, OLD = FIRST["qwen2_5_vl"], FIRST["qwen2_vl"]


def images_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}


def context_of(model: Any, inputs: Any, cache: KeyValueCache | None = None) -> Any:
    """The context of a run before its first block."""
    with torch.no_grad():
        return model.embedded(model.inputs(inputs), cache=cache)[2]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [WINDOWS, OLD], ids=str)
def test_published_configs_are_read(case: VisionCase, tmp_path: Path):
    """They have the fields of the language model beside `vision_config`, older names, and some that transformers ignores."""
    model = copy.deepcopy(reference(case))
    model.save_pretrained(tmp_path)
    text, vision = case.fields["text_config"], case.fields["vision_config"]
    flat = {name: value for name, value in text.items() if name != "rope_parameters"}
    rope = text["rope_parameters"]
    written = {
        **{name: value for name, value in case.fields.items() if not name.endswith("_config")},
        **flat,
        "architectures": [type(model).__name__],
        "model_type": case.family,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "vision_token_id": 57,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 28,
        "vision_config": {
            **vision,
            "model_type": case.family,
            "in_chans": 3,
            "spatial_patch_size": vision["patch_size"],
            **({"tokens_per_second": 2} if case is WINDOWS else {}),
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded, inputs = HookedVisionLanguage.from_pretrained_no_processing(tmp_path), scenes_of(case, "two")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs), hooked_vlm(case)(**inputs))


@pytest.mark.parametrize("case", [WINDOWS, OLD], ids=str)
def test_configs_that_repeat_fields_of_the_text_are_read(case: VisionCase, tmp_path: Path):
    """Older versions of transformers wrote the fields of the language model twice."""
    reference(case).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    scaling = {"type": "default", "rope_type": "default", "mrope_section": rope["mrope_section"]}
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "vision_token_id": 57, "image_token_id": None}
    flat = {name: x for name, x in text.items() if name not in ("model_type", "dtype", "architectures", "rope_scaling")}
    more = {"sliding_window": 32768, "max_window_layers": 70, "rope_scaling": {**scaling, "type": "mrope"}}
    written = {**config, **flat, **more, "image_token_id": IMAGE}
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded, inputs = HookedVisionLanguage.from_pretrained_no_processing(tmp_path), scenes_of(case, "two")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs), hooked_vlm(case)(**inputs))
    for field, value in {"rms_norm_eps": 0.1, "rope_scaling": {**scaling, "mrope_section": [1, 1, 2]}}.items():
        (tmp_path / "config.json").write_text(json.dumps({**written, field: value}))
        with pytest.raises(ValueError, match=f"transformers ignores {field.replace('scaling', 'parameters')}="):
            HookedVisionLanguage.from_pretrained_no_processing(tmp_path)


def scenes_of(case: VisionCase, name: str) -> dict[str, Tensor]:
    return written(case, scenes(case)[name])


def test_fields_that_transformers_ignores_are_refused(tmp_path: Path):
    copy.deepcopy(reference(WINDOWS)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["spatial_patch_size"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="transformers ignores spatial_patch_size=7 and computes as with 4"):
        HookedVisionLanguage.from_pretrained_no_processing(tmp_path)


# ---- the tower -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("case", [WINDOWS, OLD], ids=str)
def test_sites_of_the_tower_are_in_raster_order(case: VisionCase):
    """The streams of transformers are those of our patches, in the order of its windows."""
    inputs, model = scenes_of(case, "two"), hooked_vlm(case)
    _, cache = model.run_with_cache(**inputs)
    tower = theirs(case).model.visual
    expected = tower(inputs["pixel_values"], inputs["image_grid_thw"], output_hidden_states=True).hidden_states
    order = raster_order(case, inputs["image_grid_thw"])
    for layer in range(len(model.vision.blocks)):
        found = cache[f"vision.blocks.{layer}.hook_resid_pre"]
        real = [found[i, : rows * columns] for i, (_, rows, columns) in enumerate(inputs["image_grid_thw"].tolist())]
        assert_close(torch.cat(real)[order], expected[layer])


def raster_order(case: VisionCase, grids: Tensor) -> Tensor:
    """The place of each of transformers' patches among those of all images, row by row."""
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    vision, merge = case.fields["vision_config"], 2
    place = get_vision_position_ids(grids, merge)
    sizes = grids[:, 1:].prod(1)
    first, columns = (x.repeat_interleave(sizes) for x in (sizes.cumsum(0) - sizes, grids[:, 2]))
    order = first + place[:, 0] * columns + place[:, 1]
    if "window_size" not in vision:
        return order
    index, _ = get_vision_window_index(grids, merge, vision["window_size"], vision["patch_size"])
    return order.unflatten(0, (-1, merge**2))[index].flatten()


@torch.no_grad()
def test_patterns_show_windows():
    """Weights outside of a window are 0; a listener does not change the logits, also with images of other sizes beside."""
    model, inputs = hooked_vlm(WINDOWS), scenes_of(WINDOWS, "padded")
    logits, cache = model.run_with_cache(**inputs)
    assert_close(logits, model(**inputs))
    rows, columns = inputs["image_grid_thw"][1, 1:].tolist()  # 6 x 10 patches in windows of 4 x 4
    row, column = torch.arange(rows * columns) // columns, torch.arange(rows * columns) % columns
    same = (row[:, None] // 4 == row // 4) & (column[:, None] // 4 == column // 4)
    for layer, windowed in enumerate([True, False, True]):
        pattern = cache[f"vision.blocks.{layer}.attn.hook_pattern"][1, :, : rows * columns, : rows * columns]
        assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        assert bool(((pattern > 0) == same).all()) == windowed


# ---- towers alone ----------------------------------------------------------------------------------------------------

alone = pytest.mark.parametrize("case", [*TOWERS, *vision_qwen3.TOWERS], ids=str)


def drawn(case: Case, *sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Images of these numbers of squares."""
    cfg = hooked_tower(case).tree
    grids = torch.tensor([[1, cfg.pixels.merge * rows, cfg.pixels.merge * columns] for rows, columns in sizes])
    n_patches, generator = int(grids.prod(1).sum()), torch.Generator().manual_seed(5)
    pixels = torch.randn(n_patches, cfg.embed.d_patch, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grids}


def tokens_of(case: Case, images: dict[str, Tensor], model: Any = None) -> Tensor:
    """What transformers gives, the tokens of one image after the other."""
    return (model or theirs(case))(images["pixel_values"], images["image_grid_thw"]).pooler_output


@alone
@torch.no_grad()
def test_tokens_of_a_tower_alone(case: Case):
    model, images = hooked_tower(case), drawn(case, (3, 5), (2, 2))
    found, expected = model(**images), tokens_of(case, images)
    assert_close(torch.cat([found[0], found[1, :4]]), expected)
    assert not found[1, 4:].any()
    assert model(**images, return_type="embeddings").shape[:2] == (2, 15 * model.tree.pixels.merge**2)


@torch.no_grad()
def test_a_part_of_a_model_is_a_tower_alone():
    """transformers has no model of `qwen2_vl_vision` alone, but each Qwen2-VL has one."""
    tower = theirs(OLD).model.visual
    model, inputs = HookedVisionEncoder.from_pretrained("tiny", hf_model=tower), scenes_of(OLD, "one")
    found = model(**images_of(inputs))
    assert_close(found[0], tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)
    report = model.verify()
    assert report.ok, str(report)


@alone
@torch.no_grad()
def test_a_tower_alone_comes_back(case: Case, tmp_path: Path):
    model, images = hooked_tower(case), drawn(case, (3, 5))
    reference(case).save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    ours, original = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert_same_tensors(ours, original)
    again = HookedVisionEncoder.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(**images), model(**images))


@alone
def test_identities_of_a_tower_alone(case: Case):
    for images in (hooked_tower(case).drawn_images(), drawn(case, (3, 5), (2, 2))):
        report = hooked_tower(case).verify(**images)
        assert report.ok, str(report)


@alone
@torch.no_grad()
@unchecked()
def test_every_site_of_a_tower_alone_is_alive(case: Case):
    model, images = hooked_tower(case), drawn(case, (2, 3))
    clean = model(**images)

    def bend(value: Tensor, hook: Any) -> Tensor:
        return value * torch.linspace(0.5, 1.5, value.shape[-1])

    moved = {name: model.run_with_hooks(**images, fwd_hooks=[(name, bend)]) - clean for name in model.all_points()}
    others = "merger.deepstack."  # which the tokens do not depend on, see `test_deepstack.py`
    assert [name for name, x in moved.items() if x.abs().max() < 1e-5 and not name.startswith(others)] == []


# ---- positions -------------------------------------------------------------------------------------------------------


def test_positions_are_those_of_transformers():
    model, inputs = hooked_vlm(WINDOWS), scenes_of(WINDOWS, "padded")
    expected, deltas = theirs(WINDOWS).model.get_rope_index(
        inputs["input_ids"],
        (inputs["input_ids"] == IMAGE).int(),
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    context, real = context_of(model, inputs), inputs["attention_mask"].bool()
    assert torch.equal(context.axis_positions[:, real], expected[:, real])
    assert torch.equal(context.shift, deltas[:, 0])


def test_images_side_by_side_are_two_images():
    """transformers takes tokens of images that follow one another for one image (`get_rope_index`)."""
    model, ids = hooked_vlm(WINDOWS), torch.tensor([[5, *[IMAGE] * (2 + 3), 6]])
    images = {"pixel_values": torch.zeros(20, 96), "image_grid_thw": torch.tensor([[1, 2, 4], [1, 6, 2]])}
    found = context_of(model, VisionInputs(ids, images)).axis_positions[:, 0]
    assert found.tolist() == [[0, 1, 1, 3, 3, 3, 6], [0, 1, 1, 3, 4, 5, 6], [0, 1, 2, 3, 3, 3, 6]]


@torch.no_grad()
def test_a_run_that_failed_and_a_frozen_cache_leave_positions_as_they_were():
    model, inputs = hooked_vlm(WINDOWS), scenes_of(WINDOWS, "one")
    text, cache = torch.tensor([[7, 8, 9]]), KeyValueCache(model.cfg.n_layers)
    model(text, past_kv_cache=cache)

    def fail(value: Tensor, hook: Any) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        model.run_with_hooks(**inputs, past_kv_cache=cache, fwd_hooks=[("blocks.1.hook_resid_pre", fail)])
    assert context_of(model, text, cache).axis_positions is None
    cache.freeze()
    model(**inputs, past_kv_cache=cache)
    assert context_of(model, text, cache).axis_positions is None
    cache.unfreeze()
    model(**inputs, past_kv_cache=cache)
    after = context_of(model, text, cache)
    n_words = inputs["input_ids"].shape[1] - int((inputs["input_ids"] == IMAGE).sum())
    assert after.axis_positions[:, 0].tolist() == [list(range(3 + n_words + 5, 3 + n_words + 8))] * 3  # 3 x 5 squares


@torch.no_grad()
def test_positions_of_images_matter():
    """A model without the rule has the positions of words, which is what transformers does without mm_token_type_ids."""
    model, inputs = hooked_vlm(WINDOWS), scenes_of(WINDOWS, "one")
    found = theirs(WINDOWS)(**inputs).logits
    assert_apart(found[:, -1], model(**inputs)[:, -1])
    kinds = WINDOWS.writer.more(inputs["input_ids"])
    assert torch.equal(model(**inputs, **kinds), model(**inputs))
    assert torch.equal(model({**inputs, **kinds}), model(**inputs))
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "stop_at_eos": False, "verbose": False}
    assert torch.equal(model.generate(**inputs, **kinds, **options), model.generate(**inputs, **options))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[1, 6, 8]], "image_grid_thw describes 48 patches, but pixel_values has 60"),
        ([[1, 3, 20]], "image 0 has 3 x 20 patches, which are not divisible into squares of 2 x 2"),
        ([[2, 6, 5]], "image 0 has 2 frames, an image has 1: videos are not supported"),
        ([6, 10, 1], r"image_grid_thw must be \[image, 3\], frames, rows and columns, got \(3,\)"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grid: list, message: str):
    inputs = scenes_of(WINDOWS, "one")
    with pytest.raises(ValueError, match=message):
        hooked_vlm(WINDOWS)(**{**inputs, "image_grid_thw": torch.tensor(grid)})


def test_other_inputs_are_refused():
    model, inputs = hooked_vlm(WINDOWS), scenes_of(WINDOWS, "one")
    with pytest.raises(ValueError, match=r"pixel_values must be \[patch, 96\], got \(60, 48\)"):
        model(**{**inputs, "pixel_values": inputs["pixel_values"][:, :48]})
    with pytest.raises(ValueError, match="but there is no image_grid_thw"):
        model(inputs["input_ids"], pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match="videos are not supported: give their frames as images"):
        model(**inputs, pixel_values_videos=inputs["pixel_values"], video_grid_thw=inputs["image_grid_thw"])
    halves = torch.tensor([[BEGIN, *[IMAGE] * 7, END, *[IMAGE] * 8]])
    with pytest.raises(
        ValueError, match="the 15 tokens of image 0 must follow one another in one row, but they begin at"
    ):
        model(halves, **images_of(inputs))


def test_rotary_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="have 6 pairs, but 16 features are 8"):
        MultimodalRotary(16, sections=(2, 2, 2)).axes()
    with pytest.raises(ValueError, match="need a multiple of 4 features, got 6"):
        AxialRotary(6).base_frequencies()
