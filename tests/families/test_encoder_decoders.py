"""What every encoder-decoder of `tests/families/` buys: the numbers of transformers, under names that mean what they say."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from hooked_lm import ActivationCache, HookedEncoderDecoder, hub, pretrained
from hooked_lm.components.attention.position_bias import Band, SharedBias, Sparsity
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.experts.moe import MoE
from hooked_lm.families import model_class
from hooked_lm.families.encoder_decoders.longt5.transient_global import TransientGlobalBias
from hooked_lm.families.encoder_decoders.t5gemma2.merged import MergedBlock
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from tests.close import assert_close, assert_equal
from tests.families import ENCODER_DECODER_CASES, Case, reference
from tests.families._alive import Ignored, without_effect
from tests.families._fake import assert_nothing_crosses
from tests.families._models import (
    MODERATE,
    assert_as_near_the_truth,
    assert_rows_of_patterns,
    assert_same_files,
    assert_same_gradients_of,
    assert_same_tensors,
    backpropagate,
    distance,
    has_routes,
    hooked,
    judged_on_more_where_few_decide,
    padded,
    with_tree,
)
from tests.families._sites import sites_of, sizes_of
from tests.families.encoder_decoders import PAD
from tests.unchecked import unchecked

N_TARGET = 11
EACH_CASE = ENCODER_DECODER_CASES


def drawn(case: Case, batch: int = 3, source: int | None = None, target: int = N_TARGET) -> tuple[Tensor, Tensor]:
    """Random token ids for either side, none of them the pad token."""
    generator, cfg = torch.Generator().manual_seed(1), hooked(case).cfg
    n_source = source or case.n_prompt
    return (
        torch.randint(PAD + 1, cfg.d_vocab, (batch, n_source), generator=generator),
        torch.randint(PAD + 1, cfg.d_vocab_out, (batch, target), generator=generator),
    )


def theirs(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(reference(case)).to(dtype)


@torch.no_grad()
def logits_of(
    case: Case, source: Tensor, target: Tensor, dtype: torch.dtype = torch.float32, **masks: Tensor
) -> Tensor:
    """What transformers says."""
    return theirs(case, dtype)(source, decoder_input_ids=target, **masks).logits


def global_mask(case: Case, source: Tensor) -> dict[str, Tensor]:
    """Tokens of global attention, other ones in each row, for a model that can have them."""
    if hooked(case).global_tokens is None:
        return {}
    chosen = torch.rand(source.shape, generator=torch.Generator().manual_seed(6)) < 0.25
    chosen[-1, 1:] = False
    return {"global_attention_mask": chosen.long()}


def test_the_class_is_the_one_that_is_listed(case: Case):
    assert type(hooked(case)).__name__ == model_class(case.family) == "HookedEncoderDecoder"


# ---- the same numbers ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
@torch.enable_grad()
def expected(case: Case) -> tuple[Any, Tensor]:
    """A model of transformers, and its logits for drawn texts with all masks, through which gradients flow."""
    model, (source, target) = theirs(case), drawn(case)
    return model, model(source, decoder_input_ids=target, **global_mask(case, source)).logits


@lru_cache(maxsize=1)
@torch.enable_grad()
def found(case: Case) -> Tensor:
    """Our logits for the same, through which gradients flow."""
    source, target = drawn(case)
    return hooked(case)(source, target, **global_mask(case, source))


@lru_cache(maxsize=1)
@torch.no_grad()
def plain(case: Case) -> Tensor:
    """Our logits for the texts alone; nobody listens."""
    return hooked(case)(*drawn(case)) if global_mask(case, drawn(case)[0]) else found(case).detach()


@lru_cache(maxsize=1)
@torch.no_grad()
def cached(case: Case) -> tuple[Tensor, ActivationCache]:
    """Our logits for the texts alone, and what a bare cache contains."""
    return hooked(case).run_with_cache(*drawn(case))


@unchecked()
def test_logits(case: Case):
    logits = expected(case)[1].detach()
    assert MODERATE[0] < logits.std() < MODERATE[1], f"the deviation of the logits is {logits.std():.2g}"
    assert_close(found(case).detach(), logits)
    if global_mask(case, drawn(case)[0]):
        assert_close(plain(case), logits_of(case, *drawn(case)))


@unchecked()
def test_a_cache_does_not_change_the_logits(case: Case):
    assert_close(cached(case)[0], plain(case))


@torch.no_grad()
@unchecked()
def test_attention_is_uneven_and_the_source_matters(case: Case):
    """Else a wrong order of heads or positions would hardly show."""
    source, target = drawn(case)
    _, cache = cached(case)
    for site in ("encoder.0.attn", "decoder.0.attn", "decoder.0.cross_attn"):
        pattern = cache[f"{site}.hook_pattern"]
        pattern = pattern / pattern.sum(-1, keepdim=True)  # the rest goes to blocks of tokens
        seen = (pattern > 0).sum(-1)
        assert ((pattern.amax(-1) * seen)[seen > 1]).mean() > 1.2, site
    assert distance(hooked(case)(source.flip(1), target), plain(case)) > 1e-2


@unchecked()
def test_gradients(case: Case):
    """For every weight, under the name that transformers gives it: our gradients are exported as if they were weights."""
    source, target = drawn(case)
    masks = global_mask(case, source)

    def of_transformers(dtype: torch.dtype) -> Any:
        model, logits = expected(case)
        if dtype is not torch.float32:
            model = theirs(case, dtype)
            logits = model(source, decoder_input_ids=target, **masks).logits
        backpropagate(logits)
        return model

    def ours(dtype: torch.dtype) -> Any:
        model, logits = hooked(case), found(case)
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
            logits = model(source, target, **masks)
        backpropagate(logits)
        return model

    assert_same_gradients_of(ours, of_transformers)


@torch.no_grad()
@unchecked()
def test_bf16_is_as_near_the_truth_as_transformers(case: Case):
    ours = copy.deepcopy(hooked(case)).to(torch.bfloat16)

    def compare(n_prompts: int) -> None:
        inputs = drawn(case, batch=n_prompts)
        truth, rough = logits_of(case, *inputs, torch.float64), logits_of(case, *inputs, torch.bfloat16)
        assert_as_near_the_truth(ours(*inputs), rough, truth, has_routes(ours))

    judged_on_more_where_few_decide(compare, 8)


# ---- the way in and out ----------------------------------------------------------------------------------------------


@unchecked()
def test_tensors_may_come_in_any_order(case: Case, read: HookedEncoderDecoder):
    assert_same_tensors(dict(read.named_parameters()), dict(hooked(case).named_parameters()))


@unchecked()
def test_export_is_exact(
    read: HookedEncoderDecoder,
    checkpoint: Path,
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A tower of images cannot be written back, only the rest alone. What is written is what was read; if it is less, or
    its names are newer, it is read again."""
    own, left_out = weights, read.cfg.left_out
    if left_out is not None:
        with pytest.raises(ValueError, match="cannot be written back: left out were"):
            read.save_pretrained(tmp_path)
        monkeypatch.setattr(read.cfg, "left_out", None)
        towers = tuple(f"{module}." for module in left_out)
        own = {name: tensor for name, tensor in weights.items() if not name.startswith(towers)}
    read.save_pretrained(tmp_path)
    if own.keys() == tensors.keys():
        assert_same_files(tmp_path, checkpoint, own)
    else:
        assert_same_tensors(load_file(tmp_path / "model.safetensors"), own)
        again = pretrained.from_pretrained_no_processing(tmp_path)
        assert_same_tensors(dict(again.named_parameters()), dict(read.named_parameters()))


