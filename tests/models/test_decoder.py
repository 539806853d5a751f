import copy
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.hooks import HookPoint
from tests.close import assert_apart, assert_close, assert_near
from tests.core import CORE_KINDS, thinned
from tests.models.toys import BOTH_WAYS, D_VOCAB, KINDS, N_CTX, N_LAYERS, ids, padded, toy, words

ALL = "*"
EVERY_KIND = pytest.mark.parametrize("kind", thinned(KINDS, keep=CORE_KINDS))
N_POS = 10


# ---- what forward returns ------------------------------------------------------------------------------------------


def test_return_types_agree() -> None:
    model, tokens = toy(), ids()
    logits = model(tokens)
    assert logits.shape == (3, N_POS, D_VOCAB)
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert_close(model(tokens, return_type="loss"), expected.mean())
    assert_close(model(tokens, return_type="loss", loss_per_token=True), expected.view(3, -1))
    both = model(tokens, return_type="both")
    assert_close(both.logits, logits)
    assert_close(both.loss, expected.mean())
    assert model(tokens, return_type=None) is None
    assert_close(model.loss_fn(logits, tokens, per_token=True), expected.view(3, -1))


def test_ids_of_one_row_and_of_other_integer_types() -> None:
    model, tokens = toy(), ids()
    assert_close(model(tokens[0]), model(tokens[:1]))
    assert_close(model(tokens.int()), model(tokens))
    assert_close(model(tokens.int(), return_type="loss"), model(tokens, return_type="loss"))


def test_input_has_the_name_that_tokenizers_of_transformers_give_it() -> None:
    model, tokens = toy(), ids()
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    assert_close(model(input_ids=tokens, attention_mask=mask), model(tokens, attention_mask=mask))
    assert_apart(model(input_ids=tokens), model(tokens.flip(1)))
    assert_close(model.run_with_hooks(input_ids=tokens, fwd_hooks=[]), model(tokens))
    with pytest.raises(TypeError, match="once, as `input` or as `input_ids`; there are neither"):
        model()
    with pytest.raises(TypeError, match="there are both"):
        model(tokens, input_ids=tokens)


@pytest.mark.parametrize("n", [1, 3, N_POS, 99])
def test_logits_to_keep(n: int) -> None:
    assert_close(toy()(ids(), logits_to_keep=n), toy()(ids())[:, -n:])


@EVERY_KIND
@pytest.mark.parametrize("start", [0, 1, -1, N_LAYERS, -N_LAYERS])
@pytest.mark.parametrize("stop", [None, 0, 2, -1, N_LAYERS])
def test_start_and_stop_are_bounds_of_a_slice(kind: str, start: int, stop: int | None) -> None:
    model, tokens = toy(kind), ids()
    stream = model(tokens, stop_at_layer=start if start != N_LAYERS else None or N_LAYERS)
    assert stream.shape == (3, N_POS, 32)
    rest = model(stream, start_at_layer=start, stop_at_layer=stop)
    if range(N_LAYERS)[start:stop] or stop in (None, N_LAYERS):
        assert_close(rest, model(tokens, stop_at_layer=stop))
    else:
        assert_close(rest, stream)
    if stop is None:
        loss = model(stream, return_type="loss", start_at_layer=start, tokens=tokens)
        assert_close(loss, model(tokens, return_type="loss"))


def test_a_stream_is_what_the_sites_say() -> None:
    model, tokens = toy(), ids()
    _, cache = model.run_with_cache(tokens)
    assert_close(model(tokens, stop_at_layer=0), cache["hook_embed"] + cache["hook_pos_embed"])
    for layer in range(N_LAYERS):
        assert_close(model(tokens, stop_at_layer=layer), cache["resid_pre", layer])
        assert_close(model(tokens, stop_at_layer=layer + 1), cache["resid_post", layer])


def test_a_shortformers_positions_can_be_given() -> None:
    model, tokens = toy("shortformer"), ids()
    resid, same, pos_embed, mask = model.input_to_embed(tokens)
    assert torch.equal(same, tokens)
    assert mask is None
    assert_close(model(resid, start_at_layer=0, shortformer_pos_embed=pos_embed), model(tokens))
    assert_apart(model(resid, start_at_layer=0, shortformer_pos_embed=0 * pos_embed), model(tokens))
    embeds, again = model.get_residual(model.embed(tokens))
    assert_close(embeds, model.embed(tokens))
    assert_close(again, pos_embed)


def test_a_mask_is_returned_where_padding_was_looked_for() -> None:
    model = toy(tokenizer=words())
    texts = ["w3 w4 w5", "w6 w7 w8"]
    assert model.input_to_embed(texts, padding_side="right")[3] is None
    for texts_, expected in ((texts, [[1] * 4] * 2), (["w3", "w6 w7 w8"], [[0, 0, 1, 1], [1] * 4])):
        resid, tokens, _, mask = model.input_to_embed(texts_, padding_side="left")
        assert mask.tolist() == expected
        assert_close(model(resid, start_at_layer=0, attention_mask=mask), model(texts_, padding_side="left"))
    cache = model.run_with_cache(tokens[:, :2], past_kv_cache=(entries := KeyValueCache(N_LAYERS)))[1]
    assert cache is not None
    assert model.input_to_embed(tokens[:, 2:], past_kv_cache=entries)[3].shape == (2, 4)


