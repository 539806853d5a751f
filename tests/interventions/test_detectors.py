"""Detectors against what the runs hold themselves: on every model class, in batches, in cached generation."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.hooks import HookedRootModule, wrap
from hooked_lm.interventions.base import HookObject
from hooked_lm.interventions.detectors import InputTokens, NanGradientGuard, NanGuard, Record, RecordOutput
from hooked_lm.interventions.store import Store
from tests.close import assert_close
from tests.families import DECODER_CASES, ENCODER_CASES, ENCODER_DECODER_CASES
from tests.families._models import hooked

KINDS = ["decoder", "encoder", "encoder-decoder", "wrapped"]
RESID = {"decoder": "blocks.1.hook_resid_post", "encoder": "blocks.1.hook_resid_post"}
RESID |= {"encoder-decoder": "decoder.1.hook_resid_post", "wrapped": "1"}


def one(kind: str) -> tuple[HookedRootModule, list[tuple[Tensor, ...]], str]:
    """A model, the inputs of two batches, and a site."""
    draw = torch.Generator().manual_seed(0)
    if kind == "wrapped":
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.ReLU(inplace=True), nn.Linear(8, 2)))
        return model, [(torch.randn(2, 4, 3, generator=draw),) for _ in range(2)], RESID[kind]
    cases = {"decoder": DECODER_CASES, "encoder": ENCODER_CASES, "encoder-decoder": ENCODER_DECODER_CASES}
    case = cases[kind][0]
    shapes = [(2, 5), (2, 4)] if kind == "encoder-decoder" else [(2, 5)]
    batches = [tuple(torch.randint(3, 50, shape, generator=draw) for shape in shapes) for _ in range(2)]
    return hooked(case), batches, RESID[kind]


@pytest.fixture(scope="module")
def demo() -> Any:
    return HookedTransformer.from_pretrained("demo")


# ---- Record ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_keeps_every_call(kind: str) -> None:
    model, batches, site = one(kind)
    record = Record(site)
    for batch in batches:
        plain, cache = model.run_with_cache(*batch, names_filter=site)
        assert model.run_with_hooks(*batch, fwd_hooks=[record]).equal(plain)
    first, second = record.values[site]
    assert not first.equal(second)
    assert second.equal(cache[site])
    assert record.stacked().shape == (2, *second.shape)
    assert model.list_hooks() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_shares_a_layer_with_a_controller_and_never_aliases(kind: str) -> None:
    model, (batch, _), site = one(kind)
    live: list[Tensor] = []

    def spoil(value: Tensor, hook: Any) -> None:
        live.append(value)
        value.mul_(0)

    def spy(value: Tensor, hook: Any) -> None:
        live.append(value)

    spy.records = True  # it is shown the live tensor itself
    before, after = Record(site), Record(site)
    _, cache = model.run_with_cache(*batch, names_filter=site)
    expected = cache[site].clone()
    model.run_with_hooks(*batch, fwd_hooks=[(site, spy), before, (site, spoil), after, (site, spy)])
    assert before.stacked()[0].equal(expected)
    assert after.stacked()[0].equal(torch.zeros_like(expected))
    for tensor in live:
        tensor.fill_(7)
    assert before.stacked()[0].equal(expected)
    assert after.stacked()[0].equal(torch.zeros_like(expected))
    kept = {record.values[site][0].untyped_storage().data_ptr() for record in (before, after)}
    assert not kept & {tensor.untyped_storage().data_ptr() for tensor in live}


def test_parts_of_a_value(demo: Any) -> None:
    tokens = torch.randint(5, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    record = Record("z", 1, rows=[2, 0], positions=slice(1, -1), heads=5, features=[0, 3, -1], dtype="float16")
    demo.run_with_hooks(tokens, fwd_hooks=[record])
    value = demo.run_with_cache(tokens, names_filter=("z", 1))[1]["z", 1]
    assert record.stacked()[0].equal(value[[2, 0]][:, 1:-1][:, :, [5]][..., [0, 3, -1]].half())
    assert record.n_bytes == 2 * 4 * 1 * 3 * 2
    pattern = Record("pattern", 1, positions=-1, heads=[1])  # heads come before positions there
    demo.run_with_hooks(tokens, fwd_hooks=[pattern])
    whole = demo.run_with_cache(tokens, names_filter=("pattern", 1))[1]["pattern", 1]
    assert_close(pattern.stacked()[0], whole[:, [1], -1:])
    ids = Record("hook_tokens", dtype=torch.bfloat16)  # whole numbers stay whole
    demo.run_with_hooks(tokens, fwd_hooks=[ids])
    assert ids.stacked()[0].equal(tokens)


def test_a_part_that_is_kept_does_not_hold_the_rest(demo: Any) -> None:
    record = Record("resid_post", 0, positions=slice(0, 1))
    demo.run_with_hooks(torch.full((1, 6), 9), fwd_hooks=[record])
    assert record.stacked()[0].shape == (1, 1, 128)
    assert record.values["blocks.0.hook_resid_post"][0].untyped_storage().nbytes() == 128 * 4 == record.n_bytes


def test_a_wrapped_module_needs_names_of_axes() -> None:
    model, (batch, _), site = one("wrapped")
    with pytest.raises(ValueError, match=r"heads=0, and '1 \[.*\]' has no such axis \(its axes have no names\)"):
        model.run_with_hooks(*batch, fwd_hooks=[Record(site, heads=0)])
    value = model.run_with_cache(*batch)[1][site]
    unnamed = Record(site, positions=-1, features=0)
    named = Record(site, heads=1, features=0, axes=("batch", "head", "d"))
    model.run_with_hooks(*batch, fwd_hooks=[unnamed, named])
    assert unnamed.stacked()[0].equal(value[:, -1:, :1])
    assert named.stacked()[0].equal(value[:, 1:2, :1])
    with pytest.raises(ValueError, match=r"has 3 axes, and .* names 2"):
        model.run_with_hooks(*batch, fwd_hooks=[Record(site, axes=("batch", "d"))])


def test_what_a_site_does_not_have(demo: Any) -> None:
    with pytest.raises(ValueError, match=r"heads=1, and 'blocks.0.*pos 2, d_model 128\]' has no such axis"):
        demo.run_with_hooks("a", fwd_hooks=[Record("resid_post", 0, heads=1)])
    with pytest.raises(IndexError, match=r"heads 8 is out of range at .*hook_z.*: there are 8"):
        demo.run_with_hooks("a", fwd_hooks=[Record("z", 0, heads=8)])
    with pytest.raises(ValueError, match="no dtype 'float17'"):
        Record("z", 0, dtype="float17")
    with pytest.raises(ValueError, match="at_cap must be"):
        Record("z", 0, at_cap="never")
    with pytest.raises(ValueError, match="most_calls must be at least 0"):
        Record("z", 0, most_calls=-1)


def test_caps() -> None:
    model = wrap(nn.Sequential(nn.Identity()))

    def run(record: Record) -> list[float]:
        for i in range(4):
            model.run_with_hooks(torch.full((3,), float(i)), fwd_hooks=[record])
        return [value[0].item() for value in record.values["0"]]

    stop, oldest = Record("0", most_calls=2), Record("0", most_bytes=30, at_cap="oldest")
    with pytest.warns(UserWarning, match="is full with 2 values of 24 bytes; '0' has 12 more") as warned:
        assert run(stop) == [0, 1]
    assert (len(warned), stop.n_dropped, stop.n_bytes) == (1, 2, 24)
    assert run(oldest) == [2, 3]
    assert (oldest.n_dropped, oldest.n_bytes) == (2, 24)
    with pytest.raises(MemoryError, match="is full with 2 values"):
        run(Record("0", most_calls=2, at_cap="raise"))
    oldest.clear()
    assert (oldest.values, oldest.n_bytes, oldest.n_dropped) == ({}, 0, 0)


def test_calls_of_several_shapes(demo: Any) -> None:
    record = Record(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
    for length in (4, 6):
        demo.run_with_hooks(torch.full((1, length), 9), fwd_hooks=[record])
    with pytest.raises(ValueError, match=r"do not stack: \[\(1, 4, 128\), \(1, 6, 128\)\]"):
        record.stacked("blocks.0.hook_resid_post")
    with pytest.raises(
        KeyError,
        match=r"several sites or none have values: give one; there are values of blocks.0.hook_resid_post, blocks.1",
    ):
        record.stacked()
    with pytest.raises(KeyError, match=r"there are no values of 'blocks.2"):
        record.stacked("blocks.2.hook_resid_post")
    assert record.joined("blocks.0.hook_resid_post", "pos").shape == (1, 10, 128)
    assert record.joined(("resid_post", 0), "pos").equal(record.joined("blocks.0.hook_resid_post", "pos"))
    with pytest.raises(ValueError, match="no axis 'head'"):
        record.joined("blocks.0.hook_resid_post", "head")


def test_cached_generation_shows_each_token_once(demo: Any) -> None:
    record, output = Record("resid_post", 2), RecordOutput()
    with demo.hooks([record, output]):
        tokens = demo.generate(torch.tensor([[9, 8, 7]]), 4, do_sample=False, verbose=False, stop_at_eos=False)
    assert [value.shape[1] for value in record.values["blocks.2.hook_resid_post"]] == [3, 1, 1, 1]
    logits, cache = demo.run_with_cache(tokens[:, :-1], names_filter=["unembed.hook_out", ("resid_post", 2)])
    assert_close(record.joined(axis="pos"), cache["resid_post", 2])
    assert_close(output.joined(axis="pos"), logits)


def test_the_record_of_a_gradient_run_holds_no_graph(demo: Any) -> None:
    record = Record("resid_post", 2)
    demo.run_with_hooks(torch.full((1, 4), 9), fwd_hooks=[record])
    assert not record.stacked().requires_grad


def test_copies_to_a_device_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = Tensor.to

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked.append(kwargs.get("non_blocking", False))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", watched)
    model = wrap(nn.Sequential(nn.Identity()))
    model.run_with_hooks(torch.ones(2), fwd_hooks=[Record("0", device="cpu")])
    assert asked
    assert not any(asked)


def test_several_share_a_run_of_a_store(demo: Any, tmp_path: Path) -> None:
    run = Store(tmp_path).start(what="two texts")
    hooks = [InputTokens.of(demo, store=run), Record("resid_post", 1, store=run, most_calls=0)]
    for text in ["The capital of France is", "When Mary"]:
        run.prompts = [text]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is on disk is not lost, so no cap is told
            demo.run_with_hooks(text, fwd_hooks=hooks)
    (again,) = Store(tmp_path)
    assert again.sites == ["hook_tokens", "blocks.1.hook_resid_post"]
    assert [batch.prompts for batch in again][::2] == [["The capital of France is"], ["When Mary"]]
    for ids, resid in zip(again.read("hook_tokens", "ids"), again.read("blocks.1.hook_resid_post"), strict=True):
        assert resid.equal(demo.run_with_cache(ids, names_filter=("resid_post", 1))[1]["resid_post", 1])
    told = hooks[1].to_dict()
    assert told["store"] == str(tmp_path)
    second = HookObject.from_dict({**told, "most_calls": None})
    demo.run_with_hooks("When", fwd_hooks=[second])
    assert isinstance(second, Record)
    assert len(Store(tmp_path)) == 2
    assert second.run.read("blocks.1.hook_resid_post")[0].equal(second.stacked()[0])
    with pytest.raises(ValueError, match="has no store"):
        _ = Record("z", 1).run


# ---- Output, InputTokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:3])
def test_outputs_and_inputs_of_every_class(kind: str) -> None:
    model, batches, _ = one(kind)
    sites = ["hook_tokens", "hook_decoder_tokens"][: len(batches[0])]
    output, last, inputs = RecordOutput(), RecordOutput("unembed.hook_in"), [InputTokens(site) for site in sites]
    for batch in batches:
        logits = model.run_with_hooks(*batch, fwd_hooks=[output, last, *inputs])
    factor = model.cfg.d_model**-0.5 if kind == "encoder-decoder" else 1.0  # T5 makes its logits smaller
    assert_close(output.values["unembed.hook_out"][-1] * factor, logits)
    assert last.values["unembed.hook_in"][-1].shape == (*logits.shape[:2], model.cfg.d_model)
    for i, seen in enumerate(inputs):
        assert [ids.tolist() for ids in seen.ids] == [batch[i].tolist() for batch in batches]


def test_masks_and_special_tokens() -> None:
    model = one("decoder")[0]
    tokens = torch.tensor([[0, 0, 5, 0, 6], [7, 0, 8, 9, 0]])
    by_pad, said, plain = (InputTokens(pad=pad, special=[9, 0]) for pad in (0, None, None))
    said.batch(tokens, mask := torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    model.run_with_hooks(tokens, fwd_hooks=[by_pad, said, plain])
    assert by_pad.mask[0].int().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert said.mask[0].equal(mask.bool())
    assert len(said.ids) == 1
    assert plain.mask[0].all()
    assert by_pad.special_mask[0].int().tolist() == [[1, 1, 0, 1, 0], [0, 1, 0, 1, 1]]
    said.batch(tokens)
    with pytest.raises(ValueError, match=r"reads ids \[2, 5\], and batch\(\) was called with others \[2, 5\]"):
        model.run_with_hooks(tokens + 1, fwd_hooks=[said])
    with pytest.raises(ValueError, match=r"the mask is \[1, 5\], and the tokens are \[2, 5\]"):
        said.batch(tokens, mask[:1])
    with pytest.raises(ValueError, match="most_calls must be at least 1"):
        InputTokens(most_calls=0)


def test_the_padding_of_a_tokenizer(demo: Any) -> None:
    texts = ["The capital of France is Paris", "When"]
    inputs = InputTokens.of(demo, most_calls=1)
    for _ in range(2):
        demo.run_with_hooks(texts, fwd_hooks=[inputs])
    assert inputs.mask[0].all()  # ids do not tell its padding from its BOS
    assert (len(inputs.ids), inputs.n_texts) == (1, 4)
    tokens, mask = demo.tokens.encode(texts)
    inputs.batch(tokens, mask)
    demo.run_with_hooks(texts, fwd_hooks=[inputs])
    assert inputs.mask[0].equal(mask.bool())
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "all_special_ids": [2, 0, 1]}
    for pad, expected in ((1, 1), (2, None), (None, None)):
        tokenizer = SimpleNamespace(**{**ids, "pad_token_id": pad})
        made = InputTokens.of(SimpleNamespace(tokens=SimpleNamespace(need_tokenizer=lambda t=tokenizer: t)))
        assert (made.pad, made.special) == (expected, (0, 1, 2))


@pytest.mark.parametrize("cached", [True, False])
def test_tokens_of_generation(demo: Any, cached: bool) -> None:
    inputs = InputTokens()
    prompt, mask = torch.tensor([[9, 8, 7], [6, 5, 4]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "use_past_kv_cache": cached}
    for start in (0, 2):
        with demo.hooks([inputs]):
            tokens = demo.generate(prompt, 3, attention_mask=mask, **options)
        assert inputs.latest is not None
        assert inputs.latest.ids.equal(tokens[:, :-1])  # the last token was never read
        assert inputs.latest.mask.int().tolist() == [[0, 1, 1, 1, 1], [1] * 5]
        assert (inputs.latest.first, inputs.latest.n_new) == (start, 1)


# ---- NanGuard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_bad_value_is_named(kind: str) -> None:
    model, (batch, _), site = one(kind)
    guard = NanGuard(site)
    model.run_with_hooks(*batch, fwd_hooks=[guard])

    def spoil(bad: float) -> Any:
        def hook(value: Tensor, hook: Any) -> None:
            value[1, 2, 1:3] = bad

        return hook

    for bad, word in ((float("nan"), "NaN"), (float("inf"), "inf"), (-float("inf"), "-inf")):
        with pytest.raises(ValueError, match=rf"the value at '{site}' is {word} at \[1, 2, 1\].*the first of 2 among"):
            model.run_with_hooks(*batch, fwd_hooks=[(site, spoil(bad)), guard])
    patient = NanGuard(site, nan_only=True)
    model.run_with_hooks(*batch, fwd_hooks=[(site, spoil(float("inf"))), patient])
    with pytest.raises(ValueError, match="is NaN"):
        model.run_with_hooks(*batch, fwd_hooks=[(site, spoil(float("nan"))), patient])
    assert model.list_hooks() == {}


def test_large_finite_values_are_no_alarm() -> None:
    model = wrap(nn.Sequential(nn.Identity()))
    for value in (torch.full((8,), 60000.0).half(), torch.full((8,), 3e38), torch.arange(3)):
        model.run_with_hooks(value, fwd_hooks=[NanGuard("0")])
    both = torch.tensor([float("inf"), -float("inf")])  # their sum is NaN
    model.run_with_hooks(both, fwd_hooks=[NanGuard("0", nan_only=True)])


def test_axes_are_named_and_the_value_is_stored(demo: Any, tmp_path: Path) -> None:
    def spoil(value: Tensor, hook: Any) -> None:
        value[0, 1, 2, 3] = float("nan")

    guard = NanGuard("z", 1, store=tmp_path)
    with pytest.raises(ValueError, match=r"NaN at \[0, 1, 2, 3\] \(batch 0, pos 1, head 2, d_head 3\)"):
        demo.run_with_hooks(torch.full((1, 4), 9), fwd_hooks=[(("z", 1), spoil), guard])
    (batch,) = next(iter(Store(tmp_path)))
    assert batch.about["index"] == [0, 1, 2, 3]
    assert batch.load()["value"][0, 1, 2, 3].isnan()


def test_gradients_are_guarded(demo: Any) -> None:
    with demo.hooks([NanGradientGuard("resid_post", 2), NanGradientGuard("resid_post", 1)]):
        demo(torch.full((1, 4), 9)).sum().backward()
        with pytest.raises(ValueError, match=r"the gradient at 'blocks.2.hook_resid_post' is"):
            (demo(torch.full((1, 4), 9)).sum() * float("inf")).backward()
    demo.zero_grad()