@torch.no_grad()
@unchecked()
def test_the_model_of_transformers_comes_back(case: Case):
    if hooked(case).cfg.left_out is not None:
        with pytest.raises(ValueError, match="cannot be written back: left out were"):
            hooked(case).to_hf()
        return
    back, (source, target) = hooked(case).to_hf(), drawn(case)
    back.set_attn_implementation("eager")
    assert type(back) is type(reference(case))
    assert_same_tensors(back.state_dict(), reference(case).state_dict())
    logits = back(source, decoder_input_ids=target, **global_mask(case, source)).logits
    assert torch.equal(logits, expected(case)[1])


# ---- sites -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_sites_and_their_shapes(case: Case):
    model, tree = hooked(case), hooked(case).cfg.tree
    listed = sites_of(tree)
    assert {name: " ".join(point.dims) for name, point in model.all_points().items()} == listed
    logits, cache = model.run_with_cache(*drawn(case), names_filter="*", **global_mask(case, drawn(case)[0]))
    assert_close(logits, found(case).detach(), msg="with sites on demand")
    assert_in_order(
        list(cache), list(model.all_points()), merged=isinstance(tree.decoder.blocks[0], MergedBlock.Config)
    )
    for name, value in cache.items():
        lengths = lengths_at(tree, name, 3, case.n_prompt, N_TARGET)
        axes = listed[name].split()
        assert [n for n, axis in zip(value.shape, axes, strict=True) if axis != "routed"] == [
            lengths[axis] for axis in axes if axis != "routed"
        ], name


def assert_in_order(found: list[str], listed: list[str], merged: bool) -> None:
    """Sites are listed in the order of computation. Those of a merged attention's halves take turns; each half is in order."""
    halves = (True, False) if merged else (True,)
    for with_source in halves:

        def of_half(names: list[str], with_source: bool = with_source) -> list[str]:
            return [name for name in names if not merged or (".cross_attn." in name) == with_source]

        assert of_half(found) == of_half(listed)


