"""Encoders that save weights: what the table's comparison would notice, what is refused, and what else is promised."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm import HookedEncoder
from hooked_lm.components.embeddings.transformed_unembed import untied
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import EncoderConfig
from tests.close import assert_apart, assert_close
from tests.families import compact_encoders
from tests.families._case import reference
from tests.families._encoders import prompt
from tests.families._models import hooked, with_tree
from tests.families.test_encoders import agrees, embedding, every_attn, every_block

CASES = {str(case): case for case in compact_encoders.CASES}
FIRST = {case.family: case for case in reversed(compact_encoders.CASES)}


def norms_of_the_config(tree: EncoderConfig) -> EncoderConfig:
    norm = replace(tree.blocks[0].ln1, eps=tree.embed.norm.eps)
    return every_block(ln1=norm, ln2=norm)(tree)


WRONG_TREES: dict[str, tuple[str, Callable[[EncoderConfig], EncoderConfig]]] = {
    "scale of scores beside convolutions": ("convbert-masked-narrow-grouped", every_attn(scale=16**-0.5)),
    "causal beside convolutions": ("convbert-masked-narrow-grouped", every_attn(causal=True)),
    "eps of the config in SqueezeBERT's layers": ("squeezebert-masked", norms_of_the_config),
    "scale of scores of grouped queries": ("squeezebert-masked", every_attn(scale=1.0)),
    "scale of scores in a narrow stream": ("mobilebert-masked-narrow", every_attn(scale=1.0)),
    "eps of the config in the norm of the last MLP": (
        "mobilebert-masked-narrow-layer-norm-no-trigram",
        lambda tree: every_block(ln2=tree.blocks[0].ln1)(tree),
    ),
    "eps of the config in the norm of the embeddings": (
        "mobilebert-masked-narrow-layer-norm-no-trigram",
        lambda tree: embedding(norm=replace(tree.embed.norm, eps=0.02))(tree),
    ),
    "fewer MLPs": ("mobilebert-masked-narrow", every_block(n_ffn=1)),
    "values of the narrow stream": ("mobilebert-bare-no-bottleneck-of-queries", every_block(attends_narrow=True)),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    right = hooked(CASES[name])
    assert not agrees(with_tree(right, alter(right.cfg.tree)), CASES[name])


def reverse_span(model: HookedEncoder) -> None:
    conv = model.blocks[0].attn.conv
    conv.W_depth.copy_(conv.W_depth.flip(0))


def reverse_kernels(model: HookedEncoder) -> None:
    conv = model.blocks[1].attn.conv
    conv.W_kernel.copy_(conv.W_kernel.flip(3))
    conv.b_kernel.copy_(conv.b_kernel.flip(1))


def swap_values(model: HookedEncoder) -> None:
    attn = model.blocks[0].attn
    attn.W_V, attn.conv.W_V = attn.conv.W_V, attn.W_V


def swap_outputs(model: HookedEncoder) -> None:
    attn = model.blocks[0].attn
    attn.W_O, attn.conv.W_O = attn.conv.W_O, attn.W_O


def roll_groups(model: HookedEncoder) -> None:
    mlp = model.blocks[0].mlp
    mlp.W_in_groups.copy_(mlp.W_in_groups.roll(1, 0))


def roll_groups_of_queries(model: HookedEncoder) -> None:
    attn = model.blocks[0].attn
    attn.W_Q_groups.copy_(attn.W_Q_groups.roll(1, 0))


def swap_neighbours(model: HookedEncoder) -> None:
    model.embed.embed.W_proj.copy_(model.embed.embed.W_proj.flip(0))


def swap_bottlenecks(model: HookedEncoder) -> None:
    block = model.blocks[0]
    block.bottleneck, block.qk_bottleneck = block.qk_bottleneck, block.bottleneck


def swap_mlps(model: HookedEncoder) -> None:
    block = model.blocks[1]
    block.mlp, block.ffn[0].mlp = block.ffn[0].mlp, block.mlp


def roll_rest_of_unembedding(model: HookedEncoder) -> None:
    model.unembed.W_rest.copy_(model.unembed.W_rest.roll(1, 0))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("convbert-masked-narrow-grouped", reverse_span),
        ("convbert-masked-narrow-grouped", reverse_kernels),
        ("convbert-masked-narrow-grouped", swap_values),
        ("convbert-masked-narrow-grouped", swap_outputs),
        ("convbert-masked-narrow-grouped", roll_groups),
        ("squeezebert-masked", roll_groups),
        ("squeezebert-masked", roll_groups_of_queries),
        ("mobilebert-masked-narrow", swap_neighbours),
        ("mobilebert-masked-narrow", swap_bottlenecks),
        ("mobilebert-masked-narrow", swap_mlps),
        ("mobilebert-masked-narrow", roll_rest_of_unembedding),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedEncoder], None]):
    model = copy.deepcopy(hooked(CASES[name]))
    damage(model)
    assert not agrees(model, CASES[name])


@pytest.mark.parametrize("model_type", FIRST)
@torch.no_grad()
def test_copies_of_the_stream_for_each_head(model_type: str):
    """Heads that read copies of the stream compute what they compute from the stream."""
    model, tokens = hooked(FIRST[model_type]), prompt(FIRST[model_type])
    sites = [f"blocks.*.hook_{name}" for name in ("attn_in", "q_input", "k_input", "v_input")]
    for site in sites:
        found = model.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: value.clone())])
        assert_close(found, model(tokens))


@pytest.mark.parametrize("model_type", FIRST)
@torch.no_grad()
def test_without_fused_kernels_a_cache_changes_no_bit(model_type: str):
    model, tokens = copy.deepcopy(hooked(FIRST[model_type])), prompt(FIRST[model_type])
    model.cfg.fused_attention, model.cfg.use_attn_result = "never", True
    out, cache = model.run_with_cache(tokens)
    assert "blocks.0.attn.hook_result" in cache
    assert torch.equal(out, model(tokens))


@pytest.mark.parametrize("case", compact_encoders.CASES, ids=str)
def test_the_number_of_matrix_entries(case: Any):
    model = hooked(case)
    counted = sum(p.numel() for name, p in model.blocks.named_parameters() if ".W_" in name or name.endswith(".W"))
    assert model.cfg.n_params == counted


UNSHARED = {"key_query_shared_bottleneck": False}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("convbert", {"conv_kernel_size": 4}, "a kernel of 4 positions has no middle"),
    ("squeezebert", {"q_groups": 3}, "3 groups do not divide a map from 32 to 32 features"),
    ("squeezebert", {"embedding_size": 16}, "embedding_size=16 is not supported; only 32 is"),
    ("mobilebert", UNSHARED, "weights for vectors of 24 features, not 32"),
    ("mobilebert", {"trigram_input": False, "embedding_size": 32}, "the projection of the embeddings is then not used"),
    ("mobilebert", {"classifier_activation": False}, "classifier_activation=False is not supported"),
    ("mobilebert", {"normalization_type": "rms"}, "normalization_type='rms' is not one of no_norm, layer_norm"),
]


def first_block(model: Any) -> nn.Module:
    """The first layer of the model that would be loaded."""
    config = model.config
    return read_config(family(config.model_type), config, [type(model).__name__], model.state_dict()).blocks[0].build(0)


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED)
def test_refused(model_type: str, fields: dict[str, Any], message: str):
    model: Any = copy.deepcopy(reference(FIRST[model_type]))
    for name, value in fields.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        first_block(model)


def test_whole_matrices_are_zero_between_groups():
    """A head of SqueezeBERT reads a part of the stream, and so does a neuron."""
    model = hooked(FIRST["squeezebert"])
    assert model.W_Q.shape == (2, 4, 32, 8)
    assert model.W_in.shape == (2, 32, 48)
    read = (model.W_Q != 0).any(-1)  # [layer head d_model], of four heads and four groups
    assert torch.equal(read[0], torch.block_diag(*[torch.ones(1, 8)] * 4).bool())
    assert torch.equal((model.W_in[1] != 0), torch.block_diag(*[torch.ones(8, 12)] * 4).bool())


@torch.no_grad()
def test_the_two_parts_of_an_unembedding():
    model, tokens = hooked(FIRST["mobilebert"]), prompt(FIRST["mobilebert"])
    _, cache = model.run_with_cache(tokens, names_filter="unembed.hook_in")
    x, chosen = cache["unembed.hook_in"], torch.tensor([5, 3])
    assert model.W_U.shape == (32, 61)
    assert_close(x @ model.W_U + model.b_U, model(tokens))
    assert_close(model.unembed.some(x, chosen), model(tokens)[..., chosen])
    own = untied(model.unembed)
    assert_close(own.unhooked(x), model(tokens))


@torch.no_grad()
def test_the_vector_of_a_token_is_that_of_a_text_of_it_alone():
    model = hooked(FIRST["mobilebert"])
    assert_close(model.embed.embed(torch.tensor([[7]]))[0, 0], model.W_E[7])


@torch.no_grad()
def test_an_edited_bottleneck_is_edited_for_copies_too():
    """Where heads read copies of the stream, an edit of the bottleneck's output reaches all of them."""
    model, tokens = hooked(FIRST["mobilebert"]), prompt(FIRST["mobilebert"])
    halve = ("blocks.0.qk_bottleneck.hook_out", lambda value, hook: 0.5 * value)
    copies = ("blocks.0.hook_attn_in", lambda value, hook: value)
    once = model.run_with_hooks(tokens, fwd_hooks=[halve])
    assert_close(model.run_with_hooks(tokens, fwd_hooks=[halve, copies]), once)
    assert_apart(once, model(tokens))
