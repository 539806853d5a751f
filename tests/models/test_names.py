"""Short names, and those of other libraries, against the names that models really have."""

from typing import Any

import numpy as np
import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.hooks import HookPoint
from hooked_lm.models.aliases import aliases
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.names import checked_index, get_act_name, side_site_name, site_name


def toy(**changes: object) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_ctx": 8, "d_vocab": 10, "act_fn": "relu", "device": "cpu"}
    return HookedTransformer(HookedTransformerConfig(**{**sizes, **changes}))


@pytest.mark.parametrize(
    ("short", "full"),
    [
        (("z", 5), "blocks.5.attn.hook_z"),
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("k6a",), "blocks.6.attn.hook_k"),
        (("rot_q", 0), "blocks.0.attn.hook_rot_q"),
        (("result", 12, "attn"), "blocks.12.attn.hook_result"),
        (("attn", 3), "blocks.3.attn.hook_pattern"),
        (("attn5",), "blocks.5.attn.hook_pattern"),
        (("attn_logits", 3), "blocks.3.attn.hook_attn_scores"),
        (("attn_scores", 3), "blocks.3.attn.hook_attn_scores"),
        (("pre", 2), "blocks.2.mlp.hook_pre"),
        (("mlp_post", 2), "blocks.2.mlp.hook_post"),
        (("post", 2, "m"), "blocks.2.mlp.hook_post"),
        (("pre5",), "blocks.5.mlp.hook_pre"),
        (("resid_pre", 4), "blocks.4.hook_resid_pre"),
        (("resid_mid", 4, "b"), "blocks.4.hook_resid_mid"),
        (("mlp_out", 0), "blocks.0.hook_mlp_out"),
        (("attn_out", 0), "blocks.0.hook_attn_out"),
        (("q_input", 1), "blocks.1.hook_q_input"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("scale", 4, "ln1"), "blocks.4.ln1.hook_scale"),
        (("normalized", 27, "ln2"), "blocks.27.ln2.hook_normalized"),
        (("normalized",), "ln_final.hook_normalized"),
        (("scale",), "ln_final.hook_scale"),
        (("embed",), "hook_embed"),
        (("pos_embed",), "hook_pos_embed"),
        (("lm.attn.out", 3), "blocks.3.hook_attn_out"),
        (("hook_z",), "hook_z"),
        (("hook_resid_pre", 2), "blocks.2.hook_resid_pre"),
        (("blocks.1.attn.hook_z",), "blocks.1.attn.hook_z"),
    ],
)
def test_short_names(short: tuple[object, ...], full: str) -> None:
    assert get_act_name(*short) == full


@pytest.mark.parametrize("changes", [{}, {"gated_mlp": True}, {"act_fn": "solu_ln"}, {"parallel_attn_mlp": True}])
def test_every_site_of_a_model_has_a_short_name(changes: dict[str, object]) -> None:
    model = toy(**changes)
    for name in model.all_points():
        *path, leaf = name.split(".")
        short = leaf.removeprefix("hook_")
        if path[:1] != ["blocks"]:
            found = [site_name(short, 2), name if path == ["unembed"] else None]
        else:
            found = [site_name((short, int(path[1]), part), 2) for part in (None, path[2] if path[2:] else None)]
        assert name in found or path[-2:] == ["mlp", "ln"] or leaf in ("hook_in", "hook_out"), name


def test_layers_count_from_the_end() -> None:
    assert site_name(("z", -1), 12) == "blocks.11.attn.hook_z"
    assert site_name(("scale", -2, "ln2"), 12) == "blocks.10.ln2.hook_scale"
    assert site_name(("z", np.int64(-1)), 12) == "blocks.11.attn.hook_z"
    assert site_name(("z_grad", -1), 12) == "blocks.11.attn.hook_z_grad"
    assert site_name(("scale", None), 12) == "ln_final.hook_scale"


@pytest.mark.parametrize("layer", [12, -13, 100])
def test_layers_that_are_not_there(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer} is out of range.* -12 to 11"):
        site_name(("z", layer), 12)