def lengths_at(tree: EncoderDecoderConfig, name: str, batch: int, source: int, target: int) -> dict[str, int]:
    """How long each axis of a site is in a run of this size."""
    head, *rest = name.split(".")
    of_decoder = head.startswith(("decoder", "hook_decoder", "ngram_embed", "unembed"))
    side = tree.decoder if of_decoder else tree.encoder
    n_pos = target if of_decoder else source
    lengths = {"batch": batch, "pos": n_pos, "query_pos": n_pos, "key_pos": n_pos, "1": 1}
    lengths |= {"d_model": ((of_decoder and tree.decoder_embed) or tree.embed).d_model, "d_vocab": tree.unembed.d_vocab}
    if rest[:1] in (["hook_bias"], ["hook_bias_global"]):
        lengths["head"] = side.rel_pos_bias.n_heads
    if isinstance(side.rel_pos_bias, TransientGlobalBias.Config):
        lengths["block"] = source // side.rel_pos_bias.block_size
    if head in ("encoder", "decoder"):
        block = side.blocks[int(rest[0])]
        lengths |= sizes_of(block) | sizes_of(block.attn) | sizes_of(block.mlp)
    if head == "ngram_embed":
        lengths |= sizes_of(tree.ngram_embed)
    lengths |= dict.fromkeys(("global_token", "global_key"), getattr(tree.encoder.blocks[0], "n_global", 0))
    if "cross_attn" in rest:
        lengths["key_pos"] = source
    return lengths


def bent(value: Tensor, n_values: int) -> Tensor:
    """Another value of the same shape; not a mere scale, which norms would not see."""
    if not value.is_floating_point():
        return (value + 1) % n_values
    return value * torch.linspace(0.5, 1.5, value.shape[-1])


@torch.no_grad()
@unchecked()
def test_every_site_is_alive(case: Case):
    """An edit of any site changes the logits. Experts to whom no token went have nothing to edit."""
    model, edited = hooked(case), set[str]()
    inputs = drawn(case, batch=2, source=12, target=8)
    dead = dead_sites(model, inputs, global_mask(case, inputs[0]), edited)
    routed = {name for name, point in model.all_points().items() if point.dims[0] == "routed"}
    shown_only = {name for name in routed if name.endswith("hook_routed_positions")}
    full = {name for name in dead if "experts" in name and of_tokens_without_room(model, inputs, name)}
    if model.tree.ngram_embed is not None:
        assert set(dead) == {name for name in model.all_points() if is_beside_the_logits(model, name)}
        return
    last = [*model.encoder][-1]  # whose global tokens nothing reads
    ends = {point.name for point in last.modules() if isinstance(point, HookPoint) and is_of_global_query(point)}
    assert set(dead) - (routed - edited) - shown_only - full - ends == set()
    assert not routed or routed & edited, "no token went to any expert"


def dead_sites(
    model: HookedEncoderDecoder, inputs: tuple[Tensor, Tensor], masks: dict[str, Tensor], edited: set[str]
) -> list[str]:
    """The sites that are edited without a change of the logits; adds to `edited` what was there.

    Where experts have room for so many tokens, a copy of the inputs would have an effect on others: there all are edited alone.
    """

    def bend(value: Tensor, hook: Any) -> Tensor:
        edited.update([hook.name] if value.numel() else [])
        return bent(value, n_values(model, hook.name))

    def ask(n: int, hooks: list[tuple[str, Any]]) -> list[Tensor]:
        given, given_masks = [x.repeat(n, 1) for x in inputs], {name: x.repeat(n, 1) for name, x in masks.items()}
        return [model.run_with_hooks(*given, **given_masks, fwd_hooks=hooks)]

    has_room = any(point.dims[0] == "routed" for point in model.all_points().values())
    return without_effect(model, ask, bend, least=1e-4, together=not has_room)


def n_values(model: HookedEncoderDecoder, site: str) -> int:
    """How many values an integer site may take."""
    return {"hook_tokens": model.cfg.d_vocab, "hook_decoder_tokens": model.cfg.d_vocab_out}.get(site, 4)


@pytest.mark.parametrize("site", ["hook_embed", "encoder.0.attn.hook_z", "decoder.1.cross_attn.hook_result"])
@torch.no_grad()
def test_a_site_whose_value_is_ignored_is_dead(site: str):
    case = next(case for case in EACH_CASE if case.family == "bart")
    model = copy.deepcopy(hooked(case))
    model.hook_dict[site].__class__ = Ignored
    assert dead_sites(model, drawn(case, batch=2, source=12, target=8), {}, set()) == [site]