def test_get_residual_adds_positions_from_an_offset() -> None:
    model = toy()
    embeds = model.embed(ids())
    resid, pos_embed = model.get_residual(embeds, pos_offset=3)
    assert pos_embed is None
    assert_close(resid, embeds + model.W_pos[3 : 3 + N_POS])
    assert_close(model.get_residual(embeds, return_shortformer_pos_embed=False), embeds + model.W_pos[:N_POS])


# ---- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.every_parameter
@EVERY_KIND
@pytest.mark.parametrize("side", ["left", "right"])
@given(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=3), seed=st.integers(0, 9))
@settings(max_examples=4)
def test_padded_rows_are_what_they_are_alone(kind: str, side: str, lengths: list[int], seed: int) -> None:
    model, rows = toy(kind), [ids(1, n, seed=seed + n)[0] for n in lengths]
    tokens, mask = padded(rows, side, filler=seed)
    batch, cache = model.run_with_cache(tokens, attention_mask=mask)
    assert_close(model(tokens, attention_mask=mask.bool()), batch)  # the fused kernel
    assert batch.isfinite().all()
    for i, row in enumerate(rows):
        alone = model(row)[0]
        assert_close(batch[i, mask[i].bool()], alone)
        pattern = cache["pattern", 1][i][:, mask[i].bool()]
        assert not pattern[..., ~mask[i].bool()].any()
        if len(row) > 1:
            losses = model(tokens, attention_mask=mask, return_type="loss", loss_per_token=True)[i]
            assert_close(losses.sum(), model(row, return_type="loss", loss_per_token=True).sum())


@EVERY_KIND
def test_left_padding_with_a_stream_in_the_middle(kind: str) -> None:
    model = toy(kind)
    tokens, mask = padded([ids(1, 7)[0], ids(1, 3, seed=4)[0]], "left")
    stream = model(tokens, attention_mask=mask, stop_at_layer=1)
    assert_close(model(stream, start_at_layer=1, attention_mask=mask), model(tokens, attention_mask=mask))


