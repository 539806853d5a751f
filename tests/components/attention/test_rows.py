"""Scores and patterns of some queries: what hooks get is what they would get of all, and nothing else is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import at
from hooked_lm.components.attention import steps
from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.masks import Masks
from hooked_lm.components.stack_context import EncodedSource, SourceContext
from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.engine.context import RowContext
from hooked_lm.hooks import HookPoint, columns
from hooked_lm.interventions import MeanAblate, Noise, Patch, Record, RecordGradient
from tests.close import GRADIENT, assert_apart, assert_close
from tests.core import CORE_KINDS, thinned
from tests.families import ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.models.toys import KINDS, ids, padded, toy
from tests.unchecked import unchecked

TOKENS = ids(batch=2, n_pos=10)
FUSED = [kind for kind in KINDS if kind not in ("parallel", "sinks")]  # the others have a soft cap, or sinks
PATTERNS = "blocks.*.attn.hook_pattern"
CPU = torch.device("cpu")


class Whole(Record):
    """A record that gets all of a pattern: its `see` is its own."""

    def see(self, value: object, hook: HookPoint) -> None:
        assert hook.columns is None
        super().see(value, hook)


@pytest.fixture
def rows_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call that computes scores."""
    seen: list[int] = []

    def counted(q: Tensor, *args: Any) -> Tensor:
        seen.append(q.shape[1])
        return mix(q, *args)

    mix = steps.mix_masked
    monkeypatch.setattr(steps, "mix_masked", counted)
    return seen


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", thinned(FUSED, [kind for kind in CORE_KINDS if kind in FUSED]))
def test_reading_rows_computes_these_alone_and_changes_no_bit(kind: str, rows_computed: list[int]) -> None:
    model = toy(kind)
    _, whole = model.run_with_cache(TOKENS, names_filter=PATTERNS)
    plain = model(TOKENS)
    rows_computed.clear()
    logits, cache = model.run_with_cache(TOKENS, names_filter=PATTERNS, pos_slice=[-1, 4, 4])
    assert rows_computed == [2] * 3
    assert torch.equal(logits, plain)
    for name, pattern in whole.items():
        assert_close(cache[name], pattern[:, :, [-1, 4, 4]])
        assert_apart(cache[name][:, :, 1], pattern[:, :, 5])


def test_rows_of_padded_prompts_are_those_of_the_prompts_alone() -> None:
    model = toy("rotary")
    tokens, mask = padded(list(TOKENS[0].split([6, 4])), "left")
    _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=PATTERNS, pos_slice=-1)
    for row, real in enumerate(mask.bool()):
        _, alone = model.run_with_cache(tokens[row, real][None], names_filter=PATTERNS)
        for name in alone:
            assert_close(cache[name][row][..., real], alone[name][0, :, -1:])
            assert not cache[name][row][..., ~real].any()


def test_a_function_gets_all_rows(rows_computed: list[int]) -> None:
    shapes = []
    site = "blocks.1.attn.hook_pattern"
    hooks = [(site, lambda pattern, hook: shapes.append(pattern.shape)), Record(site, positions=-1)]
    toy().run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert shapes == [(2, 4, 10, 10)]
    assert rows_computed == [10]


def test_several_hooks_share_the_rows_of_all(rows_computed: list[int]) -> None:
    model = toy()
    last, some = Record("pattern", 1, positions=-1), Record("attn_scores", 1, positions=[2, 3], heads=1)
    off = Record("pattern", 1, positions=5)
    off.disable()
    model.run_with_hooks(TOKENS, fwd_hooks=[last, some, off])
    assert rows_computed == [3]
    _, whole = model.run_with_cache(TOKENS)
    assert_close(last.stacked()[0], whole["pattern", 1][:, :, -1:])
    assert_close(some.stacked()[0], whole["attn_scores", 1][:, [1]][:, :, [2, 3]])