def is_of_global_query(point: HookPoint) -> bool:
    """Whether it is about what PEGASUS-X's global tokens become, and not about what tokens read of them."""
    name = (point.name or "").split(".", 2)[2]
    read = ("hook_global_resid_pre", "ln1_global.hook_scale", "ln1_global.hook_normalized")
    return "global_token" in point.dims and name not in (*read, "attn.hook_k_global", "attn.hook_v_global")


def is_beside_the_logits(model: HookedEncoderDecoder, name: str) -> bool:
    """Whether a site is of a predicting stream but the first, or in the last layer's main stream after its keys and values."""
    parts, last = name.split("."), f"decoder.{len(model.decoder) - 1}."
    if "predicting" in parts:
        return parts[3] != "0"
    kept = ("hook_resid_pre", "hook_streams_pre", "hook_streams_post", "attn.hook_k", "attn.hook_v")
    inputs = ("hook_attn_in", "hook_k_input", "hook_v_input", "cross_attn.hook_k", "cross_attn.hook_v")
    return name.startswith(last) and name.removeprefix(last) not in (*kept, *inputs)


def of_tokens_without_room(model: HookedEncoderDecoder, inputs: tuple[Tensor, Tensor], name: str) -> bool:
    """Whether all tokens that an expert was given came when it was full."""
    mlp, _, rest = name.partition(".experts.")
    _, cache = model.run_with_cache(*inputs, names_filter=[f"{mlp}.hook_expert_*"])
    sent = cache[f"{mlp}.hook_expert_indices"] == int(rest.split(".")[0])
    return bool((cache[f"{mlp}.hook_expert_weights"][sent] == 0).all())


@unchecked()
def test_identities(case: Case):
    report = hooked(case).verify(*drawn(case))
    assert report.ok, str(report)


# ---- batches and generation ------------------------------------------------------------------------------------------


def with_room(case: Case) -> HookedEncoderDecoder:
    """The model, with room for all tokens in its experts: padding takes room, and so does what was read before."""
    model = hooked(case)
    if not any(isinstance(block.mlp, MoE) for block in model.blocks):
        return model
    model = copy.deepcopy(model)
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            block.mlp.cfg = replace(block.mlp.cfg, router=replace(block.mlp.cfg.router, capacity=64))
    return model


@unchecked()
def test_rows_of_patterns(case: Case):
    source, target = drawn(case)
    mask = torch.ones_like(source)
    mask[0, :3] = 0
    assert_rows_of_patterns(hooked(case), source, target, **global_mask(case, source))
    assert_rows_of_patterns(hooked(case), source, target, attention_mask=mask)


@torch.no_grad()
@unchecked()
def test_padded_rows_are_what_they_are_alone(case: Case):
    model, rows = with_room(case), [drawn(case, 1, source, target) for source, target in ((12, 4), (5, 9), (9, 6))]
    alone = [model(*row)[0] for row in rows]
    for side in ("left", "right"):
        source, mask = padded([row[0][0] for row in rows], side, PAD)
        target, target_mask = padded([row[1][0] for row in rows], side, PAD)
        together = model(source, target, attention_mask=mask, decoder_attention_mask=target_mask)
        for logits, real, row in zip(together, target_mask.bool(), alone, strict=True):
            assert_close(logits[real], row, msg=f"padded on the {side}")


@torch.no_grad()
@unchecked()
def test_padded_sources_are_those_of_transformers(case: Case):
    source, mask = padded([drawn(case, 1, length)[0][0] for length in (12, 5, 9)], "right", PAD)
    target = drawn(case)[1]
    logits = hooked(case)(source, target, attention_mask=mask)
    if case.family != "bigbird_pegasus":
        return assert_close(logits, logits_of(case, source, target, attention_mask=mask))
    for row, length in enumerate(mask.sum(1)):  # BigBirdPegasusEncoder.forward counts the blocks of padding too
        alone = logits_of(case, source[row : row + 1, :length], target[row : row + 1])
        assert_close(logits[row], alone[0])


@torch.no_grad()
@unchecked()
def test_greedy_tokens(case: Case):
    model, (source, _), other = hooked(case), drawn(case, batch=2, source=8), theirs(case)
    start = case.fields["decoder_start_token_id"]
    other.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=start)  # it does not stop before
    everything, options = torch.ones_like(source), {"do_sample": False}

    def tokens_of(model: HookedEncoderDecoder, n: int, use_cache: bool) -> Tensor:
        options: dict[str, Any] = {"max_new_tokens": n, "do_sample": False, "use_past_kv_cache": use_cache}
        return model.generate(source, stop_at_eos=False, verbose=False, **options)

    for use_cache, n in ((True, 24), (False, 8)):
        expected = other.generate(source, attention_mask=everything, use_cache=use_cache, max_new_tokens=n, **options)
        found = tokens_of(model, n, use_cache)
        assert found.shape == (2, 1 + n)
        assert torch.equal(found, expected), f"use_cache={use_cache}"
    if (with_all_read := with_room(case)) is not model:
        assert torch.equal(tokens_of(with_all_read, 24, True), tokens_of(with_all_read, 24, False))