@pytest.mark.parametrize("kind", ["standard", "rotary", "shortformer"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_unequal_length(kind: str, side: str) -> None:
    model = toy(kind, words())
    texts = ["w3 w4 w5 w6", "w7", "w9 w10"]
    batch = model(texts, padding_side=side)
    losses, n = [], 0
    for i, text in enumerate(texts):
        length = len(text.split()) + 1
        real = slice(-length, None) if side == "left" else slice(length)
        assert_close(batch[i, real], model(text)[0])
        losses.append(model(text, return_type="loss", loss_per_token=True).sum())
        n += length - 1
    assert_close(model(texts, return_type="loss", padding_side=side), sum(losses) / n)
    tokens = model.to_tokens(texts, padding_side=side)
    assert_close(
        model(tokens, padding_side=side)[:, -1 if side == "left" else 0], batch[:, -1 if side == "left" else 0]
    )


def test_prepend_bos() -> None:
    model = toy("standard", words())
    assert_close(model("w3 w4"), model(torch.tensor([[0, 3, 4]])))
    assert_close(model("w3 w4", prepend_bos=False), model(torch.tensor([[3, 4]])))
    model.cfg.default_prepend_bos = False
    assert_close(model("w3 w4"), model(torch.tensor([[3, 4]])))


def test_attention_both_ways() -> None:
    model, tokens = toy(BOTH_WAYS), ids()
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % D_VOCAB
    assert_apart(model(changed)[:, 0], logits[:, 0])
    explicit, cache = model.run_with_cache(tokens)
    assert_close(explicit, logits)
    assert cache["pattern", 0].all()
    row = ids(1, 4, seed=3)[0]
    padded_tokens, mask = padded([tokens[0], row], "right")
    assert_close(model(padded_tokens, attention_mask=mask)[1, :4], model(row)[0])


# ---- two ways to attend --------------------------------------------------------------------------------------------


@EVERY_KIND
def test_listening_changes_nothing(kind: str) -> None:
    model, tokens = toy(kind), ids()
    bare = model(tokens)
    explicit, _ = model.run_with_cache(tokens, names_filter=["*hook_pattern", "*hook_attn_scores"])
    assert_close(explicit, bare)
    everything, cache = model.run_with_cache(tokens, names_filter=ALL)
    assert_close(everything, bare)
    assert set(cache) == set(model.all_points())


@EVERY_KIND
def test_identities(kind: str) -> None:
    model, tokens = toy(kind), ids()
    logits, cache = model.run_with_cache(tokens, names_filter=ALL)
    for layer, block in enumerate(model.blocks):
        pre, post, attn_out = (cache[name, layer] for name in ("resid_pre", "resid_post", "attn_out"))
        if model.cfg.attn_only:
            assert_close(pre + attn_out, post)
        elif model.cfg.parallel_attn_mlp:
            assert_close(pre + attn_out + cache["mlp_out", layer], post)
        else:
            assert_close(pre + attn_out, cache["resid_mid", layer])
            assert_close(cache["resid_mid", layer] + cache["mlp_out", layer], post)
        repeats = model.cfg.n_heads // block.attn.W_V.shape[0]
        values = cache["v", layer].repeat_interleave(repeats, 2)
        assert_close(torch.einsum("bhqk,bkhd->bqhd", cache["pattern", layer], values), cache["z", layer])
        scores, sinks = cache["attn_scores", layer], model.blocks[layer].attn.sinks
        if sinks is not None:  # they take their share and mix nothing in
            scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        assert_close(scores.softmax(-1)[..., : scores.shape[-2]], cache["pattern", layer])
        result = cache["result", layer].sum(2) + block.attn.b_O
        assert_close(norm_of(block, "ln1_post")(result), attn_out)
        if layer + 1 < N_LAYERS:
            assert_close(cache["resid_pre", layer + 1], post)
    assert_close(model.cap_logits(model.unembed(norm_of(model, "ln_final")(cache["resid_post", -1]))), logits)


def test_what_a_window_and_a_cap_do() -> None:
    _, cache = toy("windowed").run_with_cache(ids())
    distance = torch.arange(N_POS)[:, None] - torch.arange(N_POS)
    for layer, seen in enumerate([(distance >= 0) & (distance < 3), distance >= 0, (distance >= 0) & (distance < 3)]):
        assert torch.equal(cache["pattern", layer] > 0, seen.expand(3, 4, -1, -1))
    logits, cache = toy("parallel").run_with_cache(ids())
    scores = cache["attn_scores", 1]
    assert scores[scores.isfinite()].abs().max() <= 2.0
    assert logits.abs().max() <= 3.0


# ---- key/value caches ----------------------------------------------------------------------------------------------


@EVERY_KIND
@given(cuts=st.sets(st.integers(1, N_POS - 1), max_size=4))
@settings(max_examples=4)
def test_uneven_chunks_with_a_cache(kind: str, cuts: set[int]) -> None:
    model, tokens = toy(kind), ids()
    cache, bounds = KeyValueCache(N_LAYERS, room=4), [0, *sorted(cuts), N_POS]
    parts = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        listen = ["*hook_pattern"] if i % 2 else ["hook_embed"]
        part, _ = model.run_with_cache(tokens[:, a:b], past_kv_cache=cache, names_filter=listen)
        parts.append(part)
        assert cache.length == b
    assert_close(torch.cat(parts, 1), model(tokens))


@pytest.mark.every_parameter
@EVERY_KIND
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_goes_on_with_a_cache(kind: str, side: str) -> None:
    model, rows = toy(kind), [ids(1, n, seed=n)[0] for n in (6, 2)]
    tokens, mask = padded(rows, side)
    more = ids(2, 3, seed=8)
    expected = [model(torch.cat([row, new]))[0, -3:] for row, new in zip(rows, more, strict=True)]
    for whole_mask in (False, True):
        cache = KeyValueCache(N_LAYERS)
        model(tokens, attention_mask=mask, past_kv_cache=cache)
        first = model(more[:, :1], past_kv_cache=cache)
        later = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1) if whole_mask else None
        rest = model(more[:, 1:], past_kv_cache=cache, attention_mask=later)
        assert_close(torch.cat([first, rest], 1), torch.stack(expected))


def test_a_frozen_cache_is_read_and_stays() -> None:
    model, tokens = toy("rotary"), ids()
    cache = KeyValueCache.init_cache(model.cfg, "cpu", 3)
    model(tokens[:, :4], past_kv_cache=cache)
    cache.freeze()
    before = cache[1].past_keys.clone()
    for _ in range(2):
        assert_close(model(tokens[:, 4:], past_kv_cache=cache), model(tokens)[:, 4:])
        assert cache.length == 4
        assert torch.equal(cache[1].past_keys, before)
    cache.unfreeze()
    model(tokens[:, 4:], past_kv_cache=cache)
    assert cache.length == N_POS


def test_gradients_go_through_a_cache() -> None:
    model, tokens = toy().requires_grad_(True), ids()
    cache = KeyValueCache(N_LAYERS)
    model(tokens[:, :4], past_kv_cache=cache)
    model(tokens[:, 4:7], past_kv_cache=cache)
    model(tokens[:, 7:], past_kv_cache=cache)[:, -1].sum().backward()
    found = model.blocks[0].attn.W_K.grad.clone()
    model.zero_grad()
    model(tokens)[:, -1].sum().backward()
    assert_close(found, model.blocks[0].attn.W_K.grad)


def test_a_single_token_of_a_continuation_is_never_padding() -> None:
    model = toy("standard", words(), default_padding_side="left")
    cache = KeyValueCache(N_LAYERS)
    model(torch.tensor([[5, 6]]), past_kv_cache=cache)
    new = model(torch.tensor([[0]]), past_kv_cache=cache)
    assert_close(new[0, 0], model(torch.tensor([[5, 6, 0]]))[0, 2])


# ---- sites ---------------------------------------------------------------------------------------------------------


@EVERY_KIND
def test_every_site_fires_once_in_the_order_of_hook_dict_with_the_axes_it_says(kind: str) -> None:
    model, seen = toy(kind), []
    sizes = {
        "batch": 3, "pos": N_POS, "query_pos": N_POS, "key_pos": N_POS, "d_model": 32, "head": 4, "d_head": 8,
        "kv_head": model.blocks[0].attn.W_K.shape[0], "d_mlp": 128, "d_vocab": D_VOCAB, "1": 1,
    }  # fmt: skip

    def look(value: Tensor, hook: HookPoint) -> None:
        seen.append(hook.name)
        assert value.shape == tuple(sizes[dim] for dim in hook.dims), hook.name

    copies = [name for name in model.all_points() if name.endswith(("_input", "_attn_in"))]  # they pass the norm too
    others = [name for name in model.all_points() if name not in copies]
    for names in (others, copies):
        seen.clear()
        model.run_with_hooks(ids(), fwd_hooks=[(names, look)])
        assert seen == names


@EVERY_KIND
def test_each_site_is_live(kind: str) -> None:
    """An edit anywhere reaches the logits, and a gradient comes back."""
    model, tokens = toy(kind, n_layers=1), ids()
    bare = model(tokens)
    for name in model.all_points():
        if name == "hook_tokens":
            continue

        def edit(value: Tensor, hook: HookPoint) -> Tensor:
            return value * 1.7 + torch.arange(value.shape[-1]).cos()  # no norm and no softmax is blind to that

        logits = model.run_with_hooks(tokens, fwd_hooks=[(name, edit)])
        assert_apart(logits, bare, msg=name)
    bare_names = [name for name, point in model.all_points().items() if not point.on_demand]
    for names in (bare_names, *([name] for name in set(model.all_points()) - {*bare_names, "hook_tokens"})):
        _, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True, names_filter=names)
        assert {name for name in cache if name.endswith("_grad")} == {f"{name}_grad" for name in names}
        assert all(cache[f"{name}_grad"].any() for name in names)