def test_checked_index() -> None:
    assert [checked_index(i, 3, "head") for i in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    with pytest.raises(IndexError, match="head 3"):
        checked_index(3, 3, "head")


def test_aliases_lead_to_sites() -> None:
    for changes in ({}, {"gated_mlp": True}, {"attn_only": True}, {"positional_embedding_type": "rotary"}):
        model = toy(**changes)
        assert model.aliases
        assert set(model.aliases.values()) <= set(model.all_points())
        assert not set(model.aliases) & set(model.all_points())
        for alias, name in model.aliases.items():
            assert model.names(alias) == [name]


def test_aliases_of_the_embeddings() -> None:
    assert toy().aliases["embed.hook_out"] == "hook_embed"
    assert toy().aliases["pos_embed.hook_out"] == "hook_pos_embed"


def test_aliases_of_gated_mlps() -> None:
    plain, gated = toy().aliases, toy(gated_mlp=True).aliases
    assert plain["blocks.0.mlp.in.hook_out"] == "blocks.0.mlp.hook_pre"
    assert "blocks.0.mlp.gate.hook_out" not in plain
    assert gated["blocks.0.mlp.in.hook_out"] == "blocks.0.mlp.hook_pre_linear"
    assert gated["blocks.0.mlp.gate.hook_out"] == "blocks.0.mlp.hook_pre"


def test_a_sites_own_name_wins() -> None:
    names = ["blocks.0.hook_out", "blocks.0.hook_resid_post", "blocks.0.hook_resid_pre"]
    found = aliases(names, 1)
    assert found["blocks.0.hook_in"] == "blocks.0.hook_resid_pre"
    assert "blocks.0.hook_out" not in found


def test_models_without_a_place_have_no_alias_for_it() -> None:
    assert "blocks.0.ln2.hook_in" in toy().aliases
    assert "blocks.0.ln2.hook_in" not in toy(parallel_attn_mlp=True).aliases


def test_a_full_name_and_its_layer() -> None:
    assert get_act_name("blocks.1.attn.hook_z", 1) == "blocks.1.attn.hook_z"
    with pytest.raises(ValueError, match="layer 2"):
        get_act_name("blocks.1.attn.hook_z", 2)


def test_a_hook_object_may_give_its_full_name_and_its_layer() -> None:
    class Keeper:
        hook_point, layer, shapes = "blocks.1.attn.hook_z", 1, []

        def __call__(self, value: torch.Tensor, hook: HookPoint) -> None:
            self.shapes.append(tuple(value.shape))

    model, keeper = toy(), Keeper()
    model.run_with_hooks(torch.zeros(1, 3, dtype=torch.long), fwd_hooks=[keeper])
    assert keeper.shapes == [(1, 3, 2, 4)]
    keeper.layer = 0
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn\.hook_z' includes its layer, but layer 0"):
        model.run_with_hooks(torch.zeros(1, 3, dtype=torch.long), fwd_hooks=[keeper])


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (
            ("pattern", 1, "nonsense"),
            r"'pattern' of a layer is 'blocks.1.attn.hook_pattern', which is not in 'nonsense'",
        ),
        (("pattern", 1, "mlp"), "which is not in 'mlp': leave out the third part"),
        (("pre", -1, "a"), r"'pre' of a layer is 'blocks.\d.mlp.hook_pre', which is not in 'a'"),
        (("pattern", 1, 7), r"a head or a position is an index of the value: cache\['pattern', 1\]\[:, 7\]"),
        (("z", 1, 7), r"got \('z', 1, 7\); .* cache\['z', 1\]\[:, :, 7\], or heads=7 of a hook"),
        ("pattern1.7", r"which is not in '.7': leave out the third part"),
        (("resid_post", 1, "x"), "blocks.1.x.hook_resid_post"),
    ],
)
def test_a_third_part_that_is_not_the_sublayer_is_refused(site: Any, message: str) -> None:
    """In caches, filters and hooks; it was ignored."""
    model, tokens = toy(), torch.zeros(1, 3, dtype=torch.long)
    _, cache = model.run_with_cache(tokens)
    with pytest.raises(KeyError, match=message):
        cache[site]
    with pytest.raises(KeyError, match=message):
        model.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: value)])
    for right, same in (
        (("pattern", 1, "attn"), ("pattern", 1)),
        (("pre", 0, "m"), ("pre", 0)),
        (("z", 1, None), ("z", 1)),
    ):
        assert cache[right] is cache[same]
    with pytest.raises(
        TypeError, match=r"a layer is a number, .*; chosen heads are cache.stack_heads\('z', \['L1H7'\]\)"
    ):
        cache["z", "L1H7"]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (("decoder.pattern", 0, 1), r"got \('decoder.pattern', 0, 1\); .* cache\['decoder.pattern', 0\]\[:, 1\]"),
        (("decoder.z", 0, "cros"), "'z' of a layer is 'decoder.0.attn.hook_z', which is not in 'cros'"),
        (("encoder.z", 0, "attn", 3), r"got \('encoder.z', 0, 'attn', 3\)"),
    ],
)
def test_a_third_part_that_is_not_the_sublayer_is_refused_on_both_sides(site: Any, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        side_site_name(site, {"encoder": 2, "decoder": 3})
    assert side_site_name(("decoder.scale", 0, "ln3"), {"decoder": 1}) == "decoder.0.ln3.hook_scale"