@torch.no_grad()
@unchecked()
def test_steps_with_a_cache_are_the_full_run(case: Case):
    from hooked_lm.components.stack_context import EncoderDecoderCache

    model, (source, target) = with_room(case), drawn(case)
    cache = EncoderDecoderCache(model.cfg.n_decoder_layers)
    logits = [model(source, target[:, :3], past_kv_cache=cache)]
    logits += [model(None, target[:, i : i + 1], past_kv_cache=cache) for i in range(3, N_TARGET)]
    assert_close(torch.cat(logits, 1), model(source, target))


@pytest.mark.parametrize("name", ["t5-relu-scaled", "bart-plain", "marian-own-vocabularies", "m2m_100-scaled"])
def test_a_checkpoint_is_verified_against_transformers(name: str, tmp_path: Path):
    reference(by_name(name)).save_pretrained(tmp_path)
    report = hub.verify(tmp_path, n_tokens=8)
    assert report.ok, str(report)


def test_encoder_and_decoder_have_lengths_of_their_own():
    case = by_name("led-one-window-relu-long-target")
    model = hooked(case)
    tokens = torch.full((1, 51), PAD + 1)
    model(tokens[:, :40], tokens[:, :50])
    for inputs, room in (((tokens[:, :41], tokens[:, :2]), 40), ((tokens[:, :2], tokens), 50)):
        with pytest.raises(ValueError, match=f"more than the model's n_ctx of {room}"):
            model(*inputs)
    with pytest.raises(ValueError, match="50"):
        model.generate(tokens[:, :2], max_new_tokens=50, stop_at_eos=False, verbose=False)


def test_weights_of_grouped_heads_are_views_per_query_head():
    """Of encoder and decoder with other numbers of heads there is no view."""
    model = hooked(by_name("t5gemma-narrow-decoder"))
    assert model.cross_W_K.shape == (2, 4, 32, 8)
    assert_equal(model.cross_W_V[1, 3], model.decoder[1].cross_attn.W_V[1])
    uneven = hooked(by_name("t5gemma-one-kv-biased-uncapped-untied"))
    for name in ("W_Q", "W_K", "b_V"):
        with pytest.raises(AttributeError, match="stacked"):
            getattr(uneven, name)


def test_without_a_start_token_a_decoder_starts_as_a_text():
    """As in transformers, and as T5Gemma's configs mean it."""
    model = copy.deepcopy(reference(by_name("t5gemma-narrow-decoder")))
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.bos_token_id = None, 4
    assert pretrained.from_pretrained_no_processing("tiny", hf_model=model).cfg.decoder_start_token_id == 4


def test_special_tokens_are_known(case: Case, read: HookedEncoderDecoder):
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(read.cfg, name) == case.fields[name]


@torch.no_grad()
def test_what_a_checkpoint_says_of_generation_is_heeded(tmp_path: Path):
    """Its start token, the one that comes first, and tokens that never come; all as transformers does it."""
    case = by_name("marian-plain")
    other, (source, _) = theirs(case), drawn(case, batch=2, source=8)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    begun = torch.tensor([[7, 9]] * 2)
    free = hooked(case).generate(source, decoder_input=begun, stop_at_eos=False, verbose=False, **options)
    banned = int(free[0, 4])
    other.generation_config = GenerationConfig(
        pad_token_id=PAD,
        decoder_start_token_id=7,
        forced_bos_token_id=9,
        bad_words_ids=[[banned], [20, 21]],
        eos_token_id=2,
    )
    other.save_pretrained(tmp_path)
    model = HookedEncoderDecoder.from_pretrained(tmp_path)
    found = model.cfg.decoder_start_token_id, model.cfg.forced_bos_token_id, model.cfg.suppress_tokens
    assert found == (7, 9, (banned,))
    expected = other.generate(source, attention_mask=torch.ones_like(source), **options)
    assert torch.equal(model.generate(source, verbose=False, **options), expected)


# ---- the comparison can fail -----------------------------------------------------------------------------------------


def by_name(name: str) -> Case:
    return next(case for case in ENCODER_DECODER_CASES if str(case) == name)


def sides(change: Callable[[StackConfig], StackConfig]) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return lambda tree: replace(tree, encoder=change(tree.encoder), decoder=change(tree.decoder))


