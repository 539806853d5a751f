"""Families with Gated DeltaNet: what the table's comparison would notice, and the files of OLMo Hybrid."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_lm import pretrained
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.hub.hf_checkpoint import _saved_weights
from tests.close import assert_close
from tests.families import delta_nets
from tests.families._case import Case, reference
from tests.families._models import (
    assert_past_matters,
    assert_same_tensors,
    distance,
    hooked,
    logits_of,
    prompt,
    with_tree,
)
from tests.families.test_state_space import every_attention, every_mixer, every_norm, reverse, swap

CASES = {str(case): case for case in delta_nets.CASES}
FIRST = [
    next(case for case in CASES.values() if case.family == name)
    for name in {case.family: None for case in CASES.values()}
]
PLAIN = "qwen3_5_text-biased-tied-positions-of-images"

WRONG_TREES = {
    "activation after the convolutions": (PLAIN, every_mixer(lambda _: {"act_fn": "gelu"})),
    "activation of the gate": (PLAIN, every_mixer(lambda _: {"gate_act_fn": "sigmoid"})),
    "eps of the norm before the gate": (PLAIN, every_mixer(lambda _: {"eps": 1e-6})),
    "norms without an offset": (PLAIN, every_norm(offset=0.0)),
    "states that are reflected": (PLAIN, every_mixer(lambda _: {"max_beta": 2.0})),
    "states that are not reflected": ("olmo_hybrid-three-to-one-reflected", every_mixer(lambda _: {"max_beta": 1.0})),
    "activation of attention's gate": (PLAIN, every_attention(lambda _: {"gate_act_fn": "silu"})),
    "all of a head turned": (PLAIN, every_attention(lambda a: {"rotary": replace(a.rotary, dim=a.d_head)})),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("qwen3_next-three-to-one", swap("W_Q", "W_K")),
        ("qwen3_next-three-to-one", swap("W_V", "W_gate")),
        ("qwen3_next-three-to-one", swap("W_g", "W_beta")),
        ("qwen3_next-three-to-one", reverse("A_log")),
        ("qwen3_next-three-to-one", reverse("dt_bias")),
        (PLAIN, swap("W_V", "W_gate")),
        ("olmo_hybrid-three-to-one-reflected", swap("W_g", "W_beta")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(next(block.mixer for block in model.blocks if isinstance(block, MixerPart)))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize("case", FIRST, ids=str)
@torch.no_grad()
def test_states_carry_something(case: Case) -> None:
    assert_past_matters(case)


@torch.no_grad()
def test_olmo_hybrid_with_wider_values(tmp_path: Path) -> None:
    """As in the published model. transformers saves its convolutions in thirds of their sum: both layouts are read."""
    uneven = {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
    case = replace(CASES["olmo_hybrid-three-to-one-reflected"], name="wide", fields=delta_nets.OLMO_HYBRID | uneven)
    theirs, tokens = reference(case), torch.arange(40).view(2, 20)
    saved = _saved_weights(theirs)
    assert saved["model.layers.0.linear_attn.q_conv1d.weight"].shape == (22, 1, 4)
    weights = {name: tensor for name, tensor in saved.items() if "_conv1d" not in name}
    for name, tensor in theirs.state_dict().items():
        if "conv1d" in name:
            parts = zip("qkv", tensor.split([12, 12, 40]), strict=True)
            weights |= {name.replace("conv1d", f"{x}_conv1d"): part for x, part in parts}
    # the published name of a norm after attention
    weights = {name.replace("3.feedforward_layer_norm", "3.post_attention_layernorm"): t for name, t in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    theirs.config.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "thirds")
    of_files = [pretrained.from_pretrained_no_processing(folder) for folder in (tmp_path, tmp_path / "thirds")]
    for model in (*of_files, hooked(case)):
        assert_close(model(tokens), logits_of(case, tokens))
        assert_same_tensors(dict(model.named_parameters()), dict(of_files[0].named_parameters()))
        back = model.to_hf()
        back.set_attn_implementation(case.attention)
        assert torch.equal(back(tokens).logits, logits_of(case, tokens))
    of_files[1].save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written["model.layers.0.linear_attn.v_conv1d.weight"].shape == (40, 1, 4)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.family == "qwen3_5_moe_text"][:1], ids=str)
@pytest.mark.parametrize("inside", ["", "model.language_model."], ids=["text", "composite"])
def test_experts_in_one_tensor(case: Case, inside: str, tmp_path: Path) -> None:
    """As transformers has them in memory; its files have them one by one."""
    theirs, expected = reference(case), dict(hooked(case).named_parameters())
    tensors = {name: x.contiguous().clone() for name, x in theirs.state_dict().items()}
    config = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    if inside:
        tensors = {name.replace("model.", inside, 1): x for name, x in tensors.items()}
        config = {"model_type": "qwen3_5_moe", "text_config": config, "tie_word_embeddings": False}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert model.cfg.tree.layout == 1
    assert_same_tensors(dict(model.named_parameters()), expected)
