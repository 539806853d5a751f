"""What is particular to tokens of global attention: chosen by the caller (Longformer, LED), or learned (PEGASUS-X)."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hooked_lm import patching
from hooked_lm.components.attention.position_bias import Chunks
from hooked_lm.components.stack_context import EncoderDecoderCache
from tests.close import assert_close
from tests.families import CASES, Case, reference
from tests.families._models import distance, hooked, with_tree

BY_NAME = {str(case): case for case in CASES if case.family in ("bert", "led", "longformer", "pegasus_x")}
MASKED, TEXTS = BY_NAME["longformer-masked-windows"], BY_NAME["longformer-texts"]
LED, STAGGERED = BY_NAME["led-windows"], BY_NAME["pegasus_x-staggered"]
SITE = "global_tokens.hook_mask"


def drawn(n_pos: int = 23, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(4, 61, (batch, n_pos), generator=torch.Generator().manual_seed(seed))


def chosen(tokens: Tensor) -> Tensor:
    """Other tokens in each row, none in one."""
    mask = (torch.rand(tokens.shape, generator=torch.Generator().manual_seed(9)) < 0.2).long()
    mask[1] = 0
    return mask


def right_padding(tokens: Tensor) -> Tensor:
    real = torch.ones_like(tokens)
    real[0, 17:] = real[1, 5:] = 0
    return real


@pytest.mark.parametrize("case", [MASKED, LED], ids=str)
@torch.no_grad()
def test_texts_longer_than_the_windows_with_padding(case: Case):
    tokens, target = drawn(), drawn(6, seed=1)
    real, mask = right_padding(tokens), chosen(tokens)
    tokens = tokens.where(real.bool(), torch.tensor(1))
    given: dict[str, Any] = {"attention_mask": real, "global_attention_mask": mask}
    inputs = (tokens, target) if case is LED else (tokens,)
    expected = reference(case)(tokens, **given, **({"decoder_input_ids": target} if case is LED else {})).logits
    found, without = hooked(case)(*inputs, **given), hooked(case)(*inputs, attention_mask=real)
    is_real = real.bool() if case is MASKED else slice(None)
    assert_close(found[is_real], expected[is_real])
    assert distance(found[0, :5], without[0, :5]) > 1e-2
    alone = tuple(x[:1, :17] if x is tokens else x[:1] for x in inputs)
    moved = tuple(torch.cat([x[:1, 17:], x[:1, :17]], 1) if x is tokens else x[:1] for x in inputs)
    masks = {name: torch.cat([x[:1, 17:] * 0, x[:1, :17]], 1) for name, x in given.items()}
    together = hooked(case)(*moved, **masks)
    assert_close(together if case is LED else together[:, 6:], hooked(case)(*alone, global_attention_mask=mask[0, :17]))


@torch.no_grad()
def test_steps_are_the_fused_kernel():
    """With a listener in every row, and in low precision no further from the truth than transformers."""
    tokens, model = drawn(), hooked(MASKED)
    mask = chosen(tokens)
    out, cache = model.run_with_cache(tokens, global_attention_mask=mask)
    assert_close(out, model(tokens, global_attention_mask=mask))
    own = mask.bool()
    seen = cache["pattern", 0] > 0
    assert seen[own[:, None, :].expand(-1, 4, -1)].all(), "global tokens see all"
    assert seen.transpose(2, 3)[own[:, None, :].expand(-1, 4, -1)].all(), "all see global tokens"
    assert not seen[1, :, 0, 4:].any(), "without them a window is a window"
    truth = copy.deepcopy(reference(MASKED)).double()(tokens, global_attention_mask=mask).logits
    rough = copy.deepcopy(reference(MASKED)).bfloat16()(tokens, global_attention_mask=mask).logits
    low = copy.deepcopy(model).to(torch.bfloat16)(tokens, global_attention_mask=mask)
    assert (low - truth).square().mean() <= 1.4 * (rough - truth).square().mean()


@torch.no_grad()
def test_a_classifier_has_its_first_token_unless_the_caller_says_otherwise():
    tokens = drawn()
    for given in ({}, {"global_attention_mask": chosen(tokens)}):
        assert_close(hooked(TEXTS)(tokens, **given), reference(TEXTS)(tokens, **given).logits)
    assert distance(hooked(TEXTS)(tokens), hooked(TEXTS)(tokens, global_attention_mask=chosen(tokens))) > 1e-3


@torch.no_grad()
def test_a_question_is_global_where_answers_are_looked_for():
    case = Case("longformer", "spans", dict(MASKED.fields), auto="AutoModelForQuestionAnswering")
    tokens = drawn()
    tokens[0, [3, 4, 22]] = tokens[1, [6, 7, 20]] = tokens[2, [1, 9, 11]] = reference(case).config.sep_token_id
    found = reference(case)(tokens)
    assert_close(hooked(case)(tokens), torch.stack([found.start_logits, found.end_logits], -1))
    assert hooked(case).verify().ok
    with pytest.raises(ValueError, match=r"three separators \(token 2\), but the texts have \[3, 2, 3\]"):
        hooked(case)(tokens.index_fill(1, torch.tensor([20]), 5))


@torch.no_grad()
def test_generation_with_global_tokens():
    tokens, other = drawn(batch=2), copy.deepcopy(reference(LED))
    mask = torch.zeros_like(tokens)
    mask[:, 0] = 1
    other.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=2)
    options: dict[str, Any] = {"global_attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    expected = other.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    for use_cache in (True, False):
        found = hooked(LED).generate(
            tokens, stop_at_eos=False, verbose=False, use_past_kv_cache=use_cache, return_type="tokens", **options
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("case", [MASKED, LED], ids=str)
@pytest.mark.filterwarnings("ignore:.*whole forward pass")
@torch.no_grad()
def test_a_hook_chooses_them_in_any_run_and_in_sweeps(case: Case):
    """Each cell of a sweep is the run with the argument and a hook by hand."""
    model, (clean, corrupted) = hooked(case), (drawn(batch=2), drawn(batch=2, seed=3))
    mask = chosen(drawn())[:2]
    target = (drawn(4, 2, seed=1),) if case is LED else ()

    def choose(value: Tensor, hook: Any) -> Tensor:
        return mask

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 7]

    site, short = (
        ("encoder.1.hook_resid_pre", "encoder.resid_pre") if case is LED else ("blocks.1.hook_resid_pre", "resid_pre")
    )
    given: dict[str, Any] = {"global_attention_mask": mask}
    options = {"decoder_input": target[0]} if case is LED else {}
    with model.hooks(fwd_hooks=[(SITE, choose)]):
        assert_close(model(clean, *target), model(clean, *target, **given))
        result = patching.sweep(
            model, corrupted, clean, metric=metric, sites=short, layers=[1], positions=[0, 9], progress=False, **options
        )
    _, cache = model.run_with_cache(clean, *target, names_filter=site, **given)
    for i, position in enumerate((0, 9)):

        def patch(value: Tensor, hook: Any, position: int = position) -> Tensor:
            value[:, position] = cache[site][:, position]
            return value

        by_hand = model.run_with_hooks(corrupted, *target, fwd_hooks=[(site, patch)], **given)
        assert_close(result.values[0, i], metric(by_hand))


def test_masks_that_do_not_fit_are_refused():
    tokens = drawn()
    with pytest.raises(ValueError, match="this model has no tokens of global attention"):
        hooked(BY_NAME["bert-masked"])(tokens % 30, global_attention_mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match=r"global_attention_mask is \(1, 5\); expected \(3, 23\)"):
        hooked(MASKED)(tokens, global_attention_mask=chosen(tokens)[0, :5])
    cache = EncoderDecoderCache(hooked(LED).cfg.n_decoder_layers)
    hooked(LED)(tokens, tokens[:, :2], past_kv_cache=cache)
    with pytest.raises(ValueError, match="the encoder's output: give global_attention_mask=None"):
        hooked(LED)(None, tokens[:, :1], past_kv_cache=cache, global_attention_mask=chosen(tokens))
    attn = hooked(MASKED).tree.blocks[0].attn
    with pytest.raises(ValueError, match=r"attention with global tokens does not support soft_cap=2\.0"):
        replace(attn, soft_cap=2.0)
    with pytest.raises(ValueError, match="block_size=5: expected a global token or more, and blocks that have halves"):
        hooked(replace(STAGGERED, name="odd", fields={**STAGGERED.fields, "block_size": 5}))


# ---- the comparison with transformers can fail -----------------------------------------------------------------------


def swap_keys(model: Any) -> None:
    for attn in (block.attn for block in model.blocks):
        attn.W_K_global, attn.W_V_global = attn.W_V_global, attn.W_K_global


def swap_norms(model: Any) -> None:
    for block in model.encoder:
        block.ln1, block.ln1_global = block.ln1_global, block.ln1


def turn_global(model: Any) -> None:
    model.encoder[0].W_global.neg_()


def chunks(size: int, offset: int) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        encoder = model.cfg.tree.encoder
        blocks = [
            replace(block, attn=replace(block.attn, position_bias=Chunks(size, offset * (layer % 2))))
            for layer, block in enumerate(encoder.blocks)
        ]
        return with_tree(model, replace(model.cfg.tree, encoder=replace(encoder, blocks=tuple(blocks))))

    return changed


WRONG: dict[str, tuple[Case, Callable[[Any], Any]]] = {
    "other weights of global tokens": (MASKED, swap_keys),
    "one norm for the other": (STAGGERED, swap_norms),
    "other global tokens": (STAGGERED, turn_global),
    "blocks that are not staggered": (STAGGERED, chunks(4, 0)),
    "blocks that are shifted by more": (STAGGERED, chunks(4, 3)),
    "larger blocks": (STAGGERED, chunks(6, 3)),
}


@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_what_is_wrong_is_noticed(wrong: str):
    case, damage = WRONG[wrong]
    tokens, model = drawn(), copy.deepcopy(hooked(case))
    given = {"global_attention_mask": chosen(tokens)} if case is MASKED else {"decoder_input_ids": tokens}
    expected = reference(case)(tokens, **given).logits
    inputs = (tokens, tokens) if case is STAGGERED else (tokens,)
    masks = given if case is MASKED else {}
    assert_close(model(*inputs, **masks), expected)
    model = damage(model) or model
    assert distance(model(*inputs, **masks), expected) > 1e-3


@torch.no_grad()
def test_each_block_alone_is_the_whole_with_a_mask():
    """The two paths of attention within blocks, for texts that end in the middle of a block; the second also of padded rows."""
    model, target = hooked(STAGGERED), drawn(3, seed=1)
    for n_pos in (5, 8, 13, 26):
        tokens = drawn(n_pos)
        together = model(tokens, target)
        unfused = copy.deepcopy(model)
        unfused.cfg.fused_attention = "never"
        assert_close(unfused(tokens, target), together)
        padded = torch.cat([tokens, tokens[:, :3]], 1)
        real = torch.cat([torch.ones_like(tokens), torch.zeros_like(tokens[:, :3])], 1)
        assert_close(model(padded, target, attention_mask=real), together)