@torch.no_grad()
@unchecked()
def test_a_hook_at_the_bias_of_a_layer_sees_that_of_all_queries(rows_computed: list[int]) -> None:
    """In UMT5 each layer has one; with hooks there, it is computed once."""
    model = hooked(next(case for case in ENCODER_DECODER_CASES if case.family == "umt5"))
    layer, shapes = "encoder.1.attn", []
    hooks = [(f"{layer}.position_bias.hook_bias", lambda bias, hook: shapes.append(bias.shape[-2:]))]
    hooks.append((f"{layer}.hook_pattern", Record(f"{layer}.hook_pattern", positions=-1)))
    model.run_with_hooks(TOKENS, TOKENS, fwd_hooks=hooks)
    assert (shapes, rows_computed) == ([(10, 10)], [10])
    model.run_with_hooks(TOKENS, TOKENS, fwd_hooks=hooks[1:])
    assert rows_computed == [10, 1]


# ---- changing --------------------------------------------------------------------------------------------------------


def explicit(hook: Any) -> tuple[str, Callable[[Tensor, HookPoint], Tensor | None]]:
    """The same change as a function, for which all rows are computed."""
    return f"blocks.1.attn.hook_{hook.hook_point}", lambda value, hook_point: hook(value, hook_point)


@pytest.mark.parametrize("kind", thinned(KINDS, CORE_KINDS))
def test_changing_rows_is_what_it_is_with_all_rows(kind: str, rows_computed: list[int]) -> None:
    model = toy(kind)
    _, other = model.run_with_cache(ids(batch=2, n_pos=10, seed=5))
    of_each = torch.tensor([0.1, 0.2])[:, None].expand(2, 10)
    hooks = [
        at("pattern", 1, positions=[7, 4], heads=2).zero(),
        at("pattern", 1, positions=[7, 4]).set(of_each),
        at("attn_scores", 1, positions=slice(-2, None), rows=1).scale(0.5),
        Patch("pattern", 1, source=other, positions=[3, -1]),
        Noise("attn_scores", 1, std=1.0, positions=-1),
        MeanAblate("pattern", 1, positions=-1, over="batch"),
    ]
    plain = model(TOKENS)
    for hook in hooks:
        rows_computed.clear()
        changed = model.run_with_hooks(TOKENS, fwd_hooks=[hook])
        assert 10 not in rows_computed or kind in ("parallel", "sinks"), hook
        assert_close(changed, model.run_with_hooks(TOKENS, fwd_hooks=[explicit(hook)]), msg=repr(hook))
        assert_apart(changed, plain, msg=repr(hook))


def test_a_mean_over_positions_needs_all_rows(rows_computed: list[int]) -> None:
    hook = MeanAblate("pattern", 1, positions=-1, over="pos")
    model = toy()
    found = model.run_with_hooks(TOKENS, fwd_hooks=[hook])
    assert rows_computed == [10]
    assert_close(found, model.run_with_hooks(TOKENS, fwd_hooks=[explicit(hook)]))


def test_gradients_pass_through_changed_rows() -> None:
    model, hook = toy("rotary").requires_grad_(True), at("pattern", 1, positions=[4, -1]).scale(0.3)
    found = []
    for each in (hook, explicit(hook)):
        model.run_with_hooks(TOKENS, fwd_hooks=[each], return_type="loss").backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for own, expected in zip(*found, strict=True):
        assert_close(own, expected, GRADIENT)


@pytest.mark.parametrize("uses_cache", [True, False])
@pytest.mark.parametrize("positions", [-1, [2, 9], "generated", slice(-2, None), "last_prompt", "prompt"])
def test_rows_in_generation(uses_cache: bool, positions: Any) -> None:
    model = toy()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    options |= {"use_past_kv_cache": uses_cache, "return_type": "tokens"}
    edit = at("pattern", 1, positions=positions).set(3.0)
    records = Record("pattern", 1, positions=positions), Whole("pattern", 1, positions=positions)
    found = []
    for hook in (edit, explicit(edit), *records):
        with model.hooks([hook]):
            found.append(model.generate(TOKENS, **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])
    own, whole = (record.values["blocks.1.attn.hook_pattern"] for record in records)
    assert len(own) == len(whole) > 0
    for each, expected in zip(own, whole, strict=True):
        assert_close(each, expected)


def test_rows_of_prompts_of_different_lengths_in_generation() -> None:
    model = toy()
    tokens, mask = padded(list(TOKENS[0].split([6, 4])), "left")
    records = Record("pattern", 1, positions=-1), Whole("pattern", 1, positions=-1)
    options: dict[str, Any] = {"stop_at_eos": False, "use_past_kv_cache": False}
    for record in records:
        with model.hooks([record]):
            model.generate(tokens, 3, attention_mask=mask, do_sample=False, verbose=False, **options)
    own, whole = (record.values["blocks.1.attn.hook_pattern"] for record in records)
    for each, expected in zip(own, whole, strict=True):
        assert_close(each, expected)


