"""A study: a grid of cells over one base run, carried out into a SweepResult; bounded in memory, interruptible, resumable."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.patching.edits import Cell
from hooked_lm.patching.engine import Experiment, Metric
from hooked_lm.patching.result import Label, SweepResult

Metrics = Metric | Mapping[str, Metric]
SAVE_EVERY = 30.0  # seconds


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted; `result` holds what was measured until then, NaN elsewhere."""

    def __init__(self, result: SweepResult) -> None:
        done = int((~result.values.isnan()).all(-1).sum())
        super().__init__(f"interrupted after {done} of {result.mean.numel()} cells; .result holds them")
        self.result = result


@dataclass(frozen=True)
class Study:
    """Axes with their labels, and for each place of the grid that exists a cell; `base` is exchanged in all runs."""

    axes: Mapping[str, Sequence[Label]]
    cells: Mapping[tuple[int, ...], Cell]
    base: Cell = ()
    title: str = "patching"
    changes: str = "corrupted"  # which run is changed; the other one is "clean", or "corrupted"

    def carry_out(
        self,
        model: HookedRootModule,
        tokens: Int[Tensor, "batch pos"],
        metric: Metrics,
        other: Int[Tensor, "batch pos"] | None = None,
        batch_size: int | str = "auto",
        progress: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> SweepResult:
        """Run all cells on these tokens; `other` are those of the other baseline.

        With a `checkpoint` what was measured is written to that file every half minute and when the sweep ends, and a
        file of the same sweep is gone on from. Raises ValueError for a study without cells, and for a file of another
        sweep; SweepInterrupted, a KeyboardInterrupt with the partial result, when it is interrupted.
        """
        if not self.cells:
            raise ValueError(f"{self.title}: there is nothing to do; no cell of {_sizes(self.axes)} exists")
        metrics = dict(metric) if isinstance(metric, Mapping) else {"": metric}
        experiment = Experiment(model, tokens, list(metrics.values()), self.base, batch_size)
        baseline = None if other is None else Experiment(model, other, list(metrics.values())).scores
        run = _Run(self, experiment, metrics, baseline, checkpoint)
        try:
            run.go(progress)
        except KeyboardInterrupt:
            run.save()
            raise SweepInterrupted(run.result()) from None
        run.save()
        return run.result()


class _Run:
    """A study on its way."""

    def __init__(
        self,
        study: Study,
        experiment: Experiment,
        metrics: Mapping[str, Metric],
        other: Tensor | None,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        self.study, self.experiment, self.other = study, experiment, other
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.names = [name for name in metrics if name]
        sizes = [len(labels) for labels in study.axes.values()]
        self.values = torch.full((len(metrics), *sizes, experiment.scores.shape[1]), torch.nan)
        self.places = list(study.cells)
        if self.checkpoint is not None and self.checkpoint.exists():
            self._go_on_from(self.checkpoint)

    def _go_on_from(self, path: Path) -> None:
        earlier = SweepResult.load(path)
        mine = self.result()
        same = dict(earlier.axes) == dict(mine.axes) and earlier.values.shape == mine.values.shape
        if not same or not torch.allclose(earlier.unchanged, mine.unchanged, rtol=1e-4, atol=1e-4):
            raise ValueError(
                f"{path} holds another sweep ({_sizes(earlier.axes)}), this is {_sizes(mine.axes)}; give another file"
            )
        self.values = earlier.values.reshape(self.values.shape).clone()

    def go(self, progress: bool) -> None:
        """Run what is not there yet."""
        left = [place for place in self.places if bool(self.values[_at(place)].isnan().any())]
        saved = time.monotonic()
        for index, scores in self.experiment.run([self.study.cells[p] for p in left], self.study.title, progress):
            self.values[_at(left[index])] = scores
            if self.checkpoint is not None and time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        """Write what there is to the checkpoint, if one is wanted."""
        if self.checkpoint is not None:
            self.result().save(self.checkpoint)

    def result(self) -> SweepResult:
        """What there is."""
        named = bool(self.names)
        axes = {"metric": self.names, **self.study.axes} if named else dict(self.study.axes)

        def shaped(scores: Tensor) -> Tensor:
            return scores if named else scores[0]

        base = shaped(self.experiment.scores)
        clean = None if self.other is None else shaped(self.other)
        cost = asdict(self.experiment.spent)
        if self.study.changes == "clean":
            assert clean is not None, "the corrupted run"
            return SweepResult(shaped(self.values), axes, clean, base, cost, "clean")
        return SweepResult(shaped(self.values), axes, base, clean, cost)


def _at(place: tuple[int, ...]) -> tuple[slice | int, ...]:
    """The index of a place, for all metrics and prompts."""
    return (slice(None), *place)


def _sizes(axes: Mapping[str, Sequence[Label]]) -> str:
    return " x ".join(f"{name} {len(labels)}" for name, labels in axes.items()) or "one cell"
