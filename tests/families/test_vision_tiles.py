"""LLaVA-NeXT and InternVL beyond what every vision-language model is asked: published configs, heads, layouts, refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooked_lm import HookedVisionEncoder, HookedVisionLanguage
from tests.close import assert_close
from tests.families._case import reference
from tests.families._vision import VisionCase, hooked_vlm, scenes, theirs, written
from tests.families.vision_tiles import CASES, TOWERS

WIDE, SIGLIP, TIED, _, _, SHRUNK, *_ = CASES
FIELDS = {  # of published configs, besides those of the classes
    "llava_next": {"ignore_index": -100, "use_image_newline_parameter": True, "vocab_size": 32064},
    "internvl": {"image_seq_length": 4},
    "llava_onevision": {"use_image_newline_parameter": True},
}
OF_TOWER = {
    "llava_next": {"vocab_size": 32000},
    "internvl": {"initializer_factor": 0.1, "dropout": 0.0},
    "llava_onevision": {},
}


def saved(case: Any, folder: Path, vision: dict[str, Any] | None = None, **fields: Any) -> Path:
    """The case's checkpoint with other fields in its config, and in that of its tower."""
    copy.deepcopy(reference(case)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    if vision is not None:
        config["vision_config"] |= vision
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", [WIDE, TIED, SHRUNK], ids=str)
def test_published_configs_are_read(case: VisionCase, tmp_path: Path):
    folder = saved(case, tmp_path, OF_TOWER[case.family], **FIELDS[case.family])
    model, inputs = HookedVisionLanguage.from_pretrained_no_processing(folder), written(case, scenes(case)["two"])
    with torch.no_grad():
        assert torch.equal(model(**inputs), hooked_vlm(case)(**inputs))


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path):
    """As transformers: the config of a large InternVL says that they are tied, and its file has both."""
    from transformers import AutoModelForImageTextToText

    folder = saved(TIED, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file(
        {**tensors, "language_model.lm_head.weight": embedding.flip(0)}, folder / "model.safetensors", {"format": "pt"}
    )
    model, inputs = HookedVisionLanguage.from_pretrained_no_processing(folder), written(TIED, scenes(TIED)["one"])
    with torch.no_grad():
        expected = AutoModelForImageTextToText.from_pretrained(folder)(**inputs).logits
        assert_close(model(**inputs), expected)
        assert_close(model(**inputs), hooked_vlm(TIED)(**inputs).flip(-1))


@torch.no_grad()
def test_tiles_are_images_of_the_tower():
    """The sites before `hook_image_features` are per tile, without the empty ones, and have the features of transformers."""
    inputs, model = written(WIDE, scenes(WIDE)["two"]), hooked_vlm(WIDE)
    _, cache = model.run_with_cache(**inputs)
    assert cache["vision.blocks.0.hook_resid_pre"].shape == (5 + 3, 17, 32)
    assert cache["projector.hook_in"].shape == cache["projector.hook_out"].shape == (5 + 3, 16, 32)
    found = theirs(WIDE).model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output
    assert [len(image) for image in found] == [52, 28]
    for image, expected in enumerate(found):
        assert_close(cache["hook_image_features"][image, : len(expected)], expected)


def test_places_of_tokens_are_those_of_the_picture():
    """Each place of the picture of tiles has one token; those of the whole image and the ends of rows are no places."""
    inputs, model = written(WIDE, scenes(WIDE)["two"]), hooked_vlm(WIDE)
    first, second = model.patch_grid(inputs)
    begin = 2 + 16  # words, and tokens of the whole image
    assert first.tolist() == [list(range(begin + 9 * row, begin + 9 * row + 8)) for row in range(4)]
    assert second.shape == (4, 2)
    places = model.image_positions(inputs)
    assert [places.cell(position) for position in (2, begin + 9, begin + 17)] == [(0, -1, -1), (0, 1, 0), (0, 1, -1)]


@torch.no_grad()
def test_several_images_of_a_prompt_are_not_cut_into_tiles():
    """In LLaVA-OneVision: a prompt with two images in one tile each, and one with an image in several."""
    model, (a, b) = hooked_vlm(SHRUNK), SHRUNK.writer.sizes
    alone, image = [model.tree.image_token] * 17, [model.tree.image_token] * len(SHRUNK.writer.ids(b))
    rows = [[5, *alone, 6, *alone, 7], [0] * 7 + [5, *image, 6]]
    tokens, drawn = torch.tensor(rows), SHRUNK.writer.pixels([[a, a], [b]], torch.Generator().manual_seed(0))
    drawn["pixel_values"][:2, 1:] = 0.0
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), **drawn}
    counted = {**inputs, "batch_num_images": torch.tensor([2, 1])}
    expected, real = theirs(SHRUNK)(**counted).logits, inputs["attention_mask"].bool()
    assert_close(model(**counted)[real], expected[real])
    assert_close(model(**inputs)[real], expected[real])


