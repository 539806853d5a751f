"""Families with gated attention and routers by sigmoids: what the table's comparison would notice, and what is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from hooked_lm import patching, pretrained
from hooked_lm.components.bounded_mlp import BoundedGatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_apart
from tests.families import gated_attention
from tests.families._case import reference
from tests.families._models import hooked, logits_of, prompt, with_tree
from tests.families.test_state_space import every_attention, every_router, swap

CASES = {str(case): case for case in gated_attention.CASES}


def mlp_of_last_layer(change: Callable[[Any], Any]) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(tree: DecoderConfig) -> DecoderConfig:
        *others, last = tree.blocks
        return replace(tree, blocks=(*others, replace(last, mlp=change(last.mlp))))  # type: ignore[call-arg]

    return altered


WRONG_TREES = {
    "activation of the gate": ("afmoe-hybrid", every_attention(lambda _: {"gate_act_fn": "softplus"})),
    "softplus of the gate": ("laguna-heads-by-layer-capped", every_attention(lambda _: {"gate_act_fn": "sigmoid"})),
    "windows": ("afmoe-hybrid", every_attention(lambda _: {"window": None})),
    "cap of the router": ("laguna-heads-by-layer-capped", every_router(soft_cap=None)),
    "scale of the experts": ("laguna-per-element-biased-scaled-tied", every_router(scale=1.0)),
    "sinks": ("flint-hybrid", every_attention(lambda _: {"sinks": False})),
    "weights that sum to one": ("flint-biased-not-renormalised-every-second-tied", every_router(renormalize=True)),
    "corrections of sigmoids": ("kolibri1-hybrid", every_router(corrects_logits=False)),
    "scale of scores": ("step3p5-biased-scaled-unbounded", every_attention(lambda _: {"scale": None})),
    "bound of experts": (
        "step3p5-more-local-heads-bounded",
        mlp_of_last_layer(lambda mlp: replace(mlp, expert=replace(mlp.expert, limit=9.0))),
    ),
    "bound of the shared expert": (
        "step3p5-more-local-heads-bounded",
        mlp_of_last_layer(lambda mlp: replace(mlp, shared=replace(mlp.shared, limit=9.0))),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    assert_apart(model(tokens), logits_of(CASES[name], tokens))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("afmoe-hybrid", swap("W_gate", "W_Q")),
        ("laguna-per-element-biased-scaled-tied", swap("W_gate", "W_Q")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(model.blocks[1].attn)
    assert_apart(model(tokens), logits_of(CASES[name], tokens))


@torch.no_grad()
def test_flints_router_keeps_its_precision(tmp_path: Path) -> None:
    """As in transformers, its weights stay in fp32 when all others are cast."""
    theirs = copy.deepcopy(reference(CASES["flint-hybrid"]))
    theirs.save_pretrained(tmp_path)
    mlp = pretrained.from_pretrained_no_processing(tmp_path, dtype=torch.bfloat16).blocks[1].mlp
    assert (mlp.W_router.dtype, mlp.experts[0].W_in.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(mlp.W_router, theirs.model.layers[1].mlp.gate.weight.T)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("laguna", {"gating": False}, "gating=False is not supported"),
        ("afmoe", {"score_func": "softmax"}, "score_func='softmax' is not supported"),
        ("afmoe", {"n_group": 2}, "n_group=2 is not supported"),
        ("step3p5", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("step3p5", {"gating": "per-element"}, "gating='per-element' is not supported"),
        ("step3p5", {"per_layer_config": {1: {"head_dim": 4}}}, "per_layer_config that are not supported: head_dim"),
    ],
)
def test_what_is_refused(model_type: str, fields: dict[str, Any], message: str) -> None:
    given = next(case for case in CASES.values() if case.family == model_type).fields
    read_config(family(model_type), CONFIG_MAPPING[model_type](**copy.deepcopy(given)))
    with pytest.raises(ValueError, match=message):
        read_config(family(model_type), CONFIG_MAPPING[model_type](**copy.deepcopy(given | fields)))


def test_layers_for_the_prediction_of_several_tokens_are_not_loaded() -> None:
    """Published configs have lists of types that are longer than the model."""
    fields = {**gated_attention.STEP, "num_nextn_predict_layers": 1}
    fields |= {name: [*fields[name], fields[name][0]] for name in ("layer_types", "mlp_layer_types", "swiglu_limits")}
    tree = read_config(family("step3p5"), CONFIG_MAPPING["step3p5"](**fields))
    assert len(tree.blocks) == 3


def test_a_bounded_mlp_has_no_norm_inside() -> None:
    with pytest.raises(ValueError, match="has no mid_norm"):
        BoundedGatedMLP.Config(8, 12, mid_norm=RMSNorm.Config(12)).build()


HEADS = "laguna-heads-by-layer-capped"


@pytest.mark.parametrize("name", [HEADS, "laguna-per-element-biased-scaled-tied"])
@torch.no_grad()
def test_grids_of_layers_with_different_numbers_of_heads(name: str) -> None:
    """Cells of heads that a layer lacks are empty, and what needs one number refuses such a model."""
    model, tokens = hooked(CASES[name]), prompt(CASES[name], batch=2)
    clean, corrupted = tokens[:1], tokens[1:]
    _, cache = model.run_with_cache(clean)
    counts = [block.attn.cfg.n_heads for block in model.blocks]
    found = patching.ablate(model, clean, "heads", metric=score)
    assert [(~row.isnan()).sum().item() for row in found.mean] == counts
    for refused in (
        lambda: patching.path_patch(model, corrupted, clean, "logits", "heads", metric=score),
        lambda: patching.head_to_head(model, corrupted, clean, metric=score),
        lambda: patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, score),
        lambda: patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted, cache, score),
    ):
        with pytest.raises(
            ValueError, match="needs layers with equal numbers of heads, this model has layers with 4, "
        ):
            refused()
    assert patching.get_act_patch_attn_head_v_all_pos(model, corrupted, cache, score).shape[0] == len(counts)


def score(logits: Tensor) -> Tensor:
    return logits[:, -1, 5].mean()