def every_block(change: Callable[[Any], Any]) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return sides(lambda side: replace(side, blocks=tuple(change(block) for block in side.blocks)))


def biases(**changes: Any) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return sides(lambda side: replace(side, rel_pos_bias=replace(side.rel_pos_bias, **changes)))


def own_biases(**changes: Any) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    def change(block: Any) -> Any:
        return replace(block, attn=replace(block.attn, position_bias=replace(block.attn.position_bias, **changes)))

    return every_block(change)


def cross(**changes: Any) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    def change(block: Any) -> Any:
        return replace(block, cross_attn=replace(block.cross_attn, **changes))

    return lambda tree: replace(
        tree, decoder=replace(tree.decoder, blocks=tuple(change(block) for block in tree.decoder.blocks))
    )


def positions(**changes: Any) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return sides(lambda side: replace(side, pos_embed=replace(side.pos_embed, **changes)))


def eps(value: float) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return every_block(lambda block: replace(block, ln2=replace(block.ln2, eps=value)))


def activation(name: str) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return every_block(lambda block: replace(block, mlp=replace(block.mlp, act_fn=name)))


def one_sided(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    return replace(
        tree, encoder=replace(tree.encoder, rel_pos_bias=replace(tree.encoder.rel_pos_bias, bidirectional=False))
    )


def causal_encoder(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    blocks = tuple(replace(block, attn=replace(block.attn, causal=True)) for block in tree.encoder.blocks)
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks))


def unembed(**changes: Any) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    return lambda tree: replace(tree, unembed=replace(tree.unembed, **changes))


def full_experts(capacity: int) -> Callable[[EncoderDecoderConfig], EncoderDecoderConfig]:
    def change(block: Any) -> Any:
        if not isinstance(block.mlp, MoE.Config):
            return block
        return replace(block, mlp=replace(block.mlp, router=replace(block.mlp.router, capacity=capacity)))

    return every_block(change)


def unscaled_embeddings(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    return replace(tree, embed=replace(tree.embed, scale=1.0))


def no_sinusoids(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    return sides(lambda side: replace(side, pos_embed=None))(tree)


def longer_windows(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    blocks = tuple(replace(b, attn=replace(b.attn, window=b.attn.window + 1)) for b in tree.encoder.blocks)
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks))


def blocks_of(tree: EncoderDecoderConfig, size: int) -> EncoderDecoderConfig:
    bias = replace(tree.encoder.rel_pos_bias, block_size=size)
    blocks = tuple(replace(b, attn=replace(b.attn, block_size=size)) for b in tree.encoder.blocks)
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks, rel_pos_bias=bias))


