"""What the table's comparison of Gemma 4 would notice, and what its borrowed keys, given vectors and experts mean."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.embeddings.rotary_scaling import ProportionalScaling
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma4_text
from hooked_lm.families.decoders.gemma4_text.shared_kv import SharedKVAttention
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_close
from tests.families import gemma_olmo_cohere_phi, reference
from tests.families._models import distance, hooked, logits_of, prompt, with_tree

CASES = {case.name: case for case in gemma_olmo_cohere_phi.CASES if case.family == "gemma4_text"}
EVERYTHING, EXPERTS = CASES["everything"], CASES["experts-beside-an-mlp"]


def every_attention(kind: type, change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        attn = block.attn
        return replace(block, attn=replace(attn, **change(attn))) if isinstance(attn, kind) else block

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def first_layer_lends(tree: DecoderConfig) -> DecoderConfig:
    """The borrowing local layer reads the first local layer, not the last before it."""
    blocks = list(tree.blocks)
    blocks[0] = replace(blocks[0], attn=replace(blocks[0].attn, is_kv_source=True))
    blocks[3] = replace(blocks[3], attn=replace(blocks[3].attn, kv_source_layer=0))
    return replace(tree, blocks=tuple(blocks))


def all_pairs_turn(attn: Any) -> dict[str, Any]:
    is_partial = isinstance(attn.rotary.scaling, ProportionalScaling)
    return {"rotary": replace(attn.rotary, scaling=None)} if is_partial else {}


def few_features_turn(attn: Any) -> dict[str, Any]:
    """As elsewhere: the first features are an embedding of their own, with wavelengths of their own."""
    is_partial = isinstance(attn.rotary.scaling, ProportionalScaling)
    return {"rotary": replace(attn.rotary, dim=attn.rotary.dim // 4, scaling=None)} if is_partial else {}


WRONG_TREES = {
    "another lender": ("everything", first_layer_lends),
    "values as they are": ("everything", every_attention(Attention.Config, lambda _: {"v_norm": None})),
    "scaled scores": ("everything", every_attention(Attention.Config, lambda _: {"scale": None})),
    "scaled scores of borrowed keys": (
        "everything",
        every_attention(SharedKVAttention.Config, lambda _: {"scale": None}),
    ),
    "no window over borrowed keys": (
        "everything",
        every_attention(SharedKVAttention.Config, lambda _: {"window": None}),
    ),
    "all pairs turn": ("everything", every_attention(Attention.Config, all_pairs_turn)),
    "few features turn": ("biased-per-layer", every_attention(Attention.Config, few_features_turn)),
    "no factor of rotary": (
        "plain-untied-two-rotaries",
        every_attention(
            Attention.Config,
            lambda a: {"rotary": replace(a.rotary, scaling=a.rotary.scaling and ProportionalScaling(0.5))},
        ),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


def unscaled(model: HookedTransformer) -> None:
    model.blocks[0].scale.fill_(1.0)


def vectors_of_other_layers(model: HookedTransformer) -> None:
    model.per_layer.W_E.copy_(model.per_layer.W_E.roll(1, 1))


def projections_of_other_layers(model: HookedTransformer) -> None:
    model.per_layer.W_proj.copy_(model.per_layer.W_proj.roll(1, 1))


def experts_alike(model: HookedTransformer) -> None:
    model.blocks[0].mlp.expert_scale.fill_(1.0)


def swapped_norms(first: str, second: str) -> Callable[[HookedTransformer], None]:
    def damage(model: HookedTransformer) -> None:
        mlp = model.blocks[0].mlp
        one, other = getattr(mlp, first), getattr(mlp, second)
        setattr(mlp, first, other)
        setattr(mlp, second, one)

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("everything", unscaled),
        ("everything", vectors_of_other_layers),
        ("everything", projections_of_other_layers),
        ("experts-beside-an-mlp", experts_alike),
        ("experts-beside-an-mlp", swapped_norms("ln_shared", "ln_experts")),
        ("experts-beside-an-mlp", swapped_norms("ln_shared_post", "ln_experts_post")),
        ("experts-beside-an-mlp", swapped_norms("ln_router", "ln_experts")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedTransformer], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(model)
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@torch.no_grad()
def test_what_is_borrowed_is_what_the_lender_made() -> None:
    model = hooked(EVERYTHING)
    _, cache = model.run_with_cache(prompt(EVERYTHING))
    for borrower, kv_source_layer in ((3, 2), (4, 1)):
        assert torch.equal(cache["rot_k", borrower], cache["rot_k", kv_source_layer])
        assert torch.equal(cache["v", borrower], cache["v", kv_source_layer])


@torch.no_grad()
def test_an_edit_of_what_is_borrowed_stays_with_the_borrower() -> None:
    model, tokens = hooked(EVERYTHING), prompt(EVERYTHING)
    _, clean = model.run_with_cache(tokens)
    with model.hooks([("blocks.3.attn.hook_v", lambda value, hook: value.zero_())]):
        _, edited = model.run_with_cache(tokens)
    assert torch.equal(edited["v", 2], clean["v", 2])
    assert not edited["z", 3].any()
    with model.hooks([("blocks.2.attn.hook_v", lambda value, hook: value.zero_())]):
        _, edited = model.run_with_cache(tokens)
    assert not edited["v", 3].any()


@torch.no_grad()
def test_borrowed_keys_of_the_past_come_from_the_cache() -> None:
    model, tokens = hooked(EVERYTHING), prompt(EVERYTHING)
    whole, cache = model(tokens), KeyValueCache(model.cfg.n_layers)
    model(tokens[:, :9], past_kv_cache=cache)
    logits, sites = model.run_with_cache(tokens[:, 9:], past_kv_cache=cache)
    assert_close(logits, whole[:, 9:])
    assert sites["v", 3].shape[1] == tokens.shape[1]
    assert cache[3].past_keys is None, "the lender's entry serves both"


def test_a_run_that_starts_behind_the_lender_is_refused() -> None:
    model, tokens = hooked(EVERYTHING), prompt(EVERYTHING)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        again = model(cache["resid_pre", 1], start_at_layer=1, tokens=tokens)
        assert_close(again, model(tokens))
    with pytest.raises(ValueError, match="keys and values of layer 1, which did not run; start at layer 1"):
        model(cache["resid_pre", 2], start_at_layer=2, tokens=tokens)


def test_a_stream_without_its_tokens_is_refused() -> None:
    model = hooked(EVERYTHING)
    with pytest.raises(ValueError, match=r"layer 0 adds its own embedding of the tokens: pass tokens="):
        model(torch.zeros(1, 3, model.cfg.d_model), start_at_layer=0)


@torch.no_grad()
def test_each_layer_is_given_its_own_vectors() -> None:
    model = hooked(EVERYTHING)
    _, cache = model.run_with_cache(prompt(EVERYTHING))
    for layer in range(model.cfg.n_layers):
        assert torch.equal(cache["per_layer_in", layer], cache["per_layer.hook_out"][:, :, layer])


@torch.no_grad()
def test_given_vectors_are_those_of_the_formula() -> None:
    model, tokens = hooked(EVERYTHING), prompt(EVERYTHING)
    _, cache = model.run_with_cache(tokens)
    embed = model.per_layer
    read = torch.einsum("bpm,mld->bpld", cache["hook_embed"], embed.W_proj) / model.cfg.d_model**0.5
    read = read / (read.square().mean(-1, keepdim=True) + embed.norm.cfg.eps).sqrt() * embed.norm.w
    expected = (read + embed.W_E[tokens] * embed.cfg.d_per_layer**0.5) / 2**0.5
    assert_close(cache["per_layer.hook_out"], expected)


@pytest.mark.parametrize("name", ["W_Q", "W_K", "b_V"])
def test_weights_of_different_shapes_are_not_stacked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be stacked"):
        getattr(hooked(EVERYTHING), name)


@torch.no_grad()
def test_a_state_dict_comes_back() -> None:
    for case in CASES.values():
        model = copy.deepcopy(hooked(case))
        state: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.zero_()
        model.load_and_process_state_dict(state, fold_ln=False)
        assert_close(model(prompt(case)).log_softmax(-1), hooked(case)(prompt(case)).log_softmax(-1))


def test_the_first_layers_alone() -> None:
    short = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(EVERYTHING), first_n_layers=3)
    tokens = prompt(EVERYTHING)
    with torch.no_grad():
        _, cache = hooked(EVERYTHING).run_with_cache(tokens)
        assert_close(short(tokens, stop_at_layer=3), cache["resid_post", 2])


@torch.no_grad()
def test_a_token_without_a_row_of_the_per_layer_table_is_refused() -> None:
    """transformers raises an IndexError; all other tokens are as they would be with a longer table."""
    short = replace(EVERYTHING, name="short-table", fields={**EVERYTHING.fields, "vocab_size_per_layer_input": 40})
    tokens = prompt(EVERYTHING) % 40
    assert_close(hooked(short)(tokens), logits_of(short, tokens))
    tokens[1, 2] = 40
    with pytest.raises(ValueError, match="token id 40 has no per-layer embedding: the table has 40 rows"):
        hooked(short)(tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"per_layer_config": {"01": {"intermediate_size": 8}}}, r"layer 1 has unknown fields: intermediate_size"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: layers of type full_attention share the keys"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], message: str) -> None:
    values = CONFIG_MAPPING["gemma4_text"](**copy.deepcopy(EVERYTHING.fields)).to_dict() | fields
    with pytest.raises(ValueError, match=message):
        gemma4_text.config(HFConfig(values, {}))
