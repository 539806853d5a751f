"""Studies of prompts with images, on a small LLaVA: hook objects on both sides, attribution, lenses, readings of image tokens."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from hooked_lm import HookedTransformer, HookedVisionLanguage, VisionInputs, analysis, patching
from hooked_lm.analysis.attribution.gradients import gradients
from hooked_lm.analysis.metrics import logit_difference
from hooked_lm.analysis.reading.images import attention_to_images, nearest_words, on_image
from hooked_lm.demo.shapes import Picture, pixels
from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.interventions import PatchHead, PatchMLP, PatchResidual, Scale, ZeroAblate
from hooked_lm.interventions.dictionaries import Activations, train_dictionary
from tests.close import assert_apart, assert_close, assert_near
from tests.engine.naive import naive
from tests.families._vision import VisionCase, hooked_vlm, scenes, written
from tests.families.vision_languages import CASES

CASE: VisionCase = next(case for case in CASES if case.name == "last-but-one")
DEEP: VisionCase = next(case for case in CASES if case.family == "qwen3_vl")
MODEL = hooked_vlm(CASE)


def prompts(scene: str = "one", n: int = 2, seed: int = 0) -> VisionInputs:
    """Rows of a scene with images of this seed; the text is the same for every seed."""
    inputs, images = written(CASE, scenes(CASE)[scene] * n), written(CASE, scenes(CASE)[scene] * n, seed)
    return VisionInputs(inputs["input_ids"], {"pixel_values": images["pixel_values"]})


def padded_prompts() -> tuple[VisionInputs, Tensor]:
    """Prompts of three lengths, and which of their tokens are real."""
    inputs = written(CASE, scenes(CASE)["padded"])
    mask = inputs["attention_mask"]
    return VisionInputs(inputs["input_ids"], {"pixel_values": inputs["pixel_values"]}, mask), mask.bool()


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -2, 7]


CORRUPTED, CLEAN = prompts(), prompts(seed=1)
_, CACHE = MODEL.run_with_cache(CLEAN)
IMAGE = (CORRUPTED.tokens[0] == MODEL.tree.image_token).nonzero()[:, 0].tolist()


def test_hook_objects_act_on_both_sides():
    """In one list, and in cells of `run_each`, which are the runs one by one."""
    cells = {
        "residual": PatchResidual(0, positions=IMAGE[3], source=CACHE),
        "heads": [PatchHead(0, positions=IMAGE[0], source=CACHE, heads=[1]), PatchMLP(1, source=CACHE)],
        "tower": ZeroAblate(("vision.z", 0), heads=[2]),
        "patch": Scale(("vision.resid_post", 0), factor=3.0, positions=[5]),
        "both": [
            PatchResidual(hook_point=("vision.resid_pre", 1), positions=[2], source=CACHE),
            ZeroAblate("z", 1, heads=[0]),
        ],
        "projector": [Scale("projector.hook_out", factor=0.5), Scale("hook_embed_merged", factor=2.0, positions=0)],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no cell runs as a whole forward pass
        result = patching.run_each(MODEL, CORRUPTED, cells, metric=metric)
    with torch.no_grad():
        runs = [
            metric(MODEL.run_with_hooks(CORRUPTED, fwd_hooks=cell if isinstance(cell, list) else [cell]))
            for cell in cells.values()
        ]
    assert_close(result.values, torch.stack(runs))
    for values in result.values:
        assert_apart(values, result.corrupted)


@torch.no_grad()
@pytest.mark.parametrize("base", ["vision.blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre", "hook_embed_merged"])
def test_changes_of_the_base_run_come_with_those_of_a_cell(base: str):
    shared = Edit(base, lambda value: value * 2, (1,) if base.startswith("vision") else (IMAGE[1],))
    cell = [
        Edit("vision.blocks.1.hook_mlp_out", torch.zeros(1), (3,)),
        Edit("blocks.1.hook_mlp_out", torch.zeros(1), (4,)),
    ]
    experiment = Experiment(MODEL, CORRUPTED, [metric], [shared])
    [(_, found)] = experiment.run([cell], progress=False)

    def hook(edit: Edit):
        return edit.site, lambda value, hook: edit.write(value, hook.dims, 0, value.shape[1])

    assert_close(found[0], metric(MODEL.run_with_hooks(CORRUPTED, fwd_hooks=[hook(edit) for edit in (shared, *cell)])))
    assert_apart(found[0], experiment.scores[0])


def test_text_before_an_image_is_not_computed_again():
    """A cell of the tower starts at the first token of its images, and one at the last patch of a layer at its token."""
    experiment = Experiment(MODEL, CORRUPTED, [metric])
    with torch.no_grad():
        list(experiment.run([[Edit("hook_image_features", torch.zeros(1), (2,))]], progress=False))
    n_pos, n_layers = CORRUPTED.shape[1], MODEL.cfg.n_layers
    assert 0 < experiment.cost.layer_rows <= 2 * n_layers * (n_pos - IMAGE[0])


@pytest.mark.parametrize("case", [CASE, DEEP], ids=str)
@torch.no_grad()
def test_the_tower_runs_from_the_block_that_a_cell_changes(case: VisionCase):
    """Blocks before it run once for all cells, with the changes of the base run; all that comes after it is run again."""
    model, inputs = hooked_vlm(case), written(case, scenes(case)["one"])
    given = VisionInputs(inputs["input_ids"], {name: inputs[name] for name in inputs if name in model.image_arguments})
    n_blocks = max(model.tree.feature_layers or (len(model.vision.blocks),))
    shared = Edit("vision.blocks.0.hook_attn_out", lambda value: value * 0.5, (1, 2))
    of_blocks = [f"vision.blocks.{i}.hook_mlp_out" for i in range(n_blocks)]
    names = ["vision.hook_patch_embed", *of_blocks, "projector.hook_in"]
    cells = [[Edit(name, lambda value: value * 2 + 0.1, (pos,))] for pos in (0, 3) for name in names]
    experiment, blocks = Experiment(model, given, [metric], [shared]), list(model.vision.blocks)
    n_images = [0] * len(blocks)

    def count(module: Any, args: Any) -> None:
        if module in blocks:
            n_images[module.layer] += len(args[0])

    handle = register_module_forward_pre_hook(count)  # of all modules: one of a block would make it a foreign module
    found = dict(experiment.run(cells, progress=False))
    handle.remove()
    # once for the streams before the blocks, then two positions at the sites up to the block
    assert n_images[:n_blocks] == [1 + 2 * (2 + i) for i in range(n_blocks)]
    logits = [naive(model, given, cell, [shared]) for cell in cells]
    expected = torch.stack([metric(one) for one in logits])
    assert_close(
        torch.cat([found[i] for i in range(len(cells))]), expected, scale=torch.stack(logits)
    )  # a difference of them


@torch.no_grad()
def test_values_of_a_cell_of_the_tower():
    """Captured in a pass that shares the base run, and in whole forward passes, which are announced."""
    experiment, sites = Experiment(MODEL, CORRUPTED, [metric]), ["blocks.0.hook_attn_out", "blocks.1.hook_mlp_out"]
    cells = [
        [Edit("vision.blocks.0.hook_mlp_out", torch.zeros(1), (3,))],
        [Edit("projector.hook_in", torch.zeros(1), (5,))],
    ]
    forwards = experiment.cost.forwards
    base, found = experiment.capture(cells, sites)
    assert experiment.cost.forwards == forwards + 1
    with pytest.warns(
        UserWarning, match="values at 'hook_embed' are not computed together: 2 cells run as whole forward passes"
    ):
        same, whole = experiment.capture(cells, [*sites, "hook_embed"])
    for site in sites:
        assert_close(base[site], same[site])
        for values, expected in zip(found, whole, strict=True):
            assert_close(values[site], expected[site])
            assert_apart(values[site], base[site])


def test_padded_prompts_run_as_whole_forward_passes():
    padded, _ = padded_prompts()
    cell = ZeroAblate(("vision.z", 0), heads=[2])
    with pytest.warns(UserWarning, match="the prompts are padded: 1 cell runs as a whole forward pass"):
        result = patching.run_each(MODEL, padded, [cell], metric=metric)
    with torch.no_grad():
        assert_close(result.values[0], metric(MODEL.run_with_hooks(padded, fwd_hooks=[cell])))


def test_a_classic_sweep_takes_images():
    found = patching.get_act_patch_resid_pre(MODEL, CORRUPTED, CACHE, lambda logits: metric(logits).mean())
    expected = patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric).mean
    assert_close(found, expected)


@pytest.mark.slow
def test_attribution_of_patches_and_tokens():
    for site in ("resid_pre", "vision.resid_pre", "hook_image_features"):
        found = analysis.attribute(MODEL, CORRUPTED, CLEAN, metric=metric, sites=site, check=True)
        assert_close(found.exact, patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, sites=site).values)
        assert found.values.shape == found.exact.shape
    with pytest.raises(ValueError, match="has 4 images: attribution there needs one in each of the prompts"):
        analysis.attribute(MODEL, prompts("two"), prompts("two", seed=1), metric=metric, sites="vision.resid_pre")


@pytest.mark.slow
@pytest.mark.parametrize("site", ["hook_embed_merged", "vision.hook_patch_embed"])
def test_integrated_gradients_of_images_are_complete(site: str):
    """What text and images embed, or patches, sums to what other images change; gradients alone do not."""

    def total(method: str) -> Tensor:
        options: dict[str, Any] = {"sites": site, "positions": None, "method": method, "steps": 32, "check": False}
        return analysis.attribute(MODEL, CORRUPTED, CLEAN, metric=metric, **options).effects().values.squeeze(0)

    with torch.no_grad():
        expected = metric(MODEL(CLEAN)) - metric(MODEL(CORRUPTED))
    assert_near(total("ig-inputs"), expected, 0.1, because="an integral by 32 steps")
    assert (total("gradient") - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize("site", ["blocks.0.hook_resid_pre", "hook_embed_merged", "projector.hook_out"])
def test_a_tower_has_a_graph_only_for_gradients_in_it(site: str):
    seen = []
    hooks = [("vision.blocks.0.hook_resid_pre", lambda value, hook: seen.append(value.requires_grad))]
    found = gradients(MODEL, CORRUPTED, [site], metric, hooks)
    assert found.gradients[site].abs().sum() > 0
    assert seen == [site.startswith("projector")]


def test_a_lens_at_image_positions():
    found = analysis.logit_lens(MODEL, CORRUPTED, positions=IMAGE)
    with torch.no_grad():
        logits = MODEL(CORRUPTED)[:, IMAGE].transpose(0, 1)
    assert_close(found.logits[-1], logits.topk(5).values)


def test_knockout_of_attention_to_an_image():
    edges = {"image": (IMAGE, [-1]), "half": (IMAGE[:8], [-1, -2])}
    found = patching.attention_knockout(MODEL, CORRUPTED, edges, metric=metric)

    def run(layer: int, keys: list[int], queries: list[int]) -> Tensor:
        def mask(scores: Tensor, hook: Any) -> Tensor:
            for query in queries:
                scores[:, :, query, keys] = float("-inf")
            return scores

        return metric(MODEL.run_with_hooks(CORRUPTED, fwd_hooks=[(MODEL.names(("attn_scores", layer))[0], mask)]))

    with torch.no_grad():
        expected = [torch.stack([run(i, *ends) for i in range(MODEL.cfg.n_layers)]) for ends in edges.values()]
    assert_close(found.values, torch.stack(expected))


def test_models_that_read_no_images_say_so():
    text = HookedTransformer.from_pretrained("demo")
    with pytest.raises(TypeError, match="the corrupted have images, which a HookedTransformer does not read"):
        patching.path_patch(text, CORRUPTED, CLEAN, "logits", metric=metric)


def test_nearest_words():
    table = nearest_words(MODEL, CORRUPTED, k=3)
    assert len(table) == 2 * MODEL.cfg.n_layers * len(IMAGE) * 3
    row = table.query(f"prompt == 1 and layer == 1 and position == {IMAGE[4]} and rank == 0").iloc[0]
    with torch.no_grad():
        stream = MODEL.run_with_cache(CORRUPTED)[1]["resid_pre", 1][1, IMAGE[4]]
        cosines = torch.nn.functional.cosine_similarity(stream, MODEL.W_E, dim=-1)
    assert row["id"] == int(cosines.argmax())
    assert_close(torch.tensor(row["cosine"], dtype=torch.float32), cosines.max())
    with pytest.raises(ValueError, match="the prompts have no images"):
        nearest_words(MODEL, VisionInputs(torch.tensor([[3, 4]])))


def test_attention_to_images():
    found = attention_to_images(MODEL, CORRUPTED)
    with torch.no_grad():
        pattern = MODEL.run_with_cache(CORRUPTED)[1]["pattern", 1]
    assert_close(found.values[1, 2], pattern[:, 2, -1, IMAGE].T)
    several = attention_to_images(MODEL, CORRUPTED, positions=[0, -1])
    assert_close(several.values[1, 2], pattern[:, 2, [0, -1]].mean(1)[:, IMAGE].T)
    picture = on_image(found)
    assert picture.shape[-2:] == (4, 4)
    assert_close(picture[1, 2, 2, 3], found.mean[1, 2, 11])


def test_heads_are_read_of_padded_prompts_with_images():
    """Each prompt as if it were alone. No image token repeats another; words do."""
    padded, mask = padded_prompts()
    padded.tokens[:, -1] = padded.tokens[:, -2]
    statistics = analysis.attention_statistics(MODEL, padded)
    scores = analysis.head_scores(MODEL, padded, kinds=["previous_token", "duplicate_token"])
    detected = analysis.detect_head(MODEL, padded, "previous_token_head")
    for i, real in enumerate(mask):
        alone = MODEL.rows(padded, [i])
        alone = VisionInputs(alone.tokens[:, real], alone.images)
        with torch.no_grad():
            pattern = MODEL.run_with_cache(alone)[1]["pattern", 1][0]
        before = pattern.diagonal(-1, 1, 2)
        assert_close(statistics.values[2, 1, :, i], pattern[:, 1:, 0].mean(1))
        assert_close(scores.values[0, 1, :, i], before.mean(1))
        ids = alone.tokens[0]
        same = (ids[:, None] == ids).tril(-1) & (ids != MODEL.tree.image_token)
        assert_close(scores.values[1, 1, :, i], (pattern * same).sum((1, 2)) / same.any(1).sum())
        n = len(ids)
        assert_close(scores.chance[0, 1, :, i], (1 / torch.arange(2, n + 1)).mean().expand(4))
    n_queries = mask.sum(1) - 1
    assert_close(detected[1], (scores.values[0, 1] * n_queries / (n_queries + 1)).mean(1))
    with pytest.raises(ValueError, match="chance='shuffled' needs prompts without images"):
        analysis.head_scores(MODEL, padded, kinds=["previous_token"], chance="shuffled")


def test_examples_of_activations_are_found_at_image_tokens():
    padded, real = padded_prompts()
    with torch.no_grad():
        values = MODEL.run_with_cache(padded)[1]["post", 0][..., 3].masked_fill(~real, -torch.inf)
    for data in (padded, [MODEL.rows(padded, [row]) for row in range(3)]):
        found = analysis.max_activating_examples(MODEL, data, site=("post", 0), neuron=3, k=4, batch_size=2)
        assert_close(found.values, values.flatten().topk(4).values)
        assert_close(values[found.texts, found.positions], found.values)
    assert (padded.tokens[found.texts, found.positions] == MODEL.tree.image_token).any()
    with pytest.raises(
        ValueError, match=r"'vision.blocks.0.mlp.hook_post' .* has no vector at each position of the text"
    ):
        analysis.max_activating_examples(MODEL, padded, site=("vision.post", 0), neuron=3)


@pytest.mark.slow
def test_a_tuned_lens_is_trained_on_prompts_with_images():
    """Of a prompt that is held out, padding is left out."""
    padded, real = padded_prompts()
    lens = analysis.train_tuned_lens(MODEL, padded, steps=20, learning_rate=0.01)
    before, after = lens.held_out.mean[:, 0]
    assert after < before
    held = int(torch.randperm(3, generator=torch.Generator().manual_seed(0))[0])
    alone = MODEL.rows(padded, [held])
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(VisionInputs(alone.tokens[:, real[held]], alone.images))
        lens_logits = MODEL.unembed(MODEL.ln_final(cache["resid_post", 0]))
        log_probs = logits.log_softmax(-1)
        expected = (log_probs.exp() * (log_probs - lens_logits.log_softmax(-1))).sum(-1).mean()
    assert_close(before, expected)


def test_random_tokens_have_no_tokens_of_images():
    """Also of a model without a tokenizer, where no token is special."""
    assert MODEL.tokenizer is None
    tokens = analysis.repeated_random_tokens(MODEL, 2, MODEL.cfg.d_vocab - 1)
    assert not (tokens == MODEL.tree.image_token).any()
    assert analysis.head_scores(MODEL, length=20).n_prompts == 16


def test_uniform_attention_sees_all_tokens_of_an_image():
    case = next(case for case in CASES if case.family == "gemma3")
    model = hooked_vlm(case)
    inputs = model.drawn_inputs()
    scores = analysis.head_scores(model, inputs, kinds=["previous_token"])
    assert scores.chance is not None
    with torch.no_grad():
        pattern = model.run_with_cache(inputs)[1]["pattern", 1][0, 0]
    uniform = (pattern > 0) / (pattern > 0).sum(1, keepdim=True)
    assert_close(scores.chance[0, 1, 0, 0], uniform.diagonal(-1).mean())
    assert (pattern.triu(1) > 0).any()


def test_results_over_patches_fold_into_a_picture():
    result = patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, sites="vision.resid_pre", layers=[0])
    assert on_image(result).shape == (1, 4, 4)  # without the class token
    assert_close(on_image(result)[0, 1, 2], result.select(patch="1,2").mean[0])
    with pytest.raises(ValueError, match="no axis 'patch' with rows and columns; their axes are layer, position"):
        on_image(patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric))


def test_the_patch_of_a_shape_restores_the_answer():
    """In the bundled model, of which it is known what it looks at: one patch of the shape that is asked about."""
    model = HookedVisionLanguage.from_pretrained("demo-shapes")
    green = Picture((("circle", "red"), ("square", "green"), ("triangle", "blue"), ("cross", "yellow")), seed=5)
    tokens = model.to_tokens("<image> " * 36 + "what colour is the shape in the upper right ?")
    runs = [
        VisionInputs(tokens, {"pixel_values": pixels(one)[None]}) for one in (green.with_shape(1, colour="blue"), green)
    ]
    colours = [model.to_single_token(colour) for colour in ("green", "blue")]
    restored = patching.sweep(model, *runs, metric=logit_difference(*colours), sites="hook_image_features").normalized()
    picture = on_image(restored)
    assert picture.shape == (6, 6)
    assert picture[:3, 3:].max() > 0.9
    assert picture[3:].abs().max() < 0.1
    assert picture[:3, :3].abs().max() < 0.1


def test_a_cache_of_other_images_is_refused():
    with pytest.raises(
        ValueError, match=r"the clean 'projector.hook_out' has shape \(4, 16, .*, that of these images is \(2, 16"
    ):
        patching.sweep(
            MODEL,
            CORRUPTED,
            metric=metric,
            sites="projector.hook_out",
            replace_with=MODEL.run_with_cache(prompts("two"))[1],
        )


def test_a_dictionary_is_trained_on_prompts_with_images():
    """Its vectors are those of real tokens, of images too; a tower is trained alone."""
    padded, real = padded_prompts()
    _, cache = MODEL.run_with_cache(padded)
    stream = Activations(MODEL, padded, ("resid_post", 0), buffer_prompts=len(padded))
    assert_close(stream.vectors(range(len(padded)))[0], cache["resid_post", 0][real])
    assert_close(stream.vectors([2])[0], cache["resid_post", 0][2, real[2]])
    trained = train_dictionary(
        MODEL, padded, site=("mlp_out", 0), width=64, k=4, steps=2, vectors_per_step=8, held_out=0.3
    )
    assert trained.figures is not None
    assert "CE spliced" in trained.figures.axes["figure"]
    with pytest.raises(
        ValueError, match=r"'vision.blocks.0.hook_resid_post' has values of images: .* HookedVisionEncoder"
    ):
        Activations(MODEL, padded, ("vision.resid_post", 0))
    with pytest.raises(ValueError, match="skipped from the left, where these prompts are padded"):
        Activations(MODEL, padded, ("resid_post", 0), skip=1)


def test_the_strings_of_inputs_are_those_of_their_ids():
    trained = HookedVisionLanguage.from_pretrained("demo-shapes")
    inputs = trained.prepare("<image> what colour ?", pixels(Picture((("circle", "red"),) * 4))[None])
    assert trained.to_str_tokens(inputs) == trained.to_str_tokens(inputs.tokens)
    assert trained.to_string(inputs) == trained.to_string(inputs.tokens)
