"""What is particular to Muse Glimmer: norms without weights, and layers without rotary."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import muse_glimmer_text
from hooked_lm.models.config.tree import DecoderConfig
from tests.families import composites, reference
from tests.families._case import config_of
from tests.families._models import distance, hooked, logits_of, prompt, with_tree

CASE = next(case for case in composites.CASES if case.family == "muse_glimmer_text")


def every_block(change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda tree: replace(tree, blocks=tuple(replace(block, **change(block)) for block in tree.blocks))


WRONG_TREES: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
    "embeddings as they are": lambda tree: replace(tree, embed=replace(tree.embed, norm=None)),
    "scores without the factor": every_block(lambda block: {"attn": replace(block.attn, scale=None)}),
    "queries and keys as they are": every_block(lambda block: {"attn": replace(block.attn, qk_norm=None)}),
    "another gate": every_block(lambda block: {"attn": replace(block.attn, gate_act_fn="tanh")}),
    "rotary everywhere": lambda tree: every_block(
        lambda block: {"attn": replace(block.attn, rotary=tree.blocks[0].attn.rotary)}
    )(tree),
    "a window everywhere": every_block(lambda block: {"attn": replace(block.attn, window=5)}),
    "norms after sublayers with the eps of the others": every_block(
        lambda block: {"ln1_post": block.ln1, "ln2_post": block.ln2}
    ),
    "logits as they are": lambda tree: replace(tree, unembed=replace(tree.unembed, scale=1.0)),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    right, tokens = hooked(CASE), prompt(CASE)
    tree = WRONG_TREES[wrong](right.cfg.tree)
    model = with_tree(right, tree)
    assert distance(model(tokens), logits_of(CASE, tokens)) > 1e-3


def test_angles_of_a_layer_alone_are_refused() -> None:
    """transformers turns by the common angles in all layers whose number is not zero."""
    values = copy.deepcopy(config_of(reference(CASE)).to_dict())
    values["layer_rope_theta"] = [30.0, *values["layer_rope_theta"][1:]]
    with pytest.raises(ValueError, match=r"layer_rope_theta has \[30.0\]; only 0 and rope_theta="):
        muse_glimmer_text.config(HFConfig(values, {}))
