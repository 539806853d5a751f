"""What is particular to DeepSeek-V4: pooled keys, streams that are mixed, experts chosen by token ids, and the tensors' names."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from hooked_lm import pretrained
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import deepseek_v4
from hooked_lm.families.decoders.deepseek_v4.compressed import CompressedAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.patching import Edit, Experiment, attention_knockout
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive
from tests.families import compressed, reference
from tests.families._models import distance, every_block, hooked, logits_of, prompt, with_tree

ALL, YARN, _ = compressed.CASES
MODEL = hooked(ALL)


# ---- the comparison with transformers can fail -----------------------------------------------------------------------


def attention(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_block(lambda block: {"attn": replace(block.attn, **changes)})


def pools(change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderConfig], DecoderConfig]:
    """Other attention in the layers with pooled keys."""

    def changed(block: Any) -> dict[str, Any]:
        has_pool = isinstance(block.attn, CompressedAttention.Config)
        return {"attn": replace(block.attn, **change(block.attn))} if has_pool else {}

    return every_block(changed)


def indexers(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return pools(lambda attn: {} if attn.indexer is None else {"indexer": replace(attn.indexer, **changes)})


def connections(part: str, **changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_block(lambda block: {"hc": replace(block.hc, **{part: replace(getattr(block.hc, part), **changes)})})


def routers(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_block(lambda block: {"mlp": replace(block.mlp, router=replace(block.mlp.router, **changes))})


WRONG_TREES = {
    "a longer window": (ALL, attention(window=5)),
    "another scale": (ALL, attention(scale=0.5)),
    "a smaller eps": (ALL, attention(eps=1e-6)),
    "another eps of pooled keys": (ALL, pools(lambda attn: {"pool": replace(attn.pool, eps=1e-6)})),
    "rotary of other layers": (ALL, pools(lambda attn: {"rotary": replace(attn.rotary, theta=100.0)})),
    "rotary of other layers in pooled keys": (
        ALL,
        pools(lambda attn: {"pool": replace(attn.pool, rotary=replace(attn.rotary, theta=100.0))}),
    ),
    "no temperature of yarn": (
        YARN,
        attention(rotary=replace(hooked(YARN).cfg.tree.blocks[0].attn.rotary, scaling=None)),
    ),
    "more blocks": (ALL, indexers(top_k=3)),
    "all blocks": (ALL, pools(lambda attn: {"indexer": None})),
    "the index turns its first features": (ALL, indexers(rotary_last=False)),
    "one iteration": (ALL, connections("mix", n_iterations=1)),
    "no eps of the mixing": (ALL, connections("mix", eps=0.0)),
    "an eps of what is written": (ALL, connections("write", eps=0.03)),
    "another score": (ALL, routers(score="sigmoid")),
    "another score of ids": (YARN, routers(score="sqrtsoftplus")),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    case, alter = WRONG_TREES[wrong]
    right, tokens = hooked(case), prompt(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(case, tokens)) > 1e-3


@pytest.mark.parametrize("name", ["W_DO", "W_UO", "sinks", "to_pool.W_K", "pool.b_gate", "indexer.pool.b_gate"])
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str) -> None:
    model, tokens = copy.deepcopy(MODEL), prompt(ALL)
    weight = model.get_parameter(f"blocks.1.attn.{name}")
    weight.copy_(weight.roll(1, 0))
    assert distance(model(tokens), logits_of(ALL, tokens)) > 1e-3


def test_streams_are_mixed_by_rows() -> None:
    """A matrix that is transposed has the same sums."""
    model, tokens = copy.deepcopy(MODEL), prompt(ALL)
    flip = (("blocks.*.*_hc.hook_mix", lambda mix, hook: mix.transpose(-1, -2)),)
    assert_apart(model.run_with_hooks(tokens, fwd_hooks=list(flip)), logits_of(ALL, tokens))


@torch.no_grad()
def test_mixing_is_nearly_doubly_stochastic() -> None:
    tree = connections("mix", eps=1e-6, n_iterations=200)(MODEL.cfg.tree)
    _, cache = with_tree(MODEL, tree).run_with_cache(prompt(ALL), names_filter="blocks.0.attn_hc.hook_mix")
    mix = cache["blocks.0.attn_hc.hook_mix"]
    for axis in (-1, -2):
        assert (mix.sum(axis) - 1).abs().max() < 1e-3


# ---- names and fields ------------------------------------------------------------------------------------------------


def published(name: str) -> str:
    """As the checkpoint's names are before the renaming of transformers (conversion_mapping.py, "deepseek_v4")."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return re.sub(r"^hc_head\.hc_", "hc_head_", name)