def test_tokens_can_be_edited() -> None:
    model = toy()
    edited = model.run_with_hooks(ids(), fwd_hooks=[("hook_tokens", lambda value, hook: (value + 1) % D_VOCAB)])
    assert_close(edited, model((ids() + 1) % D_VOCAB))


ON_DEMAND = {
    "set_use_attn_result": ["attn.hook_result"],
    "set_use_split_qkv_input": ["hook_q_input", "hook_k_input", "hook_v_input"],
    "set_use_attn_in": ["hook_attn_in"],
    "set_use_hook_mlp_in": ["hook_mlp_in"],
}


@pytest.mark.parametrize("setter", ON_DEMAND)
def test_sites_on_demand(setter: str) -> None:
    model = toy("rotary")
    names = [f"blocks.1.{site}" for site in ON_DEMAND[setter]]
    _, bare = model.run_with_cache(ids())
    assert not set(names) & set(bare)
    _, named = model.run_with_cache(ids(), names_filter=names)
    assert list(named) == [name for name in model.all_points() if name in names]
    getattr(model, setter)(True)
    _, flagged = model.run_with_cache(ids())
    assert set(names) <= set(flagged)
    assert len(flagged) == len(bare) + N_LAYERS * len(names)
    getattr(model, setter)(False)
    assert set(model.run_with_cache(ids())[1]) == set(bare)


@pytest.mark.parametrize("kind", ["standard", "rotary", "post_norm"])
def test_split_inputs_reach_one_head_each(kind: str) -> None:
    model, tokens = toy(kind), ids()
    _, clean = model.run_with_cache(tokens)

    def silence(value: Tensor, hook: HookPoint) -> Tensor:
        value[:, :, 0] = 0
        return value

    for site, changed in {"q_input": "q", "k_input": "k", "v_input": "v", "attn_in": "q"}.items():
        with model.hooks([((site, 1), silence)]):
            _, cache = model.run_with_cache(tokens, names_filter=[("q", 1), ("k", 1), ("v", 1)])
        others = {"q", "k", "v"} - ({"q", "k", "v"} if site == "attn_in" else {changed})
        for name in others:
            assert_close(cache[name, 1], clean[name, 1])
        assert_apart(cache[changed, 1][:, :, 0], clean[changed, 1][:, :, 0])
        assert_close(cache[changed, 1][:, :, 1:], clean[changed, 1][:, :, 1:])