def wider_band(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    """A window that is as wide on both sides."""
    block = tree.encoder.blocks[0]
    wide = replace(block, attn=replace(block.attn, position_bias=Band(2, 2)))
    return replace(tree, encoder=replace(tree.encoder, blocks=(wide, *tree.encoder.blocks[1:])))


def wider_buckets(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    """A decoder of `NgramBlock`s whose last bucket begins later."""

    def wider(block: Any) -> Any:
        return replace(block, attn=replace(block.attn, buckets=replace(block.attn.buckets, max_distance=60)))

    return replace(tree, decoder=replace(tree.decoder, blocks=tuple(map(wider, tree.decoder.blocks))))


def another_token(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    return replace(tree, embed=replace(tree.embed, replaced=8))


def eps_of_tokens(tree: EncoderDecoderConfig) -> EncoderDecoderConfig:
    return replace(tree, decoder=replace(tree.decoder, ln_tokens=replace(tree.decoder.ln_tokens, eps=0.05)))


WRONG_TREES: dict[str, tuple[str, Callable[[EncoderDecoderConfig], EncoderDecoderConfig]]] = {
    "distance of the last bucket": ("t5-relu-scaled", biases(max_distance=24)),
    "one-sided buckets in the encoder": ("t5-relu-scaled", one_sided),
    "distance of the last bucket of each layer": ("umt5-gated", own_biases(max_distance=24)),
    "scores that are scaled": ("t5-relu-scaled", cross(scale=None)),
    "logits that are not scaled": ("t5-relu-scaled", unembed(scale=1.0)),
    "logits that are scaled": ("mt5-gated", unembed(scale=32**-0.5)),
    "eps": ("mt5-gated", eps(1e-6)),
    "activation": ("t5-gated-silu-few-layers", activation("gelu")),
    "causal encoder": ("bart-plain", causal_encoder),
    "scale of cross attention": ("bart-plain", cross(scale=1.0)),
    "missing embedding scale": ("bart-scaled-relu", unscaled_embeddings),
    "offset of sinusoids": ("m2m_100-scaled", positions(offset=0)),
    "no positions": ("marian-scaled-swish", no_sinusoids),
    "windows of T5Gemma's encoder": ("t5gemma-all-local-or-none-llama3", longer_windows),
    "cap of T5Gemma's cross attention": ("t5gemma-narrow-decoder", cross(soft_cap=None)),
    "scale of T5Gemma's cross attention": ("t5gemma-narrow-decoder", cross(scale=None)),
    "windows of T5Gemma 2's encoder": ("t5gemma2-even-windows", wider_band),
    "the token with a vector of its own": ("t5gemma2-even-windows", another_token),
    "distance of the last bucket of streams": ("prophetnet-two-streams", wider_buckets),
    "windows of LED": ("led-one-window-relu-long-target", longer_windows),
    "windows of the encoder": ("longt5-relu-scaled", longer_windows),
    "tokens in a block": ("longt5-global", lambda tree: blocks_of(tree, 4)),
    "eps of the norm of tokens": ("blenderbot-small-plain", eps_of_tokens),
    "room in the experts": ("switch_transformers-some-layers", full_experts(64)),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str):
    name, alter = WRONG_TREES[wrong]
    case = by_name(name)
    right, inputs = hooked(case), drawn(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(*inputs), logits_of(case, *inputs)) > 1e-3


def swap_queries_and_keys(model: HookedEncoderDecoder) -> None:
    attn = model.decoder[0].cross_attn
    attn.W_Q, attn.W_K = attn.W_K, attn.W_Q


def swap_sides_of_a_norm(model: HookedEncoderDecoder) -> None:
    block = model.decoder[0]
    block.ln2, block.ln3 = block.ln3, block.ln2


def permute_heads(model: HookedEncoderDecoder) -> None:
    model.decoder[0].cross_attn.W_V.copy_(model.decoder[0].cross_attn.W_V.flip(0))


def negate(model: HookedEncoderDecoder) -> None:
    model.encoder[1].attn.W_O.neg_()


def swap_gate_and_linear(model: HookedEncoderDecoder) -> None:
    mlp = model.decoder[0].mlp
    mlp.W_gate, mlp.W_in = mlp.W_in, mlp.W_gate


def shift_positions(model: HookedEncoderDecoder) -> None:
    model.decoder_pos_embed.W_pos.copy_(model.decoder_pos_embed.W_pos.roll(1, 0))


def shift_buckets(model: HookedEncoderDecoder) -> None:
    model.decoder_rel_pos_bias.W_rel.copy_(model.decoder_rel_pos_bias.W_rel.roll(1, 0))


def no_logits_bias(model: HookedEncoderDecoder) -> None:
    model.unembed.b_U.zero_()


def swap_streams(model: HookedEncoderDecoder) -> None:
    model.ngram_embed.W_ngram.copy_(model.ngram_embed.W_ngram.flip(0))


def shift_bucket_bias(model: HookedEncoderDecoder) -> None:
    model.decoder[0].attn.W_rel.copy_(model.decoder[0].attn.W_rel.roll(1, 2))


def permute_experts(model: HookedEncoderDecoder) -> None:
    mlp = next(block.mlp for block in model.decoder if isinstance(block.mlp, MoE))
    mlp.experts = nn.ModuleList([*mlp.experts[1:], mlp.experts[0]])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("t5-relu-scaled", swap_queries_and_keys),
        ("t5-relu-scaled", swap_sides_of_a_norm),
        ("t5-relu-scaled", shift_buckets),
        ("mt5-gated", swap_gate_and_linear),
        ("umt5-gated", negate),
        ("bart-plain", swap_queries_and_keys),
        ("bart-plain", shift_positions),
        ("mbart-plain", no_logits_bias),
        ("pegasus-plain", shift_positions),
        ("marian-plain", permute_heads),
        ("blenderbot-plain", swap_sides_of_a_norm),
        ("m2m_100-scaled", permute_heads),
        ("switch_transformers-some-layers", permute_experts),
        ("prophetnet-two-streams", swap_streams),
        ("prophetnet-two-streams", shift_bucket_bias),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, damage: Callable[[HookedEncoderDecoder], None]):
    case = by_name(name)
    model, inputs = copy.deepcopy(hooked(case)), drawn(case)
    damage(model)
    assert distance(model(*inputs), logits_of(case, *inputs)) > 1e-3


# ---- checkpoints that are not as they are written today --------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5-gated-unscaled", "mt5-gated", "umt5-gated"])
@torch.no_grad()
def test_an_unembedding_of_its_own(name: str, tmp_path: Path):
    """T5 1.1, mT5 and umT5 have one, though their configs cannot say so any more."""
    case = by_name(name)
    own = theirs(case)
    own.lm_head.weight = nn.Parameter(torch.randn_like(own.lm_head.weight))
    own.config.save_pretrained(tmp_path)
    tensors = {n: t.clone() for n, t in own.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = HookedEncoderDecoder.from_pretrained(tmp_path)
    inputs = drawn(case)
    expected = own(inputs[0], decoder_input_ids=inputs[1]).logits
    assert_close(model(*inputs), expected)
    assert not model.cfg.tie_word_embeddings
    back = model.to_hf()
    assert torch.equal(back.lm_head.weight, own.lm_head.weight)
    back.set_attn_implementation("eager")
    assert torch.equal(back(inputs[0], decoder_input_ids=inputs[1]).logits, expected)


@pytest.mark.parametrize("name", ["bart-plain", "pegasus-plain", "marian-plain", "m2m_100-scaled", "t5-relu-scaled"])
@torch.no_grad()
def test_files_may_hold_more_and_less(name: str, tmp_path: Path):
    """One embedding once for each side, tables of sines; and no bias on the logits where it is zero."""
    case = by_name(name)
    other = theirs(case)
    if hasattr(other, "final_logits_bias"):
        other.final_logits_bias.zero_()
    tensors = {n: t.clone() for n, t in other.state_dict().items() if n != "final_logits_bias"}
    other.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    model, inputs = HookedEncoderDecoder.from_pretrained(tmp_path), drawn(case)
    expected = other(inputs[0], decoder_input_ids=inputs[1]).logits
    assert_close(model(*inputs), expected)


OLD_NOTES: dict[str, dict[str, Any]] = {
    "t5": {"n_positions": 512, "output_past": True, "task_specific_params": {"translation": {"num_beams": 4}}},
    "mt5": {"tokenizer_class": "T5Tokenizer", "output_past": True, "tie_word_embeddings": False},
    "umt5": {"scalable_attention": True, "output_past": True, "tie_word_embeddings": False},
    "switch_transformers": {"router_type": "tokens_masked", "num_selected_experts": 1, "n_positions": 512},
    "bart": {
        "replacing_rate": 0,
        "force_bos_token_to_be_generated": True,
        "num_beams": 4,
        "prefix": " ",
        "num_hidden_layers": 12,
    },
    "mbart": {"static_position_embeddings": False, "normalize_before": True, "max_length": 200, "output_past": True},
    "pegasus": {"add_final_layer_norm": True, "length_penalty": 0.6, "static_position_embeddings": True},
    "marian": {"extra_pos_embeddings": 58101, "bad_words_ids": [[58100]], "add_bias_logits": False, "num_beams": 6},
    "blenderbot": {"layernorm_variant": "prelayernorm", "do_blenderbot_90_layernorm": True, "min_length": 20},
    "m2m_100": {"early_stopping": True, "max_length": 200, "gradient_checkpointing": False},
}


@pytest.mark.parametrize("family", OLD_NOTES)
def test_notes_of_old_configs_are_no_obstacle(family: str):
    from transformers import CONFIG_MAPPING

    from hooked_lm.families import family as module_of
    from hooked_lm.hub.hf_checkpoint import read_config

    config = CONFIG_MAPPING[family].from_dict({**CONFIG_MAPPING[family]().to_dict(), **OLD_NOTES[family]})
    tree = read_config(module_of(family), config)
    assert tree == read_config(module_of(family), CONFIG_MAPPING[family]())


@torch.no_grad()
def test_a_pegasus_file_without_its_sines(tmp_path: Path):
    case = by_name("pegasus-plain")
    import transformers

    other = transformers.PegasusForConditionalGeneration(theirs(case).config).eval()
    other.load_state_dict(
        {n: t for n, t in reference(case).state_dict().items() if "embed_positions" not in n}, strict=False
    )
    tensors = {n: t.clone() for n, t in other.state_dict().items() if "embed_positions" not in n}
    other.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    model, inputs = HookedEncoderDecoder.from_pretrained(tmp_path), drawn(case)
    assert_close(model(*inputs), other(inputs[0], decoder_input_ids=inputs[1]).logits)
    assert not any("W_pos" in name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_every_layer_has_its_bias_or_shares_one():
    """umT5's layers have their own; elsewhere the stack makes one. What only hides keys has no weights."""
    for case in ENCODER_DECODER_CASES:
        biases = [block.attn.position_bias for block in hooked(case).cfg.tree.blocks]
        kinds = {type(bias) for bias in biases if not isinstance(bias, Sparsity)}
        expected = {"umt5": RelativeBias.Config, "t5": SharedBias, "mt5": SharedBias}
        expected |= {"switch_transformers": SharedBias, "longt5": SharedBias}
        assert kinds == {expected.get(case.family, type(None))}


def test_nothing_crosses_between_host_and_device(case: Case):
    assert_nothing_crosses(hooked(case), case.n_prompt)
