"""Decoders that mix tokens in ways of their own: what the table's comparison would notice."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.router import SoftmaxRouter
from tests.families import other_mixing
from tests.families._models import distance, hooked, logits_of, prompt
from tests.families.test_state_space import every_attention, every_norm, swap

CASES = {str(case): case for case in other_mixing.CASES}

WRONG_TREES = {
    "one lambda for all layers": (
        "diffllama-grouped",
        every_attention(lambda a: {"z_norm": replace(a.z_norm, lam_init=0.2)}),
    ),
    "eps of the norm of differences": (
        "diffllama-grouped",
        every_attention(lambda a: {"z_norm": replace(a.z_norm, eps=1e-6)}),
    ),
    "eps of the norms of blocks": ("jetmoe-two-of-four", every_norm(eps=0.02)),
    "one expert less in attention": ("jetmoe-two-of-four", every_attention(lambda _: {"top_k": 1})),
    "softmax of all experts in attention": (
        "jetmoe-two-of-four",
        every_attention(lambda _: {"router": SoftmaxRouter()}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = HookedTransformer(
        HookedTransformerConfig.from_tree(alter(right.cfg.tree), init_weights=False, device="cpu")
    )
    model.load_state_dict(right.state_dict())
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize(
    ("name", "part", "damage"),
    [
        ("diffllama-grouped", "attn.z_norm", swap("lambda_q1", "lambda_q2")),
        ("diffllama-grouped", "attn", lambda attn: attn.W_O_pair.copy_(attn.W_O_pair.flip(0))),
        ("diffllama-grouped", "attn", lambda attn: attn.W_V.copy_(attn.W_V.flip(0))),
        ("jetmoe-two-of-four", "attn", lambda attn: attn.W_O.copy_(attn.W_O.flip(0))),
        ("jetmoe-two-of-four", "attn", lambda attn: attn.W_router.copy_(attn.W_router.flip(1))),
        ("jetmoe-two-of-four", "mlp", lambda mlp: mlp.b_out.zero_()),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, part: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(model.blocks[1].get_submodule(part))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3