@pytest.mark.parametrize(
    "site",
    [
        "blocks.1.attn.hook_z", ("z", 1), ("z", -2), ("z", 1, "attn"), ("z", 1, "a"), "z1", "blocks.1.attn.o.hook_in",
        "blocks.[1].attn.hook_z", ["z1"], lambda name: name == "blocks.1.attn.hook_z",
    ],
)  # fmt: skip
def test_a_site_has_many_names(site: Any) -> None:
    model, seen = toy(), []
    with model.hooks([(site, lambda value, hook: seen.append(hook.name))]):
        _, cache = model.run_with_cache(ids(), names_filter=site)
    assert seen == list(cache) == ["blocks.1.attn.hook_z"]
    if isinstance(site, (str, tuple)) and "[" not in site:
        assert cache[site] is cache["blocks.1.attn.hook_z"]
        assert site in cache


@EVERY_KIND
def test_each_alias_reads_a_site(kind: str) -> None:
    model = toy(kind)
    _, cache = model.run_with_cache(ids(), names_filter=ALL)
    assert model.aliases["blocks.0.hook_out"] == "blocks.0.hook_resid_post"
    for alias, name in model.aliases.items():
        assert cache[alias] is cache[name]
        assert alias not in list(cache)


def test_norms_have_short_names_too() -> None:
    _, cache = toy().run_with_cache(ids())
    assert cache["scale", 1, "ln1"] is cache["scale1ln1"] is cache["blocks.1.ln1.hook_scale"]
    assert cache["normalized"] is cache["ln_final.hook_normalized"]


@pytest.mark.parametrize("site", ["blocks.0.atn.hook_z", ("zz", 0), "blocks.*.hook_zz"])
def test_an_unknown_site_is_named_with_its_neighbours_before_anything_runs(site: Any) -> None:
    model, calls = toy(), []
    with pytest.raises(KeyError, match="hook_z") as error:
        model.run_with_hooks(ids(), fwd_hooks=[("hook_embed", lambda v, hook: calls.append(1)), (site, print)])
    assert not calls
    assert str(error.value).count("'") >= 8  # itself and three others
    with pytest.raises(IndexError, match="-3 to 2"):
        model.run_with_cache(ids(), names_filter=("z", N_LAYERS))


# ---- stopping early ------------------------------------------------------------------------------------------------


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("names_filter", "n_blocks", "unembeds"),
    [
        ("hook_embed", 0, False),
        (("resid_pre", 1), 2, False),
        (["z0", "blocks.1.mlp.hook_post"], 2, False),
        ("*.hook_resid_post", 3, False),
        ("ln_final.hook_scale", 3, False),
        ("unembed.hook_out", 3, True),
    ],
)
def test_a_run_for_a_cache_stops_after_the_last_layer_needed(names_filter: Any, n_blocks: int, unembeds: bool) -> None:
    model, calls = toy(), []
    for module in (*model.blocks, model.unembed):
        module.register_forward_hook(lambda module, args, out: calls.append(module))
    output, cache = model.run_with_cache(ids(), return_type=None, names_filter=names_filter)
    assert output is None
    assert calls == [*model.blocks[:n_blocks], *([model.unembed] if unembeds else [])]
    full_output, full = model.run_with_cache(ids(), names_filter=names_filter)
    assert full_output.shape == (3, N_POS, D_VOCAB)
    assert list(full) == list(cache)
    assert all(torch.equal(full[name], cache[name]) for name in cache)


def test_without_a_filter_nothing_stops_early() -> None:
    model = toy()
    output, cache = model.run_with_cache(ids(), return_type=None)
    assert output is None
    assert "ln_final.hook_normalized" in cache
    stream, cache = model.run_with_cache(ids(), stop_at_layer=1)
    assert stream.shape == (3, N_POS, 32)
    assert "blocks.0.hook_resid_post" in cache
    assert "blocks.1.hook_resid_pre" not in cache


# ---- precision, compilation, copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@EVERY_KIND
def test_other_precisions(kind: str, dtype: torch.dtype) -> None:
    model = toy(kind)
    expected = model(ids())
    model = model.to(dtype)
    assert model.cfg.dtype == dtype
    logits, cache = model.run_with_cache(ids(), names_filter=ALL)
    assert logits.dtype == dtype
    assert {cache["resid_post", 0].dtype, cache["z", 0].dtype, cache["pattern", 0].dtype} == {dtype}
    coarser = torch.float32 if dtype == torch.float64 else dtype
    assert_close(model(ids()), expected, dtype=coarser)
    assert_close(logits, expected, dtype=coarser)
    assert model.generate(ids(), 2, stop_at_eos=False, verbose=False).shape == (3, N_POS + 2)


COMPILE = """
import torch
from tests.close import assert_close
from tests.models.toys import ids, padded, toy
for kind, fused in (("tied", "auto"), ("rotary", "auto"), ("post_norm", "never")):
    model = toy(kind, fused_attention=fused)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids()), model(ids()))
    tokens, mask = padded([ids(1, 7)[0], ids(1, 3, seed=4)[0]], "left")
    assert_close(compiled(tokens, attention_mask=mask), model(tokens, attention_mask=mask))
print("compiled")
"""


