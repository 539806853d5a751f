"""Names of sites in a model that reads images: the decoder's, the tower's, and those of other libraries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import ActivationCache, HookedVisionLanguage
from hooked_lm.interventions import PatchResidual, ZeroAblate
from tests.close import assert_close

TOWER = {"n_layers": 3, "d_model": 16, "n_heads": 2, "image_size": 8, "patch_size": 4, "act_fn": "gelu"}
SIZES = {"n_layers": 2, "d_model": 24, "n_heads": 2, "n_ctx": 20, "d_vocab": 12, "act_fn": "gelu", "seed": 2}
IDS = torch.tensor([[1, *[9] * 4, 2]])
PIXELS = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))}


@pytest.fixture(scope="module")
def model() -> HookedVisionLanguage:
    return HookedVisionLanguage({**SIZES, "vision": TOWER, "image_token": 9}).requires_grad_(False)


@pytest.fixture(scope="module")
def cache(model: HookedVisionLanguage) -> ActivationCache:
    return model.run_with_cache(IDS, **PIXELS)[1]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("lm.blocks.1.attn.hook_z", "blocks.1.attn.hook_z"),
        ("language.blocks.1.attn.hook_z", "blocks.1.attn.hook_z"),
        ("lm.ln_final.hook_normalized", "ln_final.hook_normalized"),
        ("vision_encoder.blocks.2.attn.hook_z", "vision.blocks.2.attn.hook_z"),
        ("vision_encoder.encoder_layers.1.attn.o.hook_in", "vision.blocks.1.attn.hook_z"),
        ("vision_encoder.encoder_layers.0.hook_mlp_in", "vision.blocks.0.mlp.hook_in"),
        ("vision_encoder.blocks.0.attn.proj.hook_out", "vision.blocks.0.hook_attn_out"),
        ("vision_encoder.post_layernorm.hook_in", "vision.blocks.2.hook_resid_post"),
        ("vision_encoder.hook_vision_embed", "vision.blocks.0.hook_resid_pre"),
        ("vision_projector.hook_vision_proj_out", "projector.hook_out"),
        ("vision_projector.hook_in", "projector.hook_in"),
        ("vision_projector.hook_out", "projector.hook_out"),
        (("lm.layer.pre", 1), "blocks.1.hook_resid_pre"),
        (("lm.layer.post", 1), "blocks.1.hook_resid_post"),
        (("lm.attn.out", 0), "blocks.0.hook_attn_out"),
        (("lm.mlp.out", -1), "blocks.1.hook_mlp_out"),
        (("lm.attn.pre", 1), "blocks.1.hook_attn_in"),
        (("vision.resid_post", -1), "vision.blocks.2.hook_resid_post"),
        (("lm.resid_post", 1), "blocks.1.hook_resid_post"),
        (("language.z", -1), "blocks.1.attn.hook_z"),
        ("lm.z1", "blocks.1.attn.hook_z"),
        ("vision.z1", "vision.blocks.1.attn.hook_z"),
    ],
)
def test_names_of_other_libraries(model: HookedVisionLanguage, alias: Any, name: str):
    """In a filter, in a cache and in a hook."""
    _, found = model.run_with_cache(IDS, **PIXELS, names_filter=alias)
    assert list(found) == [name]
    assert found[alias] is found[name]
    seen: list[str] = []
    model.run_with_hooks(IDS, **PIXELS, fwd_hooks=[(alias, lambda value, hook: seen.append(hook.name))])
    assert seen == [name]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("vision_encoder.blocks.1.attn.qkv.hook_out", "vision.blocks.1.attn.hook_q, hook_k and hook_v"),
        ("vision_encoder.encoder_layers.0.hook_attn_in", "vision.blocks.0.ln1.hook_normalized, before the weights"),
        ("vision_encoder.hook_vision_out", "vision.ln_final.hook_normalized and projector.hook_in"),
    ],
)
def test_names_without_a_site_are_refused_with_ours(model: HookedVisionLanguage, name: str, ours: str):
    """`hook_vision_out` is the output of the tower, of which the projector of this model leaves out the class token."""
    with pytest.raises(KeyError, match=f"'{name}' is no site here: see {ours}"):
        model.run_with_hooks(IDS, **PIXELS, fwd_hooks=[(name, lambda value, hook: None)])


def test_a_run_without_images_has_no_site_of_any(model: HookedVisionLanguage):
    _, cache = model.run_with_cache(torch.tensor([[1, 2]]))
    for site in (("vision.z", 0), "hook_image_features"):
        with pytest.raises(KeyError, match="keeps it, if the prompt has images: this cache has no site of any"):
            cache[site]
    _, cache = model.run_with_cache(IDS, **PIXELS, names_filter="hook_image_features")
    with pytest.raises(KeyError, match=r"keeps it'?$"):
        cache["vision.z", 0]


def test_globs(model: HookedVisionLanguage):
    for glob, names in (
        ("lm.blocks.*.attn.hook_z", [f"blocks.{i}.attn.hook_z" for i in range(2)]),
        ("vision_encoder.blocks.*.hook_mlp_out", [f"vision.blocks.{i}.hook_mlp_out" for i in range(3)]),
    ):
        assert list(model.run_with_cache(IDS, **PIXELS, names_filter=glob)[1]) == names


def test_a_patch_without_a_site_is_of_the_layer_of_the_decoder(model: HookedVisionLanguage, cache: ActivationCache):
    """The tower, whose layers have the same names, stays as it is."""
    source = torch.zeros_like(cache["resid_post", 0])
    kept: dict[str, Tensor] = {}
    sites = ["blocks.0.hook_resid_post", "vision.blocks.0.hook_resid_post"]

    def keep(value: Tensor, hook: Any) -> None:
        kept[hook.name] = value.clone()

    hooks = [PatchResidual(layer=0, positions=[1, 2], source=source), *[(site, keep) for site in sites]]
    model.run_with_hooks(IDS, **PIXELS, fwd_hooks=hooks)
    expected = cache[sites[0]].index_fill(1, torch.tensor([1, 2]), 0.0)
    assert_close(kept[sites[0]], expected)
    assert_close(kept[sites[1]], cache[sites[1]])


def test_hook_objects_of_both_sides_in_one_list(model: HookedVisionLanguage, cache: ActivationCache):
    hooks = [ZeroAblate("vision.z", 1, heads=[0]), ZeroAblate("z", 1, heads=[1])]
    with model.hooks(hooks):
        _, found = model.run_with_cache(IDS, **PIXELS)
    assert not found["vision.z", 1][:, :, 0].any()
    assert not found["z", 1][:, :, 1].any()
    assert found["vision.z", 1][:, :, 1].equal(cache["vision.z", 1][:, :, 1])
