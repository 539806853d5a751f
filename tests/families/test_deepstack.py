"""Features of images from several depths of the tower, which the first layers of Qwen3-VL's decoder add to the stream."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionEncoder, HookedVisionLanguage, VisionInputs
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.reading.direct import direct_logit_attribution
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_languages import qwen3_vl
from hooked_lm.patching import ablate, sweep
from tests.close import assert_apart, assert_close
from tests.families._models import with_tree
from tests.families._vision import hooked_vlm, logits_of, reference, scenes, theirs, written
from tests.families.vision_qwen3 import CASES
from tests.unchecked import unchecked

CASE = CASES[0]
SITES = ("blocks.0.hook_deepstack", "blocks.1.hook_deepstack")


@torch.no_grad()
def test_features_are_those_of_the_tower_at_tokens_of_images() -> None:
    """Of several images of different sizes, in padded rows; the site has zeros elsewhere, also on text alone."""
    model, inputs = hooked_vlm(CASE), written(CASE, scenes(CASE)["padded"])
    _, cache = model.run_with_cache(**inputs)
    is_image = inputs["input_ids"] == model.tree.image_token
    n_tokens = inputs["image_grid_thw"].prod(1) // 4
    for i, site in enumerate(SITES):
        made = cache[f"projector.deepstack.{i}.hook_out"]
        expected = torch.cat([each[:n] for each, n in zip(made, n_tokens.tolist(), strict=True)])
        assert torch.equal(cache[site][is_image], expected)
        assert not cache[site][~is_image].any()
    _, cache = model.run_with_cache(inputs["input_ids"][1, -4:][None])
    assert all(cache[site].shape == (1, 4, 32) and not cache[site].any() for site in SITES)


@torch.no_grad()
def test_its_order_matters() -> None:
    """Features of one depth in the place of the other, or after later layers, would be noticed."""
    model, inputs = hooked_vlm(CASE), written(CASE, scenes(CASE)["one"])
    expected = logits_of(CASE, inputs)
    assert_close(model(**inputs), expected)
    swapped = replace(model.tree, feature_layers=(3, 2, 1))
    assert_apart(with_tree(model, swapped)(**inputs)[:, -1], expected[:, -1])


@torch.no_grad()
def test_the_stream_is_the_sum_of_its_parts() -> None:
    model, inputs = hooked_vlm(CASE), written(CASE, scenes(CASE)["two"])
    _, cache = model.run_with_cache(**inputs)
    stack, labels = cache.decompose_resid(return_labels=True)
    assert labels == ["embed", "0_deepstack", "1_deepstack", "0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"]
    assert_close(stack.sum(0), cache["resid_post", 1])
    assert_close(cache.decompose_resid(1).sum(0), cache["resid_pre", 1])
    whole, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    assert "1_deepstack" in labels
    assert_close(whole.sum(0), cache["resid_post", 1])


@torch.no_grad()
def test_a_step_after_an_image_adds_nothing() -> None:
    """An edit of the site acts at words, too."""
    model, ids = hooked_vlm(CASE), torch.tensor([[4, 7, 9]])

    def add(value: Tensor, hook: object) -> Tensor:
        return value + 1.0

    expected = model.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_post", add)])
    assert_close(model.run_with_hooks(ids, fwd_hooks=[(SITES[0], add)]), expected)


@pytest.mark.parametrize("indexes", [[1, 0], [0, 0], [3], [-1], [0, 1, 2]], ids=str)
def test_depths_that_transformers_would_not_use_are_refused(indexes: list[int]) -> None:
    values = reference(CASE).config.to_dict()
    values["vision_config"]["deepstack_visual_indexes"] = indexes
    reason = (
        "of 3 depths are more than the 2 layers"
        if len(indexes) == 3
        else "must be blocks of the tower, which has 3, in"
    )
    with pytest.raises(ValueError, match=reason):
        qwen3_vl.config(HFConfig(values, {}))


@torch.no_grad()
def test_analyses_count_it_as_a_component() -> None:
    """The contributions to a logit sum to it, and the writers of a graph to the stream."""
    model, inputs = hooked_vlm(CASE), written(CASE, scenes(CASE)["two"])
    for prompts in (torch.tensor([[4, 7, 9, 12], [8, 3, 3, 20]]), with_images(inputs)):
        for position in (-1, -3):
            found = direct_logit_attribution(model, prompts, 5, positions=position)
            assert_close(found.values.sum(0), model(prompts)[:, position, 5])
    place = found.axes["component"].index("1_deepstack")
    on_image = direct_logit_attribution(model, with_images(inputs), 5, positions=8)
    assert not found.values[place].any()
    assert on_image.values[place].abs() > 0.01
    writers, last = Graph.of(model).writers, "blocks.1.hook_resid_post"
    _, cache = model.run_with_cache(**inputs, names_filter=[*(node.site for node in writers), last])
    assert {"d0", "d1"} < {node.name for node in writers}
    assert_close(torch.stack([node.of(cache[node.site]) for node in writers]).sum(0), cache[last])


@torch.no_grad()
def test_folding_changes_no_prediction() -> None:
    processed = HookedVisionLanguage.from_pretrained("tiny", hf_model=reference(CASE))
    inputs = written(CASE, scenes(CASE)["two"])
    assert "w" not in processed.blocks[0].ln1._parameters
    assert_close(processed(**inputs).log_softmax(-1), hooked_vlm(CASE)(**inputs).log_softmax(-1))
    assert processed.verify().ok


@torch.no_grad()
@unchecked()
def test_a_sweep_over_the_site_is_a_loop_of_runs() -> None:
    model, inputs = hooked_vlm(CASE), written(CASE, scenes(CASE)["two"])
    both = (written(CASE, scenes(CASE)["two"], seed) for seed in (0, 1))
    corrupted, clean = (with_images({**each, "input_ids": inputs["input_ids"]}) for each in both)
    positions = [1, 3, 7, 30, inputs["input_ids"].shape[1] - 1]
    result = sweep(model, corrupted, clean, metric=answer, sites="deepstack", layers=[0, 1], positions=positions)
    _, cache = model.run_with_cache(clean)

    def run(site: str, pos: int) -> Tensor:
        def patch(value: Tensor, hook: object) -> Tensor:
            value[:, pos] = cache[site][:, pos]
            return value

        return answer(model.run_with_hooks(corrupted, fwd_hooks=[(site, patch)]))

    assert_close(result.values, torch.stack([torch.stack([run(site, pos) for pos in positions]) for site in SITES]))


def answer(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -2, 7]


def with_images(inputs: dict[str, Tensor]) -> VisionInputs:
    return VisionInputs(inputs["input_ids"], {name: inputs[name] for name in ("pixel_values", "image_grid_thw")})


@torch.no_grad()
@unchecked()
def test_an_ablated_layer_adds_nothing() -> None:
    model, inputs = hooked_vlm(CASE), with_images(written(CASE, scenes(CASE)["two"]))
    found = ablate(model, inputs, "layers", metric=answer, layers=[0, 1])
    before: list[Tensor] = []

    def keep(value: Tensor, hook: object) -> None:
        before[:] = [value]

    for layer in (0, 1):
        sites = [(f"blocks.{layer}.hook_resid_pre", keep), (f"blocks.{layer}.hook_resid_post", lambda *_: before[0])]
        assert_close(found.values[layer], answer(model.run_with_hooks(inputs, fwd_hooks=sites)))
    mean = ablate(model, inputs, "layers", metric=answer, layers=[0], replace_with="mean")
    assert_apart(mean.values[0], found.values[0])
    _, cache = model.run_with_cache(inputs)
    of_mean = [
        (f"blocks.0.hook_{name}", lambda value, hook: cache[hook.name].mean((0, 1)).expand_as(value))
        for name in ("attn_out", "mlp_out", "deepstack")
    ]
    assert_close(mean.values[0], answer(model.run_with_hooks(inputs, fwd_hooks=of_mean)))
    with pytest.raises(ValueError, match="replace_with='resample' needs values of other prompts"):
        ablate(model, inputs, "layers", metric=answer, replace_with="resample")


@torch.no_grad()
def test_a_tower_alone_has_them_at_sites() -> None:
    """Its output are the tokens of the last layer."""
    tower = theirs(CASE).model.visual
    model, inputs = HookedVisionEncoder.from_pretrained("tiny", hf_model=tower), written(CASE, scenes(CASE)["one"])
    images = inputs["pixel_values"], inputs["image_grid_thw"]
    found, cache = model.run_with_cache(pixel_values=images[0], image_grid_thw=images[1])
    expected = tower(*images)
    assert_close(found[0], expected.pooler_output)
    for i, features in enumerate(expected.deepstack_features):
        assert_close(cache[f"merger.deepstack.{i}.hook_out"][0], features)