@pytest.mark.slow
def test_compilation_in_one_graph() -> None:
    """In a separate process, because the runtime checks of annotations, which only tests have, do not compile."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr


@EVERY_KIND
def test_copies_pickles_and_state_dicts(kind: str) -> None:
    model = toy(kind)
    logits = model(ids())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(other(ids()), logits)
        assert list(other.all_points()) == list(model.all_points())
        assert all(other.hook_dict[name] is not model.hook_dict[name] for name in model.all_points())
        with torch.no_grad():
            other.embed.W_E.copy_(other.embed.W_E.flip(0))  # a shift would be lost in the first norm
        assert_apart(other(ids()), logits)
        assert_close(model(ids()), logits)
    fresh = toy(kind, seed=2)
    assert_apart(fresh(ids()), logits)
    fresh.load_state_dict(model.state_dict())
    assert_close(fresh(ids()), logits)
    assert "unembed.W_U" in model.state_dict()


def test_a_tied_unembedding() -> None:
    model = toy("tied").requires_grad_(True)
    assert model.n_params_total == toy().n_params_total - 32 * D_VOCAB
    assert torch.equal(model.W_U, model.W_E.T)
    state = model.state_dict()
    state["unembed.W_U"] = state["unembed.W_U"] + 1
    with pytest.raises(RuntimeError, match="untie"):
        copy.deepcopy(model).load_state_dict(state)
    logits = model(ids())
    model.untie()
    assert_close(model(ids()), logits)
    model.load_state_dict(state)
    assert_apart(model(ids()), logits)


# ---- subclasses, other modules in its place ------------------------------------------------------------------------


def test_a_subclass_with_its_own_init() -> None:
    class Mine(HookedTransformer):
        def __init__(self, cfg: Any, tokenizer: Any = None, extra: int = 0) -> None:
            super().__init__(cfg, tokenizer=tokenizer)
            self.extra = HookPoint("batch", "pos", "d_vocab")
            self.n_extra = extra
            self.setup()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.extra(super().forward(*args, **kwargs) + self.n_extra)

    cfg = {
        "n_layers": 1,
        "d_model": 16,
        "n_heads": 2,
        "n_ctx": 8,
        "d_vocab": D_VOCAB,
        "act_fn": "relu",
        "device": "cpu",
    }
    model = Mine(cfg, tokenizer=words(), extra=2)
    _, cache = model.run_with_cache("w3 w4", names_filter="extra")
    assert list(cache) == ["extra"]
    assert model.generate("w3", 2, stop_at_eos=False, verbose=False).startswith("w3")


class Doubling(nn.Module):
    """Some other module with a point in it."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_mine = HookPoint("batch", "pos", "d_model")

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.hook_mine(2 * x)


@pytest.mark.parametrize("path", ["blocks.1.mlp", "blocks.1.ln1", "blocks.1.ln2", "ln_final", "blocks.1.hook_mlp_out"])
def test_any_module_in_the_place_of_a_part(path: str) -> None:
    model = toy()
    before = model(ids())
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Doubling())
    model.setup()
    logits, cache = model.run_with_cache(ids())
    assert f"{path}.hook_mine" in cache
    assert_apart(logits, before)
    assert_close(model(ids()), logits)
    assert_close(model.run_with_hooks(ids(), fwd_hooks=[(f"{path}.hook_mine", lambda value, hook: value / 1)]), logits)


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "point", ["attn.hook_pattern", "attn.hook_attn_scores", "attn.hook_result", "hook_q_input", "hook_attn_in", "hook_mlp_in",
              "ln1.hook_scale", "ln1.hook_normalized", "attn.hook_z", "mlp.hook_in"],
)  # fmt: skip
def test_a_module_in_the_place_of_a_point_sees_the_value(point: str) -> None:
    model, seen = toy(), []

    class Spy(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            seen.append(value)
            return value

    _, cache = model.run_with_cache(ids(), names_filter=f"blocks.1.{point}")
    parent, _, name = f"blocks.1.{point}".rpartition(".")
    setattr(model.get_submodule(parent), name, Spy())
    model.setup()
    assert_close(model(ids()), toy()(ids()))
    assert_close(seen[0], cache[f"blocks.1.{point}"])


def test_another_unembedding() -> None:
    model = toy()
    model.unembed = nn.Linear(32, 7)
    model.setup()
    assert model(ids()).shape == (3, N_POS, 7)
    assert model.generate(ids(), 2, stop_at_eos=False, verbose=False).shape == (3, N_POS + 2)


def test_an_edit_of_a_weight_takes_effect() -> None:
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        model = toy("rotary")
        before = model(ids())
        with torch.no_grad():
            getattr(model.blocks[1].attn, name)[0].mul_(-1)
        assert_apart(model(ids()), before)
        assert torch.equal(getattr(model, name)[1, 0], getattr(model.blocks[1].attn, name)[0])


# ---- new models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["gpt2", "muP", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"]
)
def test_initial_weights_come_from_the_models_own_seed(mode: str) -> None:
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_ctx": 8, "d_vocab": 40, "act_fn": "relu", "device": "cpu"}
    before = torch.random.get_rng_state()
    one, same, other = (HookedTransformer({**sizes, "init_mode": mode, "seed": seed}) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    unseeded = HookedTransformer({**sizes, "init_mode": mode})
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.W_E, other.W_E)
    assert not torch.equal(one.W_E, unseeded.W_E)
    assert not one.b_Q.any()
    assert (one.blocks[0].ln1.w == 1).all()
    assert one(ids(1, 4) % 40).isfinite().all()
    scale = one.cfg.initializer_range
    std = {
        "gpt2": scale,
        "muP": scale / 8,
        "xavier_uniform": scale * (2 / (64 + 256)) ** 0.5,
        "xavier_normal": scale * (2 / (64 + 256)) ** 0.5,
        "kaiming_uniform": scale * (2 / 64) ** 0.5,
        "kaiming_normal": scale * (2 / 64) ** 0.5,
    }[mode]
    assert_near(one.W_in.std(), std, 0.05, because="a deviation of 16,384 draws")


