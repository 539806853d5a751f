"""Families with Kimi Delta Attention and lightning attention: what the table's comparison would notice, and their files."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hooked_lm import pretrained
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.models.config.tree import DecoderConfig
from tests.families import linear_attention
from tests.families._case import Case, reference
from tests.families._models import assert_past_matters, distance, hooked, logits_of, prompt, with_tree
from tests.families.test_state_space import every_attention, every_mixer, swap

CASES = {str(case): case for case in linear_attention.CASES}
KIMI, LING = "kimi_linear-three-to-one", "bailing_hybrid-two-to-one-bounded"
MINIMAX = "minimax-one-to-one-weighted"


def every_block(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    """The tree with other fields of all blocks."""
    return lambda tree: replace(tree, blocks=tuple(replace(block, **changes) for block in tree.blocks))


def steeper(mixer: Any) -> dict[str, Any]:
    return {"slopes": tuple(1.05 * slope for slope in mixer.slopes)}


WRONG_TREES = {
    "activation of Kimi's gate": (KIMI, every_mixer(lambda _: {"gate_act_fn": "silu"})),
    "activation after Kimi's convolutions": (KIMI, every_mixer(lambda _: {"act_fn": "gelu"})),
    "eps of Kimi's norm before the gate": (KIMI, every_mixer(lambda _: {"eps": 1e-6})),
    "Kimi's decays with a bound": (KIMI, every_mixer(lambda _: {"lower_bound": -5.0})),
    "Ling's decays without a bound": (LING, every_mixer(lambda _: {"lower_bound": None})),
    "another bound": (LING, every_mixer(lambda _: {"lower_bound": -4.0})),
    "activation of attention's gate": (LING, every_attention(lambda _: {"gate_act_fn": "silu"})),
    "pairs of rotary": (LING, every_attention(lambda a: {"rotary": replace(a.rotary, adjacent_pairs=False)})),
    "slopes": (MINIMAX, every_mixer(steeper)),
    "eps of lightning attention's norm": (MINIMAX, every_mixer(lambda _: {"eps": 0.05})),
    "activation of lightning attention": (MINIMAX, every_mixer(lambda _: {"act_fn": "gelu"})),
    "weights around attention": (MINIMAX, every_block(mid_weights=(1.0, 1.0))),
    "weights around the MLP": (MINIMAX, every_block(post_weights=(2.5, 1.0))),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


def flip(name: str) -> Callable[[Any], None]:
    """Reverses the columns' order of a parameter of a mixer."""
    return lambda mixer: getattr(mixer, name).data.copy_(getattr(mixer, name).data.flip(-1))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (KIMI, swap("W_Q", "W_K")),
        (KIMI, swap("W_g_down", "W_gate_down")),
        (KIMI, swap("W_g_up", "W_gate_up")),
        (KIMI, flip("A_log")),
        (KIMI, flip("dt_bias")),
        (LING, swap("W_g", "W_gate")),
        (LING, flip("dt_bias")),
        (MINIMAX, swap("W_Q", "W_K")),
        (MINIMAX, swap("W_V", "W_gate")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(next(block.mixer for block in model.blocks if isinstance(block, MixerPart)))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize("name", [KIMI, LING, MINIMAX])
@torch.no_grad()
def test_states_carry_something(name: str) -> None:
    assert_past_matters(CASES[name])


def saved(case: Case, folder: Path, rename: Callable[[str], str] = str) -> Path:
    """A file of the model, its tensors renamed."""
    reference(case).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "saved_name", "published_name"),
    [(KIMI, "0.block_sparse_moe.up_proj", "0.mlp.up_proj"), (LING, "0.attention.dense", "0.attention.o_proj")],
)
def test_two_names_of_a_tensor(name: str, saved_name: str, published_name: str, tmp_path: Path) -> None:
    """What transformers saves, and other names that it reads."""
    files = [saved(CASES[name], tmp_path / "saved"), tmp_path / "published"]
    assert any(saved_name in tensor for tensor in load_file(files[0] / "model.safetensors"))
    saved(CASES[name], files[1], lambda tensor: tensor.replace(saved_name, published_name))
    weights = [pretrained.from_pretrained_no_processing(folder).state_dict() for folder in files]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][parameter], weights[1][parameter]) for parameter in weights[0])


@torch.no_grad()
def test_transformers_computes_slopes_that_a_file_lacks(tmp_path: Path) -> None:
    """They and their products follow from the config, and are not written."""
    hooked(CASES[MINIMAX]).save_pretrained(tmp_path)
    assert not any("slope" in name or "decay" in name for name in load_file(tmp_path / "model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    theirs.config._experts_implementation = "eager"
    tokens = prompt(CASES[MINIMAX])
    assert torch.equal(theirs(tokens).logits, logits_of(CASES[MINIMAX], tokens))


@pytest.mark.parametrize("name", [KIMI, LING])
def test_a_tied_unembedding_is_refused(name: str) -> None:
    """transformers draws the unembedding anew."""
    case = replace(CASES[name], name="tied", fields={**CASES[name].fields, "tie_word_embeddings": True})
    theirs = reference(case)
    assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
    with pytest.raises(ValueError, match="transformers ignores tie_word_embeddings=True"):
        hooked(case)


def test_other_slopes_are_refused(tmp_path: Path) -> None:
    """transformers would use the slopes of the file, in rounded form too."""
    folder = saved(CASES[MINIMAX], tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.slope_rate"
    save_file(weights | {name: weights[name].bfloat16()}, folder / "model.safetensors")
    pretrained.from_pretrained_no_processing(folder)
    save_file(weights | {name: weights[name] * 1.1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"slope_rate is .*the slopes of this architecture are"):
        pretrained.from_pretrained_no_processing(folder)