@torch.no_grad()
def test_squares_of_oblong_images_have_their_places():
    """transformers takes the patches of any image for a square (`get_image_features` of InternVL): 2 x 8 for 4 x 4."""
    model = hooked_vlm(TIED)
    pixels = torch.randn(1, 3, 2 * 6, 8 * 6, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[5, *[model.tree.image_token] * 4, 7]])
    _, cache = model.run_with_cache(tokens, pixel_values=pixels)
    patches = cache["projector.hook_in"][0].view(2, 8, -1)
    second = torch.cat([patches[0, 2], patches[0, 3], patches[1, 2], patches[1, 3]])
    assert_close(cache["projector.hook_merged"][0, 1], model.projector.ln(second))
    assert model.image_features({"pixel_values": pixels}).cells.tolist() == [[[0, 0], [0, 1], [0, 2], [0, 3]]]
    with pytest.raises(ValueError, match="an image of 3 x 4 patches cannot be cut into squares of 2 x 2"):
        model(tokens, pixel_values=pixels[..., :24].repeat(1, 1, 2, 1)[:, :, :18])


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (
        WIDE,
        {"vision_feature_select_strategy": "full"},
        {},
        "'full' keeps a class token, which has no place among tiles",
    ),
    (SIGLIP, {"vision_feature_select_strategy": "default"}, {}, "leaves out a class token, which the tower lacks"),
    (WIDE, {"image_grid_pinpoints": [[24, 50]]}, {}, "24 x 50, which is no whole number of tiles of 24 x 24"),
    (WIDE, {"use_image_newline_parameter": False}, {}, "ignores use_image_newline_parameter=False"),
    (
        SHRUNK,
        {"vision_aspect_ratio": "pad"},
        {},
        "vision_aspect_ratio='pad': known is 'anyres_max_' with a number of tiles",
    ),
    (TIED, {"vision_feature_select_strategy": "full"}, {}, "need one layer without class tokens"),
    (TIED, {"vision_feature_layer": [0, 1]}, {}, r"vision_feature_layer=\[0, 1\] is not supported"),
    (TIED, {"downsample_ratio": 0.4}, {}, "downsample_ratio=0.4 is not supported: it must be one over a whole number"),
    (TIED, {}, {"norm_type": "no_norm"}, "norm_type='no_norm': known are 'layer_norm', 'rms_norm'"),
    (TIED, {}, {"image_size": [24, 48]}, r"image_size=\[24, 48\] is not supported: height and width must be equal"),
]


@pytest.mark.parametrize(("case", "fields", "vision", "message"), REFUSED)
def test_what_is_not_understood_is_refused(
    case: VisionCase, fields: dict[str, Any], vision: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        HookedVisionLanguage.from_pretrained_no_processing(saved(case, tmp_path, vision, **fields))


@torch.no_grad()
def test_scales_are_part_of_what_is_added():
    """`hook_attn_out` is what attention adds to the stream, LayerScale included."""
    model: HookedVisionEncoder = HookedVisionEncoder.from_pretrained_no_processing(
        "tiny", hf_model=reference(TOWERS[0])
    )
    _, cache = model.run_with_cache(**model.drawn_images())
    block = model.blocks[1]
    added: Tensor = cache["resid_mid", 1] - cache["resid_pre", 1]
    assert_close(cache["attn_out", 1], added)
    result = cache["blocks.1.attn.hook_z"].flatten(2) @ block.attn.W_O.flatten(0, 1) + block.attn.b_O
    assert_close(added, result * block.ln1_post.w)