def test_an_attention_only_model_learns_to_copy() -> None:
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=32, n_heads=2, n_ctx=8, d_vocab=12, attn_only=True, normalization_type=None, seed=0, device="cpu",
        init_mode="gpt2",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        first = torch.randint(12, (64, 4), generator=generator)
        loss = model(torch.cat([first, first], 1), return_type="loss", loss_per_token=True)[:, 3:].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 < 2.48  # ln 12 is what guessing costs


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        (lambda m: m(ids(1, N_CTX + 1)), ValueError, "25 tokens.* n_ctx of 24"),
        (lambda m: m(torch.zeros(1, 0, dtype=torch.long)), ValueError, r"empty.*\(1, 0\)"),
        (lambda m: m(torch.zeros(0, 4, dtype=torch.long)), ValueError, r"empty.*\(0, 4\)"),
        (lambda m: m(torch.tensor([[1, D_VOCAB]])), ValueError, "50"),
        (lambda m: m(torch.tensor([[1, -D_VOCAB - 1]])), ValueError, "-51"),
        (lambda m: m("some text"), ValueError, "tokenizer"),
        (lambda m: m(torch.zeros(1, 2, 3, dtype=torch.long)), ValueError, r"\(1, 2, 3\)"),
        (lambda m: m(ids(), return_type="logit"), ValueError, "'logit'"),
        (lambda m: m(ids(), logits_to_keep=0), ValueError, "logits_to_keep"),
        (lambda m: m(ids(), return_type="loss", logits_to_keep=2), ValueError, "logits_to_keep"),
        (lambda m: m(ids(), start_at_layer=0), ValueError, "stream"),
        (lambda m: m(torch.rand(1, 4, 31), start_at_layer=0), ValueError, r"32\].*31"),
        (lambda m: m(torch.rand(1, 4, 32), start_at_layer=0, return_type="loss"), ValueError, "tokens="),
        (lambda m: m(ids(), stop_at_layer=N_LAYERS + 1), IndexError, "-3 to 3"),
        (lambda m: m(torch.rand(1, 4, 32), start_at_layer=-4), IndexError, "-4.*-3 to 3"),
        (lambda m: m(ids(), start_at_layer=9), IndexError, "9 is out of range"),
        (lambda m: m(ids(), attention_mask=torch.ones(3, 9, dtype=torch.long)), ValueError, r"\(3, 9\).*\(3, 10\)"),
        (lambda m: m(ids(), attention_mask=torch.ones(2, 10, dtype=torch.long)), ValueError, r"\(2, 10\).*\(3, 10\)"),
    ],
)
def test_bad_input_to_forward(run: Any, kind: type[Exception], message: str) -> None:
    model, calls = toy(), []
    with (
        model.hooks(
            [("hook_embed", lambda value, hook: None), ("unembed.hook_out", lambda value, hook: calls.append(1))]
        ),
        pytest.raises(kind, match=message),
    ):
        run(model)
    assert not model.list_hooks()


def test_a_cache_has_to_fit_too() -> None:
    model, cache = toy(), KeyValueCache(N_LAYERS)
    model(ids(2, 20), past_kv_cache=cache)
    with pytest.raises(ValueError, match=r"25 tokens with the 20 in the cache.* n_ctx of 24"):
        model(ids(2, 5), past_kv_cache=cache)
    with pytest.raises(ValueError, match=r"2 rows.*3"):
        model(ids(3, 1), past_kv_cache=cache)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 1\).*\(2, 21\)"):
        model(ids(2, 1), past_kv_cache=cache, attention_mask=torch.ones(2, 3, dtype=torch.long))