# ---- contexts and blocks ---------------------------------------------------------------------------------------------


def with_images() -> ImageContext:
    context = ImageContext(8, CPU)
    context.groups = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    return context


def after_cached() -> Context:
    cache = KeyValueCache(1)
    cache[0].append(torch.zeros(2, 5, 1, 1), torch.zeros(2, 5, 1, 1))
    return Context(8, CPU, torch.arange(13).expand(2, -1) > torch.tensor([[0], [3]]), cache)


def with_numbers() -> Masks:
    return Context(8, CPU).adding(torch.randn(1, 2, 8, 8)).adding(torch.randn(1, 1, 1, 8))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Context(8, CPU),
    "after cached tokens, padded": after_cached,
    "with images": with_images,
    "of a source": lambda: SourceContext(8, EncodedSource(torch.zeros(1, 9, 1), torch.arange(9)[None] > 2)),
    "of a sweep": lambda: RowContext(with_images(), (1, 8), 1),
    "with numbers": with_numbers,
}


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", CONTEXTS)
def test_masks_of_some_queries_are_rows_of_the_whole_masks(name: str) -> None:
    context, rows = CONTEXTS[name](), torch.tensor([6, 0, 3])
    for causal, window in ((True, None), (True, 2), (False, None), (False, 3)):
        whole = context.additive_mask(causal, window, torch.float32)
        some, again = context.of_queries(rows), context.of_queries(torch.arange(7)).of_queries(rows)
        for each in (some, again):
            mask = each.additive_mask(causal, window, torch.float32)
            assert torch.equal(mask, whole if whole.shape[2] == 1 else whole[:, :, rows])
        assert torch.equal(context.additive_mask(causal, window, torch.float32), whole)


@pytest.mark.parametrize("kind", ["parallel", "sinks"])
def test_long_texts_are_mixed_in_blocks_where_there_is_no_fused_kernel(
    kind: str, rows_computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(kind).requires_grad_(True)

    def run() -> tuple[Tensor, list[Tensor]]:
        logits = model(TOKENS)
        logits.logsumexp(-1).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return logits.detach(), gradients

    expected, gradients = run()
    assert rows_computed == [10] * 3
    rows_computed.clear()
    monkeypatch.setattr(columns, "MOST_NUMBERS", 2 * 4 * 10 * 4)  # of prompts, heads, keys, queries
    logits, others = run()
    assert rows_computed == [4, 4, 2] * 3
    assert_close(logits, expected)
    for own, whole in zip(others, gradients, strict=True):
        assert_close(own, whole, GRADIENT)
    rows_computed.clear()
    _, cache = model.run_with_cache(TOKENS, names_filter=PATTERNS, pos_slice=-1)
    assert rows_computed == [4, 4, 2, 1] * 3
    monkeypatch.undo()
    _, whole_cache = model.run_with_cache(TOKENS, names_filter=PATTERNS)
    for name in cache:
        assert_close(cache[name], whole_cache[name][:, :, -1:])


def test_gradients_of_rows_are_rows_of_the_gradient(rows_computed: list[int]) -> None:
    model = toy().requires_grad_(True)
    loss = {"return_type": "loss", "incl_bwd": True, "names_filter": PATTERNS}
    _, whole = model.run_with_cache(TOKENS, **loss)
    rows_computed.clear()
    own = RecordGradient("pattern", 1, positions=[-2, 3])
    _, some = model.run_with_cache(TOKENS, pos_slice=[3, -2], **loss)
    with model.hooks(bwd_hooks=[own]):
        model(TOKENS, return_type="loss").backward()
    assert {*rows_computed} == {2}
    for layer in range(3):
        name = f"blocks.{layer}.attn.hook_pattern_grad"
        assert whole[name].abs().max() > 0
        assert_close(some[name], whole[name][:, :, [3, -2]], GRADIENT)
    assert_close(own.stacked()[0], whole["blocks.1.attn.hook_pattern_grad"][:, :, [-2, 3]], GRADIENT)
