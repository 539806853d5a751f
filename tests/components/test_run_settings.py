"""Fused and explicit computation, and per-head copies of the stream that pass the norm before attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoder
from tests.close import GRADIENT, assert_apart, assert_close
from tests.models.toys import KINDS, ids, toy

LN1 = ("blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_normalized")
INPUTS = {"attn_in": ("hook_attn_in",), "qkv": ("hook_q_input", "hook_k_input", "hook_v_input"), "q": ("hook_q_input",)}
WITH_NORMS = ["standard", "rotary", "parallel", "post_norm", "shortformer"]


def nothing(value: Tensor, hook: Any) -> None:
    """A hook that only makes a point listen."""


def listening(which: str) -> list[tuple[str, Any]]:
    return [(f"blocks.1.{site}", nothing) for site in INPUTS[which]]


@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("site", LN1)
@pytest.mark.parametrize("kind", WITH_NORMS)
def test_an_edit_at_the_norm_reaches_the_copies(kind: str, site: str, which: str) -> None:
    model = toy(kind)
    double = [(site, lambda value, hook: 2 * value + 0.1)]
    expected = model.run_with_hooks(ids(), fwd_hooks=double)
    assert_close(model.run_with_hooks(ids(), fwd_hooks=[*listening(which), *double]), expected)
    assert_apart(model(ids()), expected)


@pytest.mark.parametrize("which", INPUTS)
@pytest.mark.parametrize("kind", WITH_NORMS)
def test_a_gradient_at_the_norm_is_edited_whatever_is_copied(kind: str, which: str) -> None:
    """No gradient passes the norm; what is left is that of the stream beside it."""

    def gradient(*fwd_hooks: Any) -> Tensor:
        kept: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            kept["resid"] = value

        bwd_hooks = [(LN1[1], lambda value, hook: torch.zeros_like(value)), ("blocks.1.hook_resid_pre", keep)]
        with model.hooks(fwd_hooks=list(fwd_hooks), bwd_hooks=bwd_hooks):
            model(ids(), return_type="loss").backward()
        return kept["resid"]

    model = toy(kind)
    assert_close(gradient(*listening(which)), gradient(), depth=GRADIENT)


@pytest.mark.parametrize("kind", WITH_NORMS)
def test_caches_of_copies_and_norm(kind: str) -> None:
    """What is only recorded is the stream, and with a flag the copies; those of values pass last."""
    model = toy(kind)
    _, bare = model.run_with_cache(ids())
    for inputs in INPUTS.values():
        names = [*LN1, *(f"blocks.1.{site}" for site in inputs)]
        _, cache = model.run_with_cache(ids(), names_filter=names)
        for site in LN1:
            assert_close(cache[site], bare[site])
    model.cfg.use_split_qkv_input = True
    _, cache = model.run_with_cache(ids())
    for site in LN1:
        assert cache[site].shape[2] == model.blocks[1].attn.n_kv
        assert_close(cache[site], bare[site][:, :, None].expand_as(cache[site]))


@pytest.mark.parametrize("flag", ["use_split_qkv_input", "use_attn_in"])
def test_with_a_flag_the_norm_alone_has_an_axis_of_heads(flag: str) -> None:
    model = toy("standard")
    setattr(model.cfg, flag, True)
    shapes = []
    logits = model.run_with_hooks(ids(), fwd_hooks=[(LN1[0], lambda value, hook: shapes.append(value.shape))])
    assert {*shapes} == {(3, 10, 4, 1)}
    assert len(shapes) == (3 if flag == "use_split_qkv_input" else 1)
    assert_close(logits, toy("standard")(ids()))
    assert model.verify().ok
    setattr(model.cfg, flag, False)
    shapes.clear()
    model.run_with_hooks(ids(), fwd_hooks=[(LN1[0], lambda value, hook: shapes.append(value.shape))])
    assert shapes == [(3, 10, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_fused_kernels_recording_changes_no_bit(kind: str) -> None:
    model = toy(kind, fused_attention="never")
    bare = model(ids())
    assert_close(bare, toy(kind)(ids()))
    plain = [name for name, point in model.all_points().items() if not point.on_demand]
    for names in ([n for n in plain if n.endswith("hook_pattern")], [n for n in plain if "ln" in n], plain):
        if names:
            assert torch.equal(model.run_with_cache(ids(), names_filter=names)[0], bare)


def test_flags_switch_sites_on_for_all_runs() -> None:
    flags = {"use_attn_result": True, "use_split_qkv_input": True, "use_hook_mlp_in": True}
    model = toy("standard", fused_attention="never", **flags)
    logits, cache = model.run_with_cache(ids())
    assert "blocks.0.attn.hook_result" in cache
    assert torch.equal(logits, model(ids()))


def test_the_field_is_read_when_it_is_used() -> None:
    model = toy("standard")
    assert model.cfg.fused_attention == "auto"
    assert model.blocks[0].ln1.settings.fused
    model.cfg.fused_attention = "never"
    model(ids())
    assert not model.blocks[0].attn.settings.fused
    model.blocks[0].ln1 = toy("standard").blocks[0].ln1
    model.setup()
    assert not model.blocks[0].ln1.settings.fused
    with pytest.raises(ValueError, match="fused_attention"):
        model.cfg.fused_attention = "sometimes"
    assert model.cfg.fused_attention == "never"
    with pytest.raises(ValueError, match="fused_attention"):
        toy("standard", fused_attention="sometimes")


def test_an_encoder_too() -> None:
    fields = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_ctx": 12, "d_vocab": 50, "act_fn": "gelu", "device": "cpu"}
    model = HookedEncoder({**fields, "fused_attention": "never"})
    logits, _ = model.run_with_cache(ids())
    assert torch.equal(model(ids()), logits)
    assert not model.blocks[1].attn.settings.fused
