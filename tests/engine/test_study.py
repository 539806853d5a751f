"""Sweeps that are interrupted, resume, and refuse the checkpoints of other sweeps."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.analysis import metrics
from tests.close import assert_close

LAYERS, POS = 3, 4


def build() -> HookedTransformer:
    sizes = {"n_layers": LAYERS, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
    return HookedTransformer(HookedTransformerConfig(**sizes, seed=0, initializer_range=0.5))


def prompts() -> tuple[Tensor, Tensor]:
    corrupted, clean = torch.randint(0, 11, (2, 2, POS), generator=torch.Generator().manual_seed(1))
    return corrupted, clean


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def stops_after(monkeypatch: pytest.MonkeyPatch, n_cells: int) -> None:
    """Interrupts every sweep behind so many cells."""
    whole = patching.Experiment.run_without_gradients

    def run(self: patching.Experiment, *args: Any) -> Iterator[Any]:
        yield from islice(whole(self, *args), n_cells)
        raise KeyboardInterrupt

    monkeypatch.setattr(patching.Experiment, "run_without_gradients", run)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_both_directions_know_both_runs(direction: str):
    model, (corrupted, clean) = build(), prompts()
    result = patching.sweep(model, corrupted, clean, metric=metric, direction=direction)
    assert_close(result.corrupted, metric(model(corrupted)).detach())
    assert_close(result.clean, metric(model(clean)).detach())
    # the last position of the last stream decides everything: the cell has the value of the other run
    everything = patching.sweep(model, corrupted, clean, metric=metric, direction=direction, positions=None)
    other = result.clean if direction == "denoise" else result.corrupted
    assert_close(everything.values, other.expand(LAYERS, -1))
    assert result.effects().unchanged.abs().max() == 0


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, (corrupted, clean) = build(), prompts()
    whole = patching.sweep(model, corrupted, clean, metric=metric)
    file, before = tmp_path / "sweep.safetensors", model(corrupted)
    with monkeypatch.context() as patch:
        stops_after(patch, 5)
        with pytest.raises(patching.SweepInterrupted, match="interrupted after 5 of 12 cells") as interrupted:
            patching.sweep(model, corrupted, clean, metric=metric, resume_file=file)
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert not model.list_hooks()
    assert torch.equal(model(corrupted), before)
    part = interrupted.value.result
    done = ~part.mean.isnan()
    assert int(done.sum()) == 5
    assert_close(part.values[done], whole.values[done])
    assert_close(patching.SweepResult.load(file).values, part.values)
    rest = patching.sweep(model, corrupted, clean, metric=metric, resume_file=file)
    assert_close(rest.values, whole.values)
    assert rest.cost["layer_rows"] < whole.cost["layer_rows"]
    again = patching.sweep(model, corrupted, clean, metric=metric, resume_file=file)
    assert again.cost["layer_rows"] == 0


@pytest.mark.parametrize(
    "other",
    [
        {"replace_with": "zero"},
        {"sites": "resid_mid"},
        {"positions": None},
        {"metric": lambda logits: logits[:, -1, 2]},
        {"layers": [0, 1]},
    ],
)
def test_a_file_of_another_sweep_is_refused(tmp_path: Path, other: dict):
    model, (corrupted, clean) = build(), prompts()
    file = tmp_path / "sweep.safetensors"
    patching.sweep(model, corrupted, clean, metric=metric, resume_file=file)
    with pytest.raises(ValueError, match="holds another sweep"):
        patching.sweep(model, corrupted, clean, **{"metric": metric, **other}, resume_file=file)
    with pytest.raises(ValueError, match="holds another sweep"):
        patching.sweep(model, clean, corrupted, metric=metric, resume_file=file)


def test_several_metrics_from_one_sweep():
    model, (corrupted, clean) = build(), prompts()
    several = {"difference": metric, "mean": lambda logits: logits[:, -1].mean()}
    result = patching.sweep(model, corrupted, clean, metric=several)
    assert list(result.axes) == ["metric", "layer", "position"]
    alone = patching.sweep(model, corrupted, clean, metric=metric)
    assert_close(result.values[0], alone.values)
    assert result.values[1].shape == alone.values.shape


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sites": []}, ValueError, "sites is empty"),
        ({"sites": "resid_pro"}, KeyError, "did you mean"),
        ({"layers": []}, ValueError, "layer is empty"),
        ({"layers": [3]}, IndexError, "layer 3 is out of range: there are 3"),
        ({"positions": [4]}, IndexError, "position 4 is out of range: there are 4"),
        ({"positions": "all"}, ValueError, "position must be 'each', some indices or None"),
        ({"heads": "each"}, ValueError, "has no heads"),
        ({"sites": "z", "heads": [4]}, IndexError, "head 4 is out of range: there are 4"),
        ({"sites": "z", "heads": [0], "neurons": [0]}, ValueError, "heads or neurons, not both"),
        ({"direction": "clean"}, ValueError, "direction must be 'denoise' or 'noise'"),
        ({"replace_with": "median"}, ValueError, "replace_with must be one of 'clean', 'mean', 'zero'"),
        ({"replace_with": {}}, KeyError, "the cache has no"),
        ({"replace_with": torch.zeros(5)}, ValueError, "which does not broadcast"),
        ({"clean": None}, ValueError, "needs the values of the clean prompts"),
        ({"clean": None, "direction": "noise"}, ValueError, "give clean"),
        ({"max_memory": 1000}, ValueError, "max_memory=1,000 bytes is too small"),
        ({"max_memory": "big"}, ValueError, "max_memory must be 'auto', a number of bytes"),
    ],
)
def test_bad_input(arguments: dict, error: type[Exception], message: str):
    model, (corrupted, clean) = build(), prompts()
    with pytest.raises(error, match=message):
        patching.sweep(model, corrupted, **{"clean": clean, "metric": metric, **arguments})
    assert not model.list_hooks()


def test_a_clean_cache_of_another_model():
    model, (corrupted, clean) = build(), prompts()
    sizes = {"n_layers": LAYERS, "d_model": 24, "n_heads": 3, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
    cache = HookedTransformer(HookedTransformerConfig(**sizes, seed=0)).run_with_cache(clean)[1]
    with pytest.raises(ValueError, match=r"has d_model 24, this model 16: it comes from another model"):
        patching.sweep(model, corrupted, clean, metric=metric, replace_with=cache)
    with pytest.raises(ValueError, match=r"has head 3, this model 4: it comes from another model"):
        patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, lambda logits: metric(logits).mean())


CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = CLEAN.replace("John gave", "Mary gave")


def sweep_of_names(corrupted: str | list[str], clean: str | list[str]) -> patching.SweepResult:
    model = HookedTransformer.from_pretrained("demo")
    metric = metrics.logit_difference([[" Mary"]], [[" John"]], model=model)
    return patching.sweep(model, corrupted, clean, metric=metric, layers=[0], positions=None)


def test_swapped_prompts_are_noticed():
    with pytest.warns(UserWarning, match="the answer is better on the corrupted prompts .*: are the two swapped?"):
        swapped = sweep_of_names(CLEAN, CORRUPTED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = sweep_of_names(CORRUPTED, CLEAN)
        right.normalized()
    assert torch.equal(swapped.corrupted, right.clean)
    with pytest.warns(UserWarning, match=r"of prompts \[0, 2\] alone: are the two swapped"):
        sweep_of_names([CLEAN, CORRUPTED, CLEAN], [CORRUPTED, CLEAN, CORRUPTED])


def test_shares_of_a_difference_that_may_be_zero():
    both = sweep_of_names([CORRUPTED, CLEAN], [CLEAN, CORRUPTED])
    assert abs(float((both.clean - both.corrupted).mean())) < 1e-3
    with pytest.raises(ValueError, match="cannot normalise"):
        both.normalized()
    shifted = replace(both, clean=both.clean + 0.1)
    with pytest.warns(UserWarning, match="hardly differ, by 0.1 ±"):
        shifted.normalized()


def test_prompts_of_different_lengths_are_shown_from_their_first_difference():
    with pytest.raises(
        ValueError,
        match=r"from position 10 on the clean tokens are \[' John', .*\] ?.*corrupted ones \[' the', ' Mary'",
    ):
        sweep_of_names(CORRUPTED.replace(", Mary gave", ", the Mary gave"), CLEAN)
