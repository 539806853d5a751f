"""Detectors in files, on every class of model and in generation; the page that tells of all objects."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import analysis, interventions, patching
from hooked_lm.interventions import (
    GradientReport,
    HookObject,
    Hooks,
    InputTokens,
    NanGradientGuard,
    NanGuard,
    Record,
    RecordGradient,
    RecordOutput,
    Statistics,
    Store,
    TopExamples,
    dictionaries,
)
from tests.interventions.test_detectors import KINDS, one
from tests.models.toys import ids, toy

PAGE = Path(__file__).parents[2] / "docs" / "interventions.md"
DETECTORS: list[Any] = [
    Record(
        "resid_post",
        1,
        positions=slice(0, 2),
        features=[1, 3],
        dtype="float16",
        device="cpu",
        most_calls=3,
        at_cap="oldest",
    ),
    Record(["blocks.0.attn.hook_z", ("z", 1)], heads=[2], rows=0, when="pre"),
    RecordOutput(positions=-1),
    InputTokens(pad=3, special=[5, 4], most_calls=2),
    Statistics("resid_post", 1, covariance=True, edges=[-1, 0, 1]),
    TopExamples("z", 1, k=3, context=2, directions=torch.randn(2, 8, generator=torch.Generator().manual_seed(0))),
    NanGuard("z", 1, nan_only=True),
    NanGradientGuard("blocks.*.hook_resid_post"),
    RecordGradient("z", 1, most_bytes=10_000),
    GradientReport("blocks.*.attn.hook_z", factor=7),
]


def found_by(detector: Any) -> list[Tensor]:
    """What a detector knows, as tensors."""
    if isinstance(detector, Record):
        return [value for values in detector.values.values() for value in values]
    if isinstance(detector, InputTokens):
        return [*detector.ids, *detector.mask, *detector.special_mask]
    if isinstance(detector, Statistics):
        return [value for site in detector.sites for value in detector[site].tensors().values()]
    if isinstance(detector, TopExamples):
        found = detector.examples()
        return [found.values, found.texts, found.positions, found.tokens]
    if isinstance(detector, GradientReport):
        return [torch.tensor(detector.to_dataframe()["rms"].to_numpy())]
    return []


def test_every_detector_is_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    Hooks(DETECTORS).save(tmp_path / "detectors.safetensors")
    again = Hooks.load(tmp_path / "detectors.safetensors")
    model, tokens = toy("rotary"), ids(2, 5)
    plain = model(tokens, return_type="loss")
    for before, after in zip(DETECTORS, again, strict=True):
        assert (type(before), repr(before)) == (type(after), repr(after))
        ours, theirs = before.settings(), after.settings()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        for detector in (before, after):
            given = [detector.inputs, detector] if isinstance(detector, TopExamples) else [detector]
            with model.hooks(given):
                loss = model(tokens, return_type="loss")
            assert torch.equal(loss, plain)  # nothing else changes
            if before.direction == "bwd":
                loss.backward()
        assert all(torch.equal(a, b) for a, b in zip(found_by(before), found_by(after), strict=True))
        assert found_by(before) or isinstance(before, NanGuard), before
    assert not any(point.is_listening for point in model.hook_points())


def test_a_store_is_described_by_its_folder(tmp_path: Path) -> None:
    run = Store(tmp_path / "store").start()
    for detector in (Record("z", 1, store=run), NanGuard("z", 1, store=tmp_path / "store")):
        Hooks([detector]).save(tmp_path / "one")
        [again] = Hooks.load(tmp_path / "one")
        assert again.to_dict()["store"] == str(tmp_path / "store")


@pytest.mark.parametrize("kind", KINDS)
def test_detectors_watch_side_by_side_in_every_class_of_model(kind: str) -> None:
    """All at one site, registered, switched off and taken away."""
    model, (batch, _), site = one(kind)
    plain, cache = model.run_with_cache(*batch, names_filter=site)
    hooks = [Record(site), Statistics(site), NanGuard(site), Record(site, device="cpu", dtype="float64")]
    numbers = [model.register(hook) for hook in hooks]
    assert model(*batch).equal(plain)
    hooks[0].disable()
    assert model(*batch).equal(plain)
    for number in numbers:
        model.unregister(number)
    assert model(*batch).equal(plain)
    assert [len(hooks[i].values[site]) for i in (0, 3)] == [1, 2]  # type: ignore[attr-defined]
    assert hooks[0].stacked()[0].equal(cache[site])  # type: ignore[attr-defined]
    assert hooks[3].values[site][1].equal(cache[site].double())  # type: ignore[attr-defined]
    assert hooks[1][site].count == 2 * cache[site].shape[:2].numel()  # type: ignore[index]
    assert model.list_hooks() == {}


@pytest.mark.parametrize("cached", [True, False])
def test_a_guard_stops_a_generation_where_it_goes_wrong(cached: bool) -> None:
    model, tokens = toy("rotary"), ids(2, 4)

    def spoil(value: Tensor, hook: Any) -> None:
        if hook.step == 2:
            value[1, -1, 5] = torch.nan

    index = r"\[1, 0, 5\]" if cached else r"\[1, 5, 5\]"
    with (
        pytest.raises(ValueError, match=f"is NaN at {index}"),
        model.hooks([("blocks.1.hook_resid_post", spoil), NanGuard("resid_post", 1)]),
    ):
        model.generate(tokens, 4, use_past_kv_cache=cached, do_sample=False, verbose=False, stop_at_eos=False)
    assert model.list_hooks() == {}


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_names_what_there_is_and_all_of_it() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`([A-Za-z_.]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))
    parameters = {"positions", "heads", "features", "rows", "encode", "decode", "name", "name.input", "model.hooks"}
    parameters |= {"store", "companions", "slice", "Slice", "pos_slice", "nn.Module", "from_run", "write_html"}
    parameters |= {"feature", "value", "factor", "coefficient", "kind", "answers", "metric"}
    parameters |= {"from_pretrained", "from_pretrained_no_processing", "write_pages", "index.html", "sample"}
    homes = (interventions, dictionaries, analysis, hooked_lm, patching, interventions.PartEditor, interventions.Part)
    last = {name: name.removeprefix("dictionaries.") for name in named - parameters}
    assert {name for name, own in last.items() if not any(hasattr(home, own) for home in homes)} == set()
    for parameter in ("positions", "heads", "features", "rows"):
        for kind in (interventions.Record, interventions.Scale, interventions.Patch, interventions.ClipGradient):
            assert parameter in inspect.signature(kind).parameters
    objects = [kind for home in homes[:2] for name in home.__all__ if inspect.isclass(kind := getattr(home, name))]
    kinds = {kind.__name__ for kind in objects if issubclass(kind, HookObject) and not inspect.isabstract(kind)}
    assert kinds - named == set()
    assert len(kinds) >= 29
