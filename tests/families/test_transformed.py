"""Decoders with a transform before the unembedding: what goes through it, and what is refused because of it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hooked_lm import analysis
from hooked_lm.analysis.reading.lens import decode
from hooked_lm.components.embeddings.transformed_unembed import TransformedUnembed
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from tests.close import assert_apart, assert_close
from tests.families import transformed
from tests.families._models import hooked, logits_of, prompt, with_tree
from tests.families.test_state_space import every_attention

CASES = {str(case): case for case in transformed.CASES}
FIRST = transformed.CASES[0]


def act_of_transform(tree: Any) -> Any:
    transform = replace(tree.unembed.transform, act_fn="relu")
    return replace(tree, unembed=replace(tree.unembed, transform=transform))


WRONG_TREES = {
    "activation of the transform": act_of_transform,
    "windows": every_attention(lambda _: {"window": None}),
    "windows of the encoder": every_attention(lambda attn: {"window": attn.window and attn.window + 1}),
    "norm of the embedding": lambda tree: replace(
        tree, embed=replace(tree.embed, norm=replace(tree.embed.norm, eps=1e-5))
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    right, tokens = hooked(FIRST), prompt(FIRST)
    tree = WRONG_TREES[wrong](right.cfg.tree)
    model = with_tree(right, tree)
    assert_apart(model(tokens), logits_of(FIRST, tokens))


@torch.no_grad()
def test_a_lens_applies_the_transform() -> None:
    model, tokens = hooked(FIRST), prompt(FIRST)
    logits, cache = model.run_with_cache(tokens)
    assert_close(decode(model, cache["resid_post", -1][0]), logits[0])
    edited = model.run_with_hooks(tokens, fwd_hooks=[("unembed.transform.hook_post", lambda value, hook: 0 * value)])
    assert_apart(edited, logits)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@torch.no_grad()
def test_some_logits_are_those_of_all(case: Any) -> None:
    model = hooked(case)
    x, some = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 60, 3])
    assert_close(model.unembed.some(x, some), model.unembed(x)[..., some])
    assert_close(model.unembed.unhooked(x), model.unembed(x))


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "logit_attrs": lambda model, cache: cache.logit_attrs(cache["resid_post", -1][None], 5),
    "tokens_to_residual_directions": lambda model, cache: model.tokens_to_residual_directions(torch.tensor([5])),
    "direct_logit_attribution": lambda model, cache: analysis.direct_logit_attribution(
        model, torch.tensor([[3, 4, 5]]), [6]
    ),
    "source_attribution": lambda model, cache: analysis.source_attribution(model, torch.tensor([[3, 4, 5]]), [6]),
    "copying_scores": lambda model, cache: analysis.copying_scores(model),
    "neuron_top_tokens": lambda model, cache: analysis.neuron_top_tokens(model, 1, 3),
    "head_top_tokens": lambda model, cache: analysis.head_top_tokens(model, 1, 2),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_sums_over_components_are_refused(name: str) -> None:
    model = hooked(FIRST)
    _, cache = model.run_with_cache(prompt(FIRST))
    with pytest.raises(ValueError, match=r"unembed\.transform, which is not linear"):
        REFUSED[name](model, cache)


@torch.no_grad()
def test_processing_leaves_the_transform() -> None:
    """The final norm is not folded into `W_U`, and the unembedding that is no longer tied has the transform."""
    model, tokens = copy.deepcopy(hooked(FIRST)), prompt(FIRST)
    before = model(tokens).log_softmax(-1)
    model.process_weights_()
    assert_close(model(tokens).log_softmax(-1), before)
    assert type(model.unembed) is TransformedUnembed
    assert model.ln_final.cfg.weight
    model.verify(tokens)


def test_local_layers_need_a_window() -> None:
    fields = {**transformed.MODERN, "local_attention": 0}
    with pytest.raises(ValueError, match="sliding_window=-1 in this modernbert-decoder config"):
        read_config(family("modernbert-decoder"), CONFIG_MAPPING["modernbert-decoder"](**fields))
