"""An interrupted sweep, or one whose checkpoint fails, leaves no hooks and loses no results."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import engine, patching
from hooked_lm.analysis import attribute
from hooked_lm.engine.study import CheckpointWarning
from hooked_lm.hooks import scope
from hooked_lm.patching import SweepResult
from tests.interrupting import in_a_generator
from tests.models.toys import BOTH_WAYS, toy
from tests.unchecked import unchecked

VOCAB, POS, LAYERS = 11, 4, 2
CORRUPTED, CLEAN = torch.randint(VOCAB, (2, 2, POS), generator=torch.Generator().manual_seed(1))
FOLDERS = tuple(str(Path(package.__file__).parent) for package in (engine, patching))


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3]


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that runs in the folders of sweeps."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(FOLDERS) else None

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line

    def during(self, run: Callable[[], Any]) -> BaseException | None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            in_a_generator(run)
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(before)
        return None


RUNS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a sweep": (
        toy(d_vocab=VOCAB, n_layers=LAYERS),
        lambda model: patching.sweep(model, CORRUPTED, CLEAN, metric=metric, positions=[1, 3], progress=False),
    ),
    "whole forward passes": (
        toy(BOTH_WAYS, d_vocab=VOCAB, n_layers=LAYERS),
        lambda model: patching.sweep(model, CORRUPTED, CLEAN, metric=metric, positions=[1, 3], progress=False),
    ),
    "an ablation": (
        toy(d_vocab=VOCAB, n_layers=LAYERS),
        lambda model: patching.ablate(model, CORRUPTED, "mlps", metric=metric, replace_with="mean", progress=False),
    ),
    "an attribution": (
        toy(d_vocab=VOCAB, n_layers=LAYERS),
        lambda model: attribute(model, CORRUPTED, CLEAN, metric=metric, check=False, progress=False),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*whole forward pass")
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_at_any_line(name: str) -> None:
    model, run = RUNS[name]
    with unchecked():
        whole = run(model)
        counted = Interrupts(0)
        assert counted.during(lambda: run(model)) is None
        held, n_results = [], 0
        for at in range(1, counted.lines, max(1, counted.lines // 40)):
            error = Interrupts(at).during(lambda: run(model))
            held.append(error)  # with the traceback: nothing ends because it is collected as garbage
            assert error is not None, at
            assert torch.is_grad_enabled(), at
            assert scope.current() == (), at
            assert not any(point._hooks for point in model.hook_points()), at
            if isinstance(error, patching.SweepInterrupted):
                found, there = error.result.values, ~error.result.values.isnan()
                assert torch.equal(found[there], whole.values[there])
                n_results += bool(there.any())
        assert n_results > 0 or name == "an attribution"


def test_gradients_that_were_off_stay_off() -> None:
    model, run = RUNS["a sweep"]
    with torch.no_grad():
        assert isinstance(Interrupts(900).during(lambda: run(model)), KeyboardInterrupt)
        assert not torch.is_grad_enabled()


# ---- checkpoints that cannot be written --------------------------------------------------------------------------------


def counting(calls: list[int]) -> Callable[[Tensor], Tensor]:
    def counted(logits: Tensor) -> Tensor:
        calls.append(1)
        return metric(logits)

    return counted


@pytest.mark.parametrize("where", ["no/such/folder/file", "."])
def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, where: str) -> None:
    calls: list[int] = []
    with pytest.raises(OSError, match="cannot write"):
        patching.sweep(
            toy(), CORRUPTED, CLEAN, metric={"it": counting(calls)}, resume_file=tmp_path / where, progress=False
        )
    assert not calls


@pytest.mark.parametrize("every", [0.0, 1e9], ids=["at every cell", "at the end"])
def test_a_write_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: float) -> None:
    model, run = RUNS["a sweep"]
    monkeypatch.setattr("hooked_lm.engine.study.SAVE_EVERY", every)
    expected = run(model)

    def full(self: SweepResult, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SweepResult, "save", full)
    file = tmp_path / "sweep"

    def again() -> SweepResult:
        study = {"metric": metric, "positions": [1, 3], "resume_file": file, "progress": False}
        return patching.sweep(model, CORRUPTED, CLEAN, **study)

    with pytest.warns(CheckpointWarning, match="No space left on device"):
        found = again()
    assert torch.equal(found.values, expected.values)
    with pytest.raises(CheckpointWarning) as raised:  # where warnings are errors
        again()
    there = ~raised.value.result.values.isnan()
    assert there.any()
    assert torch.equal(raised.value.result.values[there], expected.values[there])


def test_scores_before_an_error_are_in_the_file(tmp_path: Path) -> None:
    model, run = RUNS["a sweep"]
    expected, calls, file = run(model), list[int](), tmp_path / "sweep"

    def fails(logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("no")
        return metric(logits)

    with pytest.raises(RuntimeError, match="no"):
        patching.sweep(
            model, CORRUPTED, CLEAN, metric={"it": fails}, positions=[1, 3], resume_file=file, progress=False
        )
    kept = SweepResult.load(file).values[0]
    there = ~kept.isnan()
    assert 0 < int(there.all(-1).sum()) < 2 * LAYERS
    assert torch.equal(kept[there], expected.values[there])
