"""Gemma 3 with attention in both directions (EmbeddingGemma): the same numbers, without a key/value cache."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, Gemma3TextModel, GenerationConfig

from hooked_lm import pretrained
from hooked_lm.families import family
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_apart, assert_close
from tests.families._case import FULL, GROUPED, LINEAR, SIZES, Case, reference
from tests.families._models import (
    assert_same_gradients,
    assert_same_logits,
    assert_same_tensors,
    hooked,
    prompt,
)
from tests.families.gemma_olmo_cohere_phi import PLAIN, TURNING, WIDE, by_type, every

BOTH_WAYS = {"use_bidirectional_attention": True}
CASES = [
    Case(
        "gemma3_text",
        "both-ways-even-window",
        {**SIZES, **GROUPED, **WIDE, **BOTH_WAYS, **by_type(PLAIN, TURNING), **every(2, 2), "sliding_window": 6},
    ),
    Case(
        "gemma3_text",
        "both-ways-odd-window-untied-linear",
        {
            **SIZES,
            **FULL,
            **BOTH_WAYS,
            **by_type(LINEAR, PLAIN),
            **every(3, 3),
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 9,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 9,
        },
    ),
    Case(
        "gemma3_text",
        "both-ways-local-only",
        {**SIZES, **GROUPED, **BOTH_WAYS, **every(3, 2), "head_dim": 8, "sliding_window": 4},
        attention="sdpa",
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_logits_and_gradients(case: Case):
    assert_same_logits(case)
    assert_same_gradients(case)


@each_case
@torch.no_grad()
def test_generation_and_export(case: Case, tmp_path: Path):
    model, tokens = hooked(case), prompt(case, batch=2, length=8)
    theirs = copy.deepcopy(reference(case))
    theirs.generation_config = GenerationConfig(pad_token_id=0)  # it does not stop before
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": False}
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    found = model.generate(tokens, 8, do_sample=False, stop_at_eos=False, verbose=False)
    assert torch.equal(found, expected)
    reference(case).save_pretrained(tmp_path / "theirs")
    again = pretrained.from_pretrained_no_processing(tmp_path / "theirs")
    again.save_pretrained(tmp_path / "ours")
    name = "model.safetensors"
    assert_same_tensors(load_file(tmp_path / "ours" / name), load_file(tmp_path / "theirs" / name))
    assert pretrained.from_pretrained_no_processing(tmp_path / "ours").cfg.tree == model.cfg.tree


@each_case
@torch.no_grad()
def test_padding_and_identities(case: Case):
    model, tokens = hooked(case), prompt(case, batch=1, length=12)
    for real in (slice(5, 12), slice(0, 7)):
        mask = torch.zeros_like(tokens)
        mask[:, real] = 1
        assert_close(model(tokens, attention_mask=mask)[:, real], model(tokens[:, real]))
    assert model.verify(tokens).ok, str(model.verify(tokens))


@each_case
@torch.no_grad()
def test_folding_keeps_the_predictions(case: Case):
    folded = pretrained.from_pretrained("tiny", hf_model=reference(case))
    tokens = prompt(case)
    assert_close(folded(tokens).log_softmax(-1), hooked(case)(tokens).log_softmax(-1))


@torch.no_grad()
def test_a_file_without_a_head_gives_its_hidden_states(tmp_path: Path):
    """As EmbeddingGemma is published: a `Gemma3TextModel`, whose output is that of the final norm."""
    theirs = Gemma3TextModel(reference(CASES[0]).config).eval()
    theirs.load_state_dict(reference(CASES[0]).model.state_dict())
    theirs.save_pretrained(tmp_path)
    model, tokens = pretrained.from_pretrained_no_processing(tmp_path), prompt(CASES[0])
    _, cache = model.run_with_cache(tokens, names_filter="unembed.hook_in")
    assert_close(cache["unembed.hook_in"], theirs(tokens).last_hidden_state)


def test_the_window_is_half_as_wide_on_either_side():
    tree = read_config(family("gemma3_text"), CONFIG_MAPPING["gemma3_text"](**CASES[0].fields))
    assert [(block.attn.window, block.attn.causal) for block in tree.blocks] == [(4, False), (None, False)]
    cfg = HookedTransformerConfig.from_tree(tree, init_weights=False, device="cpu")
    assert cfg.attention_dir == "bidirectional"


@torch.no_grad()
def test_a_wrong_window_or_direction_is_noticed():
    case = CASES[0]
    right, tokens = hooked(case), prompt(case)
    expected = reference(case)(tokens).logits
    assert_close(right(tokens), expected)
    for field, value in (("causal", True), ("window", 5)):
        model = copy.deepcopy(right)
        setattr(model.blocks[0].attn, field, value)
        assert_apart(model(tokens), expected)
