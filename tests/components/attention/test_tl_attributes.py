"""The public attributes of attention: their values, and that an assigned table is never silently ignored."""

import copy
from typing import Any

import pytest
import torch

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi, BlockSparse, Chunks
from tests.close import assert_apart, assert_close
from tests.models.toys import ids, toy


@pytest.mark.parametrize("kind", ["standard", "rotary", "windowed", "adjacent", "ntk"])
def test_tables_are_shared_between_layers(kind: str) -> None:
    model = toy(kind)
    first, logits = model.blocks[0].attn, model(ids())
    for block in model.blocks:
        block.attn.mask = first.mask
        block.attn.IGNORE = first.IGNORE
        if kind in ("rotary", "adjacent", "ntk"):
            block.attn.rotary_sin, block.attn.rotary_cos = first.rotary_sin, first.rotary_cos
    assert torch.equal(model(ids()), logits)


def test_the_layers_own_mask_in_full() -> None:
    model = toy("windowed")
    full = torch.ones(24, 24, dtype=torch.bool).tril()
    model.blocks[1].attn.mask = full
    model.blocks[0].attn.mask = full.triu(-2)
    with pytest.raises(ValueError, match="attention_mask"):
        model.blocks[0].attn.mask = full


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"window": 2, "causal": False},
        {"position_bias": Chunks(3)},
        {"position_bias": Chunks(3), "window": 2, "causal": False},
        {"position_bias": BlockSparse(1, 0), "causal": False},
        {"position_bias": Alibi(2)},
    ],
    ids=str,
)
def test_visible_keys_are_those_with_a_pattern(options: dict[str, Any]) -> None:
    attn = Attention.Config(8, 2, 4, **options).build()
    for parameter in attn.parameters():
        parameter.data.normal_()
    seen = []
    attn.hook_pattern.add_hook(lambda value, hook: seen.append(value))
    attn(torch.randn(1, 7, 8))
    assert torch.equal(attn.visible_keys(7), seen[0][0, 0] > 0)
    attn.mask = attn.visible_keys(7)
    with pytest.raises(ValueError, match="attention_mask"):
        attn.mask = ~attn.visible_keys(7)


def test_a_different_table_is_refused() -> None:
    attn = toy("rotary").blocks[0].attn
    with pytest.raises(ValueError, match=r"attn\.mask"):
        attn.mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="minus infinity"):
        attn.IGNORE = torch.tensor(-1e5)
    with pytest.raises(ValueError, match=r"attn\.rotary_cos"):
        attn.rotary_cos = attn.rotary_sin
    with pytest.raises(ValueError, match=r"attn\.rotary_sin"):
        attn.rotary_sin = attn.rotary_sin[:, :2]
    assert not hasattr(toy("standard").blocks[0].attn, "rotary_sin")


def test_a_scale_that_is_set_takes_effect() -> None:
    model = toy("standard")
    _, before = model.run_with_cache(ids(), names_filter=["blocks.0.attn.hook_attn_scores"])
    model.blocks[0].attn.attn_scale *= 2
    _, after = model.run_with_cache(ids(), names_filter=["blocks.0.attn.hook_attn_scores"])
    site = "blocks.0.attn.hook_attn_scores"
    assert_close(after[site].exp() ** 2, before[site].exp())


def test_constants_are_no_weights() -> None:
    model = toy("standard")
    state = model.state_dict()
    assert state["blocks.2.attn.mask"].shape == (0, 0)
    assert state["blocks.2.attn.IGNORE"] == float("-inf")
    without = {name: value for name, value in state.items() if not name.endswith((".mask", ".IGNORE"))}
    assert {*without} == {name for name, _ in model.named_parameters()}
    other = toy("standard", seed=2)
    other.load_state_dict(without, strict=True)
    assert torch.equal(other(ids()), model(ids()))
    other.load_and_process_state_dict(state)
    assert_close(other(ids()).log_softmax(-1), model(ids()).log_softmax(-1))


def test_an_assigned_activation_is_used() -> None:
    model = toy("standard")
    other = copy.deepcopy(model)
    other.blocks[0].mlp.act_fn = torch.nn.Tanh()
    _, cache = other.run_with_cache(ids())
    assert_close(cache["post", 0], cache["pre", 0].tanh())
    assert_apart(other(ids()), model(ids()))
