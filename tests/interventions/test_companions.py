"""What an object needs beside itself comes along with it; where a patch of the stream acts; sites that hold no activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import wrap
from hooked_lm.interventions import (
    AddDirection,
    Clamp,
    MeanAblate,
    Noise,
    Patch,
    PatchResidual,
    ProjectOut,
    Record,
    ResampleAblate,
    Scale,
    SetValue,
    Statistics,
    TopExamples,
    ZeroAblate,
)
from hooked_lm.interventions.base import HookObject
from tests.close import assert_close
from tests.interventions.tables import KINDS
from tests.models.toys import ids, toy

SITE = "blocks.1.hook_resid_post"
SPARE: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_come_along(kind: str) -> None:
    make, inputs, site = KINDS[kind]
    model, source = make(), "hook_decoder_tokens" if kind == "encoder-decoder" else "hook_tokens"
    top, seen = (of(site, tokens=source) for of in (TopExamples, Statistics))
    if kind == "module":
        top.batch(ids(3, 6))
    plain = model(*inputs)
    assert torch.equal(model.run_with_hooks(*inputs, fwd_hooks=[top, seen]), plain)
    assert seen[site].count == 3 * 6
    read = ids(3, 6) if kind == "module" else inputs[-1]
    found = top.examples()
    middle = found.tokens[..., found.tokens.shape[-1] // 2]
    real = found.texts >= 0
    assert torch.equal(middle[real], read[found.texts[real], found.positions[real]])
    assert not any(point.is_listening for point in model.hook_points())


@torch.no_grad()
def test_they_come_once_however_hooks_are_given() -> None:
    model, tokens = toy("rotary"), ids(2, 5)

    def n_texts(run: Callable[[TopExamples], Any]) -> int:
        top = TopExamples(SITE)
        run(top)
        assert top.examples().texts.max() == 1
        return top.inputs.n_texts

    def registered(top: TopExamples) -> None:
        numbers = [model.register(top)]
        model(tokens)
        for number in numbers:
            model.unregister(number)

    def nested(top: TopExamples) -> None:
        with model.hooks([top.inputs]):
            model.run_with_hooks(tokens, fwd_hooks=[top])

    runs: list[Callable[[TopExamples], Any]] = [
        lambda top: model.run_with_hooks(tokens, fwd_hooks=[top]),
        lambda top: model.run_with_hooks(tokens, fwd_hooks=[top.inputs, top]),
        lambda top: model.run_with_hooks(tokens, fwd_hooks=[(SITE, top)]),
        registered,
        nested,
    ]
    assert [n_texts(run) for run in runs] == [2] * len(runs)
    assert not any(point.is_listening for point in model.hook_points())
    assert not model.registered()


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_generation_counts_each_token_once(cached: bool) -> None:
    model, prompt = toy("rotary"), ids(2, 4)
    seen, pattern, top = Statistics(SITE), Statistics("pattern", 1, n_axes=0), TopExamples(SITE, k=9)
    with model.hooks([seen, pattern, top]):
        model.generate(prompt, 4, use_past_kv_cache=cached, **SPARE)
    assert seen[SITE].count == 2 * 7
    assert pattern["blocks.1.attn.hook_pattern"].count == 2 * 4 * (4 * 4 + 5 + 6 + 7)
    assert int(top.examples().texts.max()) == 1


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_generations_that_take_turns_keep_their_tokens_apart(cached: bool) -> None:
    model, prompts, top = toy("rotary"), ids(2, 4), TopExamples(SITE, k=14)
    options = {"max_tokens_per_yield": 1, "return_type": "tokens", "use_past_kv_cache": cached, **SPARE}
    streams = [model.generate_stream(prompt[None], 4, **options) for prompt in prompts]
    with model.hooks([top]):
        pieces = [torch.cat(stream, 1) for stream in zip(*zip(*streams, strict=True), strict=True)]
    read = [tokens[0, :7] for tokens in pieces]  # the last token was never read
    found = top.examples()
    assert found.texts.sort(-1).values.eq(torch.tensor([0] * 7 + [1] * 7)).all()
    for text, position, tokens in zip(found.texts[0], found.positions[0], found.tokens[0], strict=True):
        assert tokens[10] == read[text][position]


@torch.no_grad()
def test_tokens_of_an_earlier_run_are_not_taken_for_those_of_this_one() -> None:
    model, tokens, top = toy("rotary"), ids(2, 5), TopExamples(SITE)
    model.run_with_hooks(tokens, fwd_hooks=[top])
    resid = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"the token ids of this call are not known .*, only those of an earlier one"):
        model.run_with_hooks(resid, fwd_hooks=[top], start_at_layer=1)
    top.batch(tokens)
    model.run_with_hooks(resid, fwd_hooks=[top], start_at_layer=1)
    assert top.inputs.n_texts == 4


@torch.no_grad()
def test_switched_off_they_count_no_texts() -> None:
    model, tokens, top = toy("rotary"), ids(2, 5), TopExamples(SITE)
    with top.disabled():
        model.run_with_hooks(tokens, fwd_hooks=[top])
    top.disable()
    model.run_with_hooks(tokens, fwd_hooks=[top])
    assert (top.inputs.n_texts, top.is_enabled, top.sites) == (0, False, [])
    top.enable()
    model.run_with_hooks(tokens, fwd_hooks=[top])
    assert (top.inputs.n_texts, top.is_enabled) == (2, True)


# ---- the stream ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_patch_of_the_stream_acts_on_the_output_of_its_layer() -> None:
    model, tokens, other = toy("rotary"), ids(2, 5), ids(2, 5, seed=1)
    logits, cache = model.run_with_cache(other)
    for hook in (PatchResidual(layer=1, source=cache), PatchResidual.from_run(model, other, layer=1)):
        assert model.names((hook.hook_point, hook.layer)) == [SITE]
        assert_close(model.run_with_hooks(tokens, fwd_hooks=[hook]), logits)
    last = PatchResidual(layer=-1, source=cache, positions=-1)
    found = model.run_with_hooks(tokens, fwd_hooks=[last])
    assert_close(found[:, -1], logits[:, -1])
    assert_close(found[:, :-1], model(tokens)[:, :-1])
    assert (model(tokens) - logits)[:, -1].abs().max() > 0.1, "the control: it matters"


# ---- sites that hold no activations ----------------------------------------------------------------------------------

AT_TOKENS: list[Callable[[str], HookObject]] = [
    lambda site: Scale(site, factor=2.0, positions=[1]),
    lambda site: Scale(site, factor=2),
    lambda site: ZeroAblate(site),
    lambda site: SetValue(site, value=3),
    lambda site: Clamp(site, min=0, max=3),
    lambda site: Noise(site, std=1.0),
    lambda site: AddDirection(site, vector=torch.ones(1)),
    lambda site: ProjectOut(site, vectors=torch.ones(5)),
    lambda site: Patch(site, source=torch.ones(2, 5, dtype=torch.long)),
    lambda site: MeanAblate(site),
    lambda site: ResampleAblate(site),
]


@torch.no_grad()
@pytest.mark.parametrize("make", AT_TOKENS, ids=lambda make: type(make("x")).__name__)
def test_a_controller_at_a_site_of_integers_is_refused(make: Callable[[str], HookObject]) -> None:
    model = toy("rotary")
    with pytest.raises(ValueError, match=r"changes activations, and 'hook_tokens' passes numbers of torch.int64"):
        model.run_with_hooks(ids(2, 5), fwd_hooks=[make("hook_tokens")])
    assert not any(point.is_listening for point in model.hook_points())


def test_a_controller_at_a_mask_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"mask": x > 0}

    net = wrap(nn.Sequential(Pair()))
    with pytest.raises(ValueError, match=r"ZeroAblate changes activations, and '0' passes numbers of torch.bool"):
        net.run_with_hooks(torch.ones(2), fwd_hooks=[ZeroAblate("0")])


# ---- records that are full -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_record_that_can_keep_nothing_says_so(tmp_path: Any) -> None:
    model, tokens = toy("rotary"), ids(2, 5)
    for limit in ({"most_bytes": 100}, {"most_calls": 0}):
        record = Record(SITE, at_cap="oldest", **limit)  # type: ignore[arg-type]
        with pytest.raises(
            MemoryError, match=r"can keep nothing: one value of 'blocks.1.hook_resid_post' has 1280 bytes"
        ):
            model.run_with_hooks(tokens, fwd_hooks=[record])
    record = Record(SITE, at_cap="oldest", most_bytes=1280)
    model.run_with_hooks(tokens[:1], fwd_hooks=[record])
    model.run_with_hooks(tokens, fwd_hooks=[record])
    with pytest.raises(MemoryError, match="has 1536 bytes"):
        model.run_with_hooks(ids(2, 6), fwd_hooks=[record])
    assert [len(value) for value in record.values[SITE]] == [2]  # what was kept before stays
    on_disk = Record(SITE, at_cap="oldest", most_bytes=0, store=tmp_path)
    model.run_with_hooks(tokens, fwd_hooks=[on_disk])
    assert len(on_disk.run) == 1