def test_text_is_only_cut_on_request() -> None:
    model = toy("standard", words())
    with pytest.raises(ValueError, match="n_ctx of 24"):
        model(" ".join(["w3"] * 30))


@pytest.mark.parametrize(
    "answer", [lambda v: v[:, :1], lambda v: v.double(), lambda v: "text", lambda v: v.unsqueeze(0)]
)
def test_a_hook_that_returns_something_else(answer: Any) -> None:
    model = toy()
    before = model(ids())
    with pytest.raises((ValueError, TypeError), match=r"blocks.1.hook_resid_pre.*expected.*\(3, 10, 32\)"):
        model.run_with_hooks(ids(), fwd_hooks=[(("resid_pre", 1), lambda value, hook: answer(value))])
    assert not model.list_hooks()
    assert_close(model(ids()), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_hook(error: type[BaseException]) -> None:
    model = toy()

    def fail(value: Tensor, hook: HookPoint) -> None:
        raise error

    with pytest.raises(error):
        model.run_with_hooks(ids(), fwd_hooks=[("z1", fail)])
    assert not model.list_hooks()
    assert model(ids()).isfinite().all()


def test_a_cache_names_what_it_lacks() -> None:
    _, cache = toy().run_with_cache(ids(), names_filter="*hook_z")
    with pytest.raises(KeyError, match=r"blocks.1.attn.hook_v.*names_filter"):
        cache["v", 1]
    with pytest.raises(IndexError, match="-3 to 2"):
        cache["z", 3]


# ---- nothing half-done -------------------------------------------------------------------------------------------------


def test_a_run_that_fails_leaves_the_cache_as_it_was() -> None:
    model, tokens, cache = toy(), ids(), KeyValueCache(N_LAYERS)

    def fail(value: Tensor, hook: HookPoint) -> None:
        raise KeyboardInterrupt

    for start, stop, rows in ((0, 4, 2), (4, N_POS, 3)):  # from empty (and then with more rows), and from filled
        hooks = [(("z", 1), fail)]
        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(tokens[:rows, start:stop], past_kv_cache=cache, fwd_hooks=hooks)
        assert [entry.length for entry in cache.entries] == [start] * N_LAYERS
        assert_close(model(tokens[:, start:stop], past_kv_cache=cache), model(tokens)[:, start:stop])


def test_a_run_of_some_layers_does_not_fill_a_cache_by_half() -> None:
    model, tokens, cache = toy(), ids(), KeyValueCache(N_LAYERS)
    with pytest.raises(ValueError, match="half-filled"):
        model(tokens, stop_at_layer=1, past_kv_cache=cache)
    model.run_with_cache(tokens[:, :4], names_filter=("z", 0), return_type=None, past_kv_cache=cache)
    assert_close(model(tokens[:, 4:], past_kv_cache=cache), model(tokens)[:, 4:])
    with pytest.raises(ValueError, match="for 1 layers"):
        model(tokens, past_kv_cache=KeyValueCache(1))


def test_stopping_early_waits_for_hooks_that_are_open() -> None:
    model, seen = toy(), []
    with model.hooks([(("resid_post", -1), lambda value, hook: seen.append(hook.name))]):
        model.run_with_cache(ids(), names_filter=("z", 0), return_type=None)
    assert seen == [f"blocks.{N_LAYERS - 1}.hook_resid_post"]


def test_arguments_of_a_cached_run_go_by_position_too() -> None:
    model, tokens = toy(), ids()
    losses, _ = model.run_with_cache(tokens, "loss", True)
    assert_close(losses, model(tokens, "loss", True))


@pytest.mark.parametrize("shape", [(1, 0, 32), (0, 3, 32), (1, N_CTX + 1, 32)])
def test_a_stream_is_checked_as_tokens_are(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty|n_ctx"):
        toy()(torch.zeros(shape), start_at_layer=0)
    with pytest.raises(ValueError, match=r"empty|n_ctx"):
        toy().get_residual(torch.zeros(shape))


def test_a_loss_needs_something_to_predict() -> None:
    model = toy()
    with pytest.raises(ValueError, match="two real tokens"):
        model(ids(2, 1), return_type="loss")
    with pytest.raises(ValueError, match="two real tokens"):
        model(ids(2, 2), return_type="loss", attention_mask=torch.tensor([[0, 1], [0, 1]]))


def test_a_subclass_may_take_only_what_it_is_given() -> None:
    class Plain(HookedTransformer):
        def forward(self, input: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            received.append(kwargs)
            return super().forward(input, **kwargs)

    received: list[dict[str, Any]] = []
    model = Plain(toy("tied").cfg)
    model.run_with_cache(ids())
    loss, _ = model.run_with_cache(ids(), return_type="loss")
    model.run_with_cache(ids(), return_type=None, names_filter=("resid_post", 0))
    assert received == [{}, {"return_type": "loss"}, {"return_type": None, "stop_at_layer": 1}]
    assert loss.shape == ()
    with pytest.raises(TypeError, match="positional"):
        model.run_with_cache(ids(), "loss", True)
