"""Experiments on prompts with images against a loop of runs with hooks: paths, tracing, resampling, interchanges, patchscopes.

On a LLaVA, a model whose image tokens see each other in both directions, and one whose rows have positions of their own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedVisionLanguage, VisionInputs, patching
from hooked_lm.analysis.alignment.interchange import Location, interchange, interchange_accuracy
from hooked_lm.analysis.alignment.search import sweep_alignments
from hooked_lm.analysis.reading.patchscopes import patchscope
from hooked_lm.interventions.steering import steering_vectors
from hooked_lm.interventions.steering_sweep import sweep_steering
from tests.close import assert_apart, assert_close, is_close
from tests.core import thinned
from tests.families._vision import hooked_vlm, written
from tests.families.vision_languages import CASES

NAMES = ("last-but-one", "window-in-images", "windows-of-two-squares")
FAMILIES = ("llava", "gemma3", "qwen2_5_vl")
STUDIED = [case for case in CASES if (case.family, case.name) in zip(FAMILIES, NAMES, strict=True)]
Hooks = list[tuple[str, Callable[..., Any]]]


class Scene:
    """Two prompts of one length with an image each at different places, and the same prompts with other images."""

    def __init__(self, case: Any) -> None:
        self.model: HookedVisionLanguage = hooked_vlm(case)
        image = case.writer.sizes[0]
        rows = [[4, image, 5], [2, image, 7]]
        both = [written(case, rows, seed) for seed in (0, 1)]
        names = both[0].keys() - {"input_ids", "attention_mask"}
        self.corrupted, self.clean = (
            VisionInputs(both[0]["input_ids"], {name: of[name] for name in names}) for of in both
        )
        self.longer = VisionInputs(written(case, [[9, image, 7]])["input_ids"], self.model.rows(self.clean, [1]).images)
        self.image = [row.nonzero()[:, 0].tolist() for row in self.corrupted.tokens == self.model.tree.image_token]

    def values(self, rows: VisionInputs, hooks: Hooks = ()) -> Any:  # type: ignore[assignment]
        """The values at all sites of a run with these hooks."""
        with torch.no_grad(), self.model.hooks(fwd_hooks=list(hooks)):
            return self.model.run_with_cache(rows)[1]

    def score(self, hooks: Any, rows: VisionInputs | None = None) -> Tensor:
        """The metric of a run of the corrupted prompts with these hooks."""
        with torch.no_grad():
            return metric(self.model.run_with_hooks(rows or self.corrupted, fwd_hooks=hooks))


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, 6, 7]  # position 6 is of an image


def setting(index: Any, new: Tensor) -> Callable[..., Tensor]:
    """A hook that puts the values at an index of a site in their places."""

    def put(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[index] = new[index]
        return value

    return put


ALL = slice(None)


@pytest.fixture(scope="module", params=STUDIED, ids=lambda case: case.family)
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(request.param)


@pytest.mark.parametrize("receivers", thinned(["logits", ["L1H1<q>", "L1H2<v>"]], keep=["logits"]))
def test_paths(scene: Scene, receivers: Any):
    model = scene.model
    found = patching.path_patch(model, scene.corrupted, scene.clean, receivers, metric=metric)
    old, new = scene.values(scene.corrupted), scene.values(scene.clean)
    kv_head = 2 * model.cfg.n_key_value_heads // model.cfg.n_heads
    inputs = {"blocks.1.attn.hook_q": 1, "blocks.1.attn.hook_v": kv_head}
    for head in range(model.cfg.n_heads):
        hooks = [("blocks.0.attn.hook_z", setting((ALL, ALL, head), new["z", 0]))]
        hooks += [("blocks.1.hook_attn_out", setting(ALL, old["attn_out", 1]))]
        if receivers != "logits":
            between = scene.values(scene.corrupted, hooks)
            hooks = [(site, setting((ALL, ALL, i), between[site])) for site, i in inputs.items()]
        assert_close(found.values[0, head], scene.score(hooks))
    assert_apart(found.values[0], found.corrupted.expand(model.cfg.n_heads, 2))


@pytest.mark.slow
@pytest.mark.parametrize("site", ["hook_embed_merged", "vision.hook_patch_embed"])
def test_noise_on_parts_of_images(scene: Scene, site: str):
    """Restored in the text and in the tower, where noise on embeddings leaves everything as it was."""
    model, is_patch = scene.model, site.startswith("vision")
    at = [(0, 1), (0, 3), (1, 0)]  # image, and index in it
    options: dict[str, Any] = {"noise_site": site} if is_patch else {}
    clean, places = scene.values(scene.corrupted), at if is_patch else [(i, scene.image[i][k]) for i, k in at]
    where = torch.zeros(clean[site].shape[:2], dtype=torch.bool)
    where[tuple(torch.tensor(places).T)] = True
    generator, noised = torch.Generator().manual_seed(3), []
    for _ in range(2):
        noised.append(clean[site].clone())
        noised[-1][where] += 3.0 * clean[site][where].std() * torch.randn(3, clean[site].shape[2], generator=generator)
    for name, full, pos in (("resid_post", "blocks.0", scene.image[0][3]), ("vision.resid_post", "vision.blocks.0", 3)):
        found = patching.causal_trace(
            model, scene.corrupted, {0: [1, 3], 1: 0}, metric=metric, n_samples=2, seed=3, sites=name, layers=[0],
            positions=[pos], **options,
        )  # fmt: skip
        full = f"{full}.hook_resid_post"
        for sample, noise in enumerate(noised):
            hooks: Hooks = [(site, setting(ALL, noise))]
            assert_close(found.corrupted.view(2, 2)[sample], scene.score(hooks))
            hooks += [(full, setting((ALL, pos), clean[full]))]
            assert_close(found.values[0, 0].view(2, 2)[sample], scene.score(hooks))
        assert list(found.axes) == ["layer", "patch" if name.startswith("vision") else "position"]
    assert_apart(found.corrupted, found.clean)


def test_resampling_of_prompts_with_images(scene: Scene):
    model, one = scene.model, scene.model.rows(scene.clean, [0])
    options: dict[str, Any] = {"metric": metric, "replace_with": "resample", "components": "attention"}
    site, sources = "blocks.1.hook_attn_out", {"given": [scene.longer, one], "permuted": None}
    for name, source in sources.items():
        found = patching.ablate(model, scene.corrupted, source_prompts=source, **options)
        values = (
            scene.values(scene.corrupted)[site].flip(0) if source is None else scene.values(one)[site].expand(2, -1, -1)
        )
        assert_close(found.values[1], scene.score([(site, setting(ALL, values))]), msg=name)
    with pytest.raises(ValueError, match="no source prompt has the"):
        patching.ablate(model, one, source_prompts=one, **options)


def test_padding_is_in_no_mean(scene: Scene):
    model, extra = scene.model, torch.zeros(2, 3, dtype=torch.long)
    mask = torch.cat([extra, torch.ones_like(scene.clean.tokens)], 1)
    padded = VisionInputs(torch.cat([extra, scene.clean.tokens], 1), scene.clean.images, mask)
    found = [
        patching.ablate(model, scene.corrupted, "mlps", metric=metric, replace_with="mean", source_prompts=source)
        for source in (padded, scene.clean)
    ]
    assert_close(found[0].values, found[1].values)


@pytest.mark.parametrize("site", ["resid_pre", "vision.resid_pre"])
def test_interchanges(scene: Scene, site: str):
    model, is_patch = scene.model, site.startswith("vision")
    positions = [1, 2] if is_patch else torch.tensor([scene.image[0][:2], scene.image[1][1:3]])
    location = Location.of(model, (site, 1), positions)
    new = scene.values(scene.clean)[location.site]
    where = (torch.arange(2)[:, None], torch.as_tensor(positions).expand(2, 2))
    expected = scene.score([(location.site, setting(where, new))])
    changes = [(location, scene.clean)]
    logits = interchange(model, scene.corrupted, changes)
    assert_close(metric(logits), expected)
    assert_apart(metric(logits), scene.score([]))
    answers = torch.stack([logits[0, -1].argmax(), logits[1, -1].argmin()])
    for batch_size in (1, 2):
        accuracy = interchange_accuracy(model, scene.corrupted, changes, answers, batch_size=batch_size)
        assert accuracy.values.tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("site", ["resid_pre", "vision.resid_pre"])
def test_a_search_over_positions(scene: Scene, site: str):
    model, axis = scene.model, "patch" if site.startswith("vision") else "position"
    position = 2 if axis == "patch" else scene.image[0][1]
    location = Location.of(model, (site, 1), position)
    answers = interchange(model, scene.corrupted, [(location, scene.clean)])[:, -1].argmax(-1)
    found = sweep_alignments(
        model, scene.corrupted, scene.clean, answers, size=2, site=site, layers=[1], positions=[position], steps=2,
        batch_size=1, held_out=[1], progress=False,
    )  # fmt: skip
    assert list(found.axes) == ["exchanged", "layer", axis]
    assert found.select(exchanged="everything").values.flatten().tolist() == [1]


@pytest.mark.parametrize("site", ["resid_post", "vision.resid_post"])
def test_states_of_images_in_other_prompts(scene: Scene, site: str):
    model, source, target = scene.model, scene.model.rows(scene.clean, [0]), scene.model.rows(scene.corrupted, [1])
    position = 2 if site.startswith("vision") else scene.image[0][2]
    state = scene.values(source)[model.names((site, 1))[0]][0, position]
    projection = torch.randn(len(state), model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    found = patchscope(
        model, source, target, source_positions=position, target_positions=-2, source_layers=[1], target_layers=[0],
        max_new_tokens=2, site=site, target_site="resid_post", mapping=lambda states: states @ projection,
    )  # fmt: skip
    at, tokens = target.shape[1] - 2, target.tokens
    put = torch.zeros(1, target.shape[1] + 1, model.cfg.d_model)
    put[:, at] = state @ projection
    for new in found.tokens[0, 0]:
        with torch.no_grad():
            hooks = [("blocks.0.hook_resid_post", setting((ALL, at), put))]
            logits = model.run_with_hooks(VisionInputs(tokens, target.images), fwd_hooks=hooks)
        assert int(logits[0, -1].argmax()) == new
        tokens = torch.cat([tokens, new.view(1, 1)], 1)


def test_directions_between_prompts_with_images(scene: Scene):
    model, places = scene.model, [image[3] for image in scene.image]
    vectors = steering_vectors(
        model, scene.clean, scene.corrupted, held_out=0.5, positions=places, layers=[0], batch_size=1
    )
    both = [scene.values(rows)["resid_post", 0] for rows in (scene.clean, scene.corrupted)]
    differences = [both[0][row, place] - both[1][row, place] for row, place in enumerate(places)]
    assert any(is_close(vectors.directions[0], one) for one in differences), "that of the pair that is not held out"
    swept = sweep_steering(model, vectors, scene.corrupted, metric, coefficients=[2.0])
    assert_close(swept.values[0, 0], scene.score(vectors.adding({0: 2.0})))
    assert_apart(swept.values[0, 0], swept.corrupted)
    along = vectors.project(model, scene.clean, batch_size=1)
    assert_close(along.values, vectors.project(model, scene.clean).values)
    assert bool(along.values.isfinite().all())
