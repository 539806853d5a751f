"""Attention to chosen keys: what the mask of chosen keys means, with a cache and for prompts of any length."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, pretrained
from hooked_lm.components.attention.indexer import Indexer
from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.sparse_latent import SparseLatentAttention
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_apart, assert_close
from tests.families._case import Case, reference
from tests.families._models import hooked, logits_of, prompt
from tests.families.sparse_attention import CASES

FIRST = [case for case in CASES if "indexer" in str(vars(hooked(case).cfg.tree.blocks[0].attn))][:1]
MASK = "blocks.0.attn.indexer.hook_index_mask"
SCORES = "blocks.0.attn.indexer.hook_index_scores"


@pytest.fixture(params=FIRST, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def rebuilt(case: Case, change: Any) -> HookedTransformer:
    """The model with another attention in each layer, and the weights that it has a place for."""
    tree: DecoderConfig = hooked(case).cfg.tree
    blocks = tuple(replace(block, attn=change(block.attn)) for block in tree.blocks)
    cfg = HookedTransformerConfig.from_tree(replace(tree, blocks=blocks), init_weights=False, device="cpu")
    model, state = HookedTransformer(cfg), hooked(case).state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


def dense(attn: SparseLatentAttention.Config) -> LatentAttention.Config:
    return LatentAttention.Config(**{name: x for name, x in vars(attn).items() if name != "indexer"})


def choosing(top_k: int) -> Any:
    return lambda attn: replace(attn, indexer=replace(attn.indexer, top_k=top_k))


@torch.no_grad()
def test_up_to_top_k_keys_it_is_dense(case: Case) -> None:
    top_k: int = hooked(case).cfg.tree.blocks[0].attn.indexer.top_k
    plain, short = rebuilt(case, dense), prompt(case, length=top_k)
    assert_close(hooked(case)(short), plain(short))
    assert_close(hooked(case)(short), logits_of(case, short))
    longer = prompt(case, length=top_k + 4)
    assert_apart(hooked(case)(longer), plain(longer))
    assert_close(rebuilt(case, choosing(top_k + 4))(longer), plain(longer))
    assert_close(rebuilt(case, choosing(100))(longer), plain(longer))


@torch.no_grad()
def test_the_mask_has_the_best_of_the_keys_up_to_the_query(case: Case) -> None:
    model, tokens = hooked(case), prompt(case)
    _, cache = model.run_with_cache(tokens)
    mask, scores = cache[MASK], cache[SCORES]
    n_pos, top_k = tokens.shape[1], model.cfg.tree.blocks[0].attn.indexer.top_k
    assert mask.dtype == torch.bool
    assert torch.equal(mask.sum(-1)[0], torch.arange(1, n_pos + 1).clamp(max=top_k))
    assert not mask.triu(1).any()
    assert torch.equal(scores.isfinite()[0], torch.ones(n_pos, n_pos).tril().bool())
    best = scores.masked_fill(~mask, float("inf")).amin(-1)
    assert (scores.masked_fill(mask, float("-inf")).amax(-1) < best).all()
    pattern = cache["blocks.0.attn.hook_pattern"]
    assert torch.equal(pattern > 0, mask[:, None].expand_as(pattern))


@torch.no_grad()
def test_edits_of_the_mask_choose_among_earlier_keys(case: Case) -> None:
    """All keys: dense attention in this layer; later keys and padding stay hidden."""
    tokens, real = prompt(case), torch.ones(3, 16, dtype=torch.long)
    real[1, :6] = 0

    def everything(mask: Tensor, hook: Any) -> Tensor:
        return torch.ones_like(mask)

    expected = rebuilt(case, lambda attn: dense(attn) if attn == hooked(case).cfg.tree.blocks[0].attn else attn)
    every_layer = [(MASK.replace("blocks.0", f"blocks.{layer}"), everything) for layer in range(2)]
    found = hooked(case).run_with_hooks(tokens, attention_mask=real, fwd_hooks=every_layer)
    assert_close(found[real.bool()], expected(tokens, attention_mask=real)[real.bool()])


@torch.no_grad()
def test_edits_of_scores_choose_other_keys(case: Case) -> None:
    def oldest_first(scores: Tensor, hook: Any) -> Tensor:
        return scores - torch.arange(scores.shape[-1]) * 1e4

    model, tokens = hooked(case), prompt(case)
    with model.hooks(fwd_hooks=[(SCORES, oldest_first)]):
        _, cache = model.run_with_cache(tokens, names_filter=MASK)
    top_k = model.cfg.tree.blocks[0].attn.indexer.top_k
    assert cache[MASK][:, top_k:, :top_k].all()
    assert not cache[MASK][:, :, top_k:].any()


@torch.no_grad()
def test_chunks_with_a_cache(case: Case) -> None:
    model, tokens = hooked(case), prompt(case)
    cache, real = KeyValueCache(model.cfg.n_layers), torch.ones_like(tokens)
    real[2, :3] = 0
    chunks = [
        model(part, past_kv_cache=cache, attention_mask=mask)
        for part, mask in zip(tokens.split([5, 1, 7, 3], 1), real.split([5, 1, 7, 3], 1), strict=True)
    ]
    expected = model(tokens, attention_mask=real)
    assert_close(torch.cat(chunks, 1)[real.bool()], expected[real.bool()])


@torch.no_grad()
def test_one_copy_of_the_input_per_head(case: Case) -> None:
    """The indexer gets the mean of the copies."""
    model, tokens = hooked(case), prompt(case)
    seen = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_q_input", lambda x, hook: x.clone())])
    assert_close(seen, model(tokens))


def test_no_gradient_passes_through_the_choice(case: Case) -> None:
    model = hooked(case)
    model(prompt(case)).sum().backward()
    indexer: Indexer = model.blocks[0].attn.indexer
    assert not any(parameter.grad.any() for parameter in indexer.parameters())
    model.zero_grad()


def of(family: str, n: int = 0) -> Case:
    return [case for case in CASES if case.family == family][n]


@torch.no_grad()
def test_layers_share_the_choice_of_an_earlier_one() -> None:
    """An edit of the choice reaches the layers that share it, an edit of what they share does not go back."""
    model, tokens = hooked(of("glm_moe_dsa", 1)), prompt(of("glm_moe_dsa", 1))
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["blocks.1.attn.hook_index_mask"], cache[MASK])
    assert torch.equal(cache["blocks.2.attn.hook_index_mask"], cache[MASK])

    def diagonal(mask: Tensor, hook: Any) -> Tensor:
        return torch.eye(mask.shape[-1], dtype=torch.bool).expand_as(mask)

    for site, reached in ((MASK, True), ("blocks.1.attn.hook_index_mask", False)):
        with model.hooks(fwd_hooks=[(site, diagonal)]):
            _, cache = model.run_with_cache(tokens, names_filter="*.hook_index_mask")
        assert torch.equal(cache["blocks.2.attn.hook_index_mask"].sum(-1) == 1, torch.ones(3, 16).bool()) == reached
    with pytest.raises(ValueError, match="layer 1 attends to the keys that layer 0 chooses, which did not run"):
        model(torch.zeros(1, 4, 32), start_at_layer=1)


@torch.no_grad()
def test_a_shortcut_ends_in_the_next_block() -> None:
    model, tokens = hooked(of("longcat_flash")), prompt(of("longcat_flash"))
    _, cache = model.run_with_cache(tokens, names_filter="*")
    made, own = cache["blocks.0.shortcut.hook_out"], cache["blocks.1.mlp.hook_out"]
    assert torch.equal(cache["blocks.1.hook_shortcut_out"], made)
    assert_close(cache["blocks.1.hook_mlp_out"], own + made)
    weights, indices = (cache[f"blocks.0.shortcut.hook_expert_{name}"] for name in ("weights", "indices"))
    by_identity = (weights * (indices >= 5)).sum(-1, keepdim=True) * cache["blocks.0.mlp.hook_in"]
    assert (by_identity.norm(dim=-1) > 0).any()
    with model.hooks(fwd_hooks=[(f"blocks.0.shortcut.experts.{e}.hook_out", lambda x, hook: 0 * x) for e in range(5)]):
        _, cache = model.run_with_cache(tokens, names_filter="blocks.0.shortcut.hook_out")
    assert_close(cache["blocks.0.shortcut.hook_out"], by_identity)
    with pytest.raises(ValueError, match="layer 1 adds the output of the experts of layer 0, which did not run"):
        model(torch.zeros(1, 4, 32), start_at_layer=1)


@torch.no_grad()
def test_files_with_weights_of_identity_experts_load() -> None:
    """`LongcatFlashExperts` (modeling_longcat_flash.py) makes and writes them; nothing uses them."""
    case = of("longcat_flash")
    theirs = reference(replace(case, name="as transformers saves it", adjust=None))
    assert theirs.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 5 + 3
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)
    assert_close(model(prompt(case)), theirs(prompt(case)).logits)
