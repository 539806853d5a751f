"""Other libraries' names of sites, everywhere where a site can be named, and what they mean in models of every kind."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.interventions import Scale
from hooked_lm.patching import sweep
from tests.close import assert_apart, assert_close
from tests.families import CASES
from tests.families._models import hooked, prompt

ALIAS, NAME = "blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q"
GLOB, NAMES = "blocks.*.attn.o.hook_in", [f"blocks.{i}.attn.hook_z" for i in range(4)]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def tokens(model: HookedTransformer) -> Tensor:
    return model.to_tokens("When Mary and John went to the store, John gave")


def double(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


def doubled(model: HookedTransformer, site: Any) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model.run_with_hooks(tokens, fwd_hooks=[(site, double)])


def test_reading(model: HookedTransformer, tokens: Tensor) -> None:
    _, cache = model.run_with_cache(tokens)
    assert cache[ALIAS] is cache[NAME]
    assert ALIAS in cache
    assert cache["attn.q.hook_out", 1] is cache[NAME] is cache["attn.q.hook_out", -3]
    assert list(cache) == [
        name for name, point in model.all_points().items() if not point.on_demand
    ]  # each tensor once
    assert "blocks.9.attn.q.hook_out" not in cache
    assert "blocks.1.attn.hook_q_out" not in cache
    with pytest.raises(KeyError, match="no such site"):
        cache["blocks.1.attn.hook_q_out"]


def test_filters(model: HookedTransformer, tokens: Tensor) -> None:
    for filter, names in [
        (ALIAS, [NAME]),
        (GLOB, NAMES),
        ([GLOB, ALIAS], sorted([NAME, *NAMES])),
        (lambda name: name.endswith("attn.o.hook_in"), NAMES),
    ]:
        _, cache = model.run_with_cache(tokens, names_filter=filter)
        assert sorted(cache) == names
        assert model.names(filter) == list(cache)
        assert [name for name, _ in model.get_caching_hooks(filter)[1]] == list(cache)
    with pytest.raises(KeyError, match="did you mean"):
        model.run_with_cache(tokens, names_filter="blocks.*.attn.p.hook_in")


def test_gradients(model: HookedTransformer, tokens: Tensor) -> None:
    _, cache = model.run_with_cache(tokens, return_type="loss", names_filter=ALIAS, incl_bwd=True)
    assert cache[f"{ALIAS}_grad"] is cache[f"{NAME}_grad"]
    assert list(cache) == [NAME, f"{NAME}_grad"]


def test_hooks(model: HookedTransformer, tokens: Tensor) -> None:
    expected, plain = doubled(model, NAME)(tokens), model(tokens)
    assert_apart(expected, plain)
    assert torch.equal(doubled(model, ALIAS)(tokens), expected)
    assert torch.equal(doubled(model, ("attn.q.hook_out", 1))(tokens), expected)
    model.add_hook(ALIAS, double)
    try:
        assert torch.equal(model(tokens), expected)
    finally:
        model.reset_hooks()
    hook_id = model.register((ALIAS, double))
    assert torch.equal(model(tokens), expected)
    model.unregister(hook_id)
    assert_close(model.run_with_hooks(tokens, fwd_hooks=[Scale(ALIAS, factor=2)]), expected)
    assert torch.equal(doubled(model, GLOB)(tokens), doubled(model, NAMES)(tokens))


@pytest.mark.slow
def test_sweeps(model: HookedTransformer, tokens: Tensor) -> None:
    other = tokens.clone()
    other[0, 2] = tokens[0, 4]

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 5] - logits[:, -1, 7]

    theirs = sweep(model, tokens, other, metric=metric, sites="attn.q.hook_out", heads="each")
    ours = sweep(model, tokens, other, metric=metric, sites="q", heads="each")
    assert torch.equal(theirs.values, ours.values)
    assert bool(ours.values.abs().max() > 0)


def test_points_by_alias(model: HookedTransformer) -> None:
    assert model.hook_dict[ALIAS] is model.hook_dict[NAME] is model.points(ALIAS)[0]
    assert len(model.hook_dict) == len(list(model.hook_dict))
    assert ALIAS not in model.hook_dict
    with pytest.raises(KeyError, match="did you mean"):
        model.hook_dict["blocks.1.attn.hook_qq"]
    twin = copy.deepcopy(model)
    assert twin.hook_dict[ALIAS] is twin.blocks[1].attn.hook_q


ONE_OF_EACH = {case.family: case for case in reversed(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ONE_OF_EACH))
def test_every_alias_of_every_family_is_a_value(name: str) -> None:
    model: Any = hooked(ONE_OF_EACH[name])
    assert len(model.aliases) > 4
    assert set(model.aliases.values()) <= set(model.all_points())
    assert not set(model.aliases) & set(model.all_points())
    assert not set(model.aliases) & set(model.mod_dict)


KINDS = ["gpt2", "llama", "gemma2", "gpt_neox", "gptj", "mixtral", "granite", "olmo2", "mamba"]


@pytest.mark.parametrize("name", KINDS)
def test_what_aliases_mean(name: str) -> None:
    model: Any = hooked(ONE_OF_EACH[name])
    _, cache = model.run_with_cache(prompt(ONE_OF_EACH[name]), names_filter="*")
    last = model.cfg.n_layers - 1
    assert torch.equal(cache["blocks.0.hook_out"], cache["blocks.1.hook_in"])
    assert torch.equal(cache["ln_final.hook_in"], cache[f"blocks.{last}.hook_out"])
    if "blocks.0.attn.hook_out" in cache:
        added = cache["blocks.0.attn.hook_out"]
        by_heads = cache["blocks.0.attn.hook_result"].sum(2) if "blocks.0.attn.hook_result" in cache else added
        bias = model.blocks[0].attn.b_O
        assert_close(by_heads + (0 if bias is None else bias), added)
    else:  # here a norm or a factor follows the output of attention
        assert name in ("gemma2", "granite", "olmo2", "mamba")
    assert ("blocks.0.ln1_post.hook_out" in cache) == (name in ("gemma2", "olmo2"))


def test_what_aliases_mean_in_bert() -> None:
    case = ONE_OF_EACH["bert"]
    model: Any = hooked(case)
    _, cache = model.run_with_cache(prompt(case), names_filter="*")
    assert torch.equal(cache["blocks.0.hook_out"], cache["blocks.1.hook_in"])
    stream = cache["blocks.0.hook_in"] + cache["blocks.0.attn.o.hook_out"]
    assert_close(stream, cache["blocks.0.ln1.hook_in"])
    assert_close(cache["blocks.0.ln1.hook_out"], cache["blocks.0.attn.hook_out"])
    assert_close(cache["blocks.0.ln1.hook_out"] + cache["blocks.0.mlp.out.hook_out"], cache["blocks.0.ln2.hook_in"])


def test_what_aliases_mean_in_t5() -> None:
    case = ONE_OF_EACH["t5"]
    model: Any = hooked(case)
    tokens = prompt(case).clamp(min=3)
    _, cache = model.run_with_cache(tokens, tokens, names_filter="*")
    for side in ("encoder", "decoder"):
        assert torch.equal(cache[f"{side}_blocks.0.hook_out"], cache[f"{side}_blocks.1.hook_in"])
    assert cache["decoder_blocks.0.self_attn.q.hook_out"] is cache["decoder.0.attn.hook_q"]
    assert cache["decoder_blocks.0.cross_attn.q.hook_out"] is cache["decoder.0.cross_attn.hook_q"]
    assert cache["decoder_blocks.0.hook_resid_mid2"] is cache["decoder.0.hook_resid_mid_cross"]
    assert_close(
        cache["decoder_blocks.0.ln2.hook_in"] + cache["decoder_blocks.0.cross_attn.hook_out"],
        cache["decoder_blocks.0.ln3.hook_in"],
    )
    _, some = model.run_with_cache(tokens, tokens, names_filter="encoder_blocks.*.attn.o.hook_in")
    assert list(some) == [f"encoder.{i}.attn.hook_z" for i in range(len(model.encoder))]