@torch.no_grad()
def test_published_names_load(tmp_path: Path) -> None:
    reference(ALL).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {published(name): value for name, value in tensors.items()}
    assert not any(name.startswith("model.") for name in renamed)
    save_file(renamed | {"mtp.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = pretrained.from_pretrained_no_processing(tmp_path)
    assert torch.equal(model(prompt(ALL)), MODEL(prompt(ALL)))


REFUSED = {
    "n_shared_experts": (2, "transformers ignores n_shared_experts=2"),
    "norm_topk_prob": (False, "transformers ignores norm_topk_prob=False"),
    "scoring_func": ("softmax", "scoring_func='softmax' is not supported; sigmoid and sqrtsoftplus are"),
    "rope_parameters": (
        {"main": {"rope_type": "dynamic", "factor": 2.0}, "compress": {}},
        "rope_type 'dynamic' is not supported: its angles depend on the length of the prompt",
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_other_fields_are_refused(field: str) -> None:
    value, words = REFUSED[field]
    values = CONFIG_MAPPING["deepseek_v4"](**copy.deepcopy(ALL.fields)).to_dict() | {field: value}
    with pytest.raises(ValueError, match=words):
        deepseek_v4.config(HFConfig(values, {}))


# ---- pooled keys -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_belongs_to_no_block() -> None:
    """Rows are what they are alone. In transformers they are not with padding on the left, as it pools the padded row
    (modeling_deepseek_v4.py, DeepseekV4HCACompressor.forward, DeepseekV4CSACompressor.forward and DeepseekV4Indexer.forward)."""
    row = prompt(ALL, batch=1, length=11)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), row], 1)
    mask = (torch.arange(14) >= 3).long()[None]
    alone = logits_of(ALL, row)
    assert_close(MODEL(padded, attention_mask=mask)[:, 3:], alone)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    theirs = copy.deepcopy(reference(ALL))(padded, attention_mask=mask, position_ids=positions).logits
    assert_apart(theirs[:, 3:], alone)


@torch.no_grad()
def test_chunks_of_any_length_with_a_cache() -> None:
    """The tokens of an unfinished block wait in the cache, with and without padding before them."""
    tokens = prompt(ALL, batch=2, length=17)
    for mask in (None, (torch.arange(17) >= torch.tensor([[0], [3]])).long()):
        whole = MODEL(tokens, attention_mask=mask)
        cache, found, start = KeyValueCache(MODEL.cfg.n_layers), [], 0
        for length in (5, 1, 1, 3, 7):
            stop = start + length
            part = None if mask is None else mask[:, :stop]
            found.append(MODEL(tokens[:, start:stop], attention_mask=part, past_kv_cache=cache))
            start = stop
        found_real, real = torch.cat(found, 1), slice(None) if mask is None else mask.bool()
        assert_close(found_real[real], whole[real])


@torch.no_grad()
def test_a_block_is_seen_from_its_last_token_on() -> None:
    _, cache = MODEL.run_with_cache(prompt(ALL, batch=1, length=11))
    seen = cache["blocks.2.attn.hook_pooled_pattern"][0, 0] > 0
    expected = torch.arange(2)[None] < ((torch.arange(11) + 1) // 4)[:, None]
    assert torch.equal(seen, expected)
    assert not cache["blocks.1.attn.hook_pooled_pattern"][0, :, 0].any(), "no block is finished at the first token"
    for short in (1, 3):
        tokens = prompt(ALL, length=short)
        assert_close(MODEL(tokens), logits_of(ALL, tokens))


@torch.no_grad()
def test_an_edit_of_keys_and_values_apart() -> None:
    """Pooled keys are values too; a hook can change either."""
    tokens, block = prompt(ALL), "blocks.2.attn."

    def halved(site: str) -> Tensor:
        return MODEL.run_with_hooks(tokens, fwd_hooks=[(block + site, lambda value, hook: value * 0.5)])

    both, values = halved("pool.hook_rot_pooled_k"), halved("hook_pooled_v")
    assert_apart(both, values)
    twice = [
        (block + "pool.hook_rot_pooled_k", lambda x, hook: x * 0.5),
        (block + "hook_pooled_v", lambda x, hook: x * 2),
    ]
    assert_apart(MODEL.run_with_hooks(tokens, fwd_hooks=twice), both)
    assert_apart(halved("hook_rot_k"), halved("hook_v"))


TOKEN_SITES = (
    *("hook_streams_mid", "attn_hc.hook_mix", "mlp_hc.hook_out", "hook_k_input", "hook_v_input", "attn.hook_rot_q"),
    *(
        "attn.hook_k",
        "attn.hook_v",
        "attn.to_pool.hook_pool_k",
        "attn.to_pool.hook_pool_gate",
        "attn.indexer.hook_index_q",
    ),
    *("attn.indexer.to_pool.hook_pool_k", "attn.hook_rot_z", "attn.hook_z", "attn.hook_o_latent", "attn.hook_result"),
    *("attn.hook_pattern", "attn.hook_pooled_pattern", "attn.indexer.hook_index_mask"),
)


@pytest.mark.slow
@torch.no_grad()
def test_sweeps_take_the_incremental_path() -> None:
    tokens, other = prompt(ALL, batch=2), prompt(ALL, batch=4)[2:]
    _, cache = MODEL.run_with_cache(other, names_filter="*")
    sites = [f"blocks.{layer}.{name}" for layer in range(3) for name in TOKEN_SITES]
    cells = [[Edit(site, cache[site], (pos,))] for site in sites if site in cache for pos in (1, 7)]
    seen: dict[int, Tensor] = {}
    experiment = Experiment(MODEL, tokens, [lambda logits: logits[:, -1, 3] - logits[:, -2, 5]])
    for index, scores in experiment.run(cells, progress=False):
        seen[index] = scores[0]
    assert experiment.cost.forwards == 1, "the base run"
    assert len(seen) == len(cells)
    for index, cell in enumerate(cells):
        logits = naive(MODEL, tokens, cell)
        assert_close(seen[index], logits[:, -1, 3] - logits[:, -2, 5])


@torch.no_grad()
def test_edits_of_blocks_are_whole_forward_passes() -> None:
    tokens, other, site = prompt(ALL, batch=2), prompt(ALL, batch=4)[2:], "blocks.2.attn.pool.hook_rot_pooled_k"
    _, cache = MODEL.run_with_cache(other, names_filter=site)
    experiment = Experiment(MODEL, tokens, [lambda logits: logits[:, -1, 3]])
    cell = [Edit(site, cache[site])]
    with pytest.warns(UserWarning, match="hook_rot_pooled_k"):
        found = dict(experiment.run([cell], progress=False))
    assert_close(found[0][0], naive(MODEL, tokens, cell)[:, -1, 3])
    with pytest.raises(ValueError, match=r"positions=\(1,\), and '.*hook_rot_pooled_k' has no axis of positions"):
        next(experiment.run([[Edit(site, cache[site], (1,))]], progress=False))


@torch.no_grad()
def test_scores_of_generated_tokens_are_of_all_blocks() -> None:
    tokens, sites = (
        prompt(ALL, batch=1, length=5),
        [f"blocks.1.attn.hook_pooled_{name}" for name in ("scores", "pattern")],
    )
    tokens, cache = MODEL.generate(
        tokens, max_new_tokens=7, do_sample=False, return_cache=True, names_filter=sites, verbose=False
    )
    _, whole = MODEL.run_with_cache(tokens, names_filter=sites)
    for site in sites:
        assert_close(cache[site].nan_to_num(neginf=9.0), whole[site].nan_to_num(neginf=9.0))


def test_an_edge_between_tokens_is_refused_beside_blocks() -> None:
    tokens, edges = prompt(ALL, batch=1), {"edge": (2, -1)}
    with pytest.raises(ValueError, match=r"the layers \[1, 2\] also attend to blocks that pool several tokens"):
        attention_knockout(MODEL, tokens, edges, metric=lambda logits: logits[:, -1, 3], layers=None)
    found = attention_knockout(MODEL, tokens, {"edge": (2, 4)}, metric=lambda logits: logits[:, -1, 3], layers=[0])
    assert found.values.isfinite().all()


# ---- experts by token ids --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_follow_from_the_ids() -> None:
    tokens = prompt(ALL)
    _, cache = MODEL.run_with_cache(tokens)
    table = reference(ALL).model.layers[0].mlp.gate.tid2eid
    assert torch.equal(cache["blocks.0.mlp.hook_expert_indices"], table[tokens])
    other = (tokens + 1) % MODEL.cfg.d_vocab

    def instead(ids: Tensor, hook: Any) -> Tensor:
        return other[..., None]

    with MODEL.hooks([("blocks.0.hook_per_layer_in", instead)]):
        found, of_others = MODEL.run_with_cache(tokens)
    assert torch.equal(of_others["blocks.0.mlp.hook_expert_indices"], table[other])
    assert_apart(found, MODEL(tokens))


@torch.no_grad()
def test_a_resumed_run_needs_the_ids() -> None:
    tokens = prompt(ALL)
    with pytest.raises(ValueError, match=r"layer 0 chooses experts by token ids: pass tokens=\.\.\."):
        MODEL(MODEL(tokens, stop_at_layer=0), start_at_layer=0)
    assert torch.equal(MODEL(MODEL(tokens, stop_at_layer=0), start_at_layer=0, tokens=tokens), MODEL(tokens))
    assert torch.equal(MODEL(MODEL(tokens, stop_at_layer=1), start_at_layer=1), MODEL(tokens))
    with pytest.raises(ValueError, match="the experts are chosen by token ids"):
        MODEL.blocks[0].mlp(torch.zeros(1, 2, MODEL.cfg.d_model))
