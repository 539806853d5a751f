"""A study runs a grid of cells over one base run into a SweepResult, with bounded memory; interruptible and resumable."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.engine.edit import Cell
from hooked_lm.engine.experiment import Experiment, Metric
from hooked_lm.engine.fingerprint import fingerprint
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.result import METRIC_NAME, SweepResult, metric_name
from hooked_lm.files import writable
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr
from hooked_lm.results import Label
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.scores import provenance

Metrics = Metric | Mapping[str, Metric]
SAVE_EVERY = 30.0  # seconds


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted; `result` holds the scores of the finished cells, NaN elsewhere."""

    def __init__(self, result: SweepResult) -> None:
        done = int((~result.values.isnan()).all(-1).sum())
        super().__init__(f"interrupted after {done} of {result.mean.numel()} cells; .result holds them")
        self.result = result


class CheckpointWarning(UserWarning):
    """A resume file could not be written; `result` holds the scores of the finished cells."""

    def __init__(self, message: str, result: SweepResult) -> None:
        super().__init__(message)
        self.result = result


class SwapWarning(UserWarning):
    """The answer is better on the corrupted prompts than on the clean ones: the two may be swapped."""


@dataclass(frozen=True)
class Study(NotebookRepr):
    """The axes of a grid with their labels, and the cell at each index; `base` holds changes that all cells share."""

    axes: Mapping[str, Sequence[Label]]
    cells: Mapping[tuple[int, ...], Cell]
    base: Cell = ()
    title: str = "patching"
    changes: str = "corrupted"  # the run that is changed: "corrupted" or "clean"

    def repr_table(self) -> Table:
        """The axes with their labels."""
        return Table(
            ("axis", "length", "labels"), [(name, len(of), short_repr([*of])) for name, of in self.axes.items()]
        )

    def __repr__(self) -> str:
        return f"Study({self.title!r}: {_sizes(self.axes)}, {len(self.cells)} cells of the {self.changes} run)"

    @keeps_torch_state
    def carry_out(
        self,
        model: HookedRootModule,
        tokens: Rows,
        metric: Metrics,
        other: Rows | None = None,
        max_memory: int | str = "auto",
        progress: bool | None = None,
        resume_file: str | os.PathLike[str] | None = None,
        groups: Groups = None,
    ) -> SweepResult:
        """Runs all cells on these tokens; `other` are the tokens of the other baseline, `groups` the label of each prompt.

        With a `resume_file`, results are written to that file every 30 seconds and at the end, and an existing file of the same
        sweep is resumed: the same model, tokens, values, metrics and changes (see `fingerprint`). Raises before any forward
        pass: ValueError for a study without cells, and for an unnamed metric that cannot be identified; OSError for a file
        that cannot be written. ValueError, before any cell runs, for a file of another sweep and
        for groups that are not one label for each prompt. If writing fails later, a
        CheckpointWarning is issued and the result is returned. On an interrupt, raises SweepInterrupted, a KeyboardInterrupt
        with the partial result.
        """
        if not self.cells:
            raise ValueError(f"{self.title}: there is nothing to run: no cell of {_sizes(self.axes)} exists")
        metrics = named(metric)
        digest = ""
        if resume_file is not None:
            writable(resume_file)
            about, cells = (dict(self.axes), self.title, self.changes), [((), self.base), *self.cells.items()]
            digest = fingerprint(model, [tokens, other], metrics, cells, about)
        sites = {change.site for cell in self.cells.values() for change in cell}
        experiment = Experiment(model, tokens, list(metrics.values()), self.base, max_memory, sites)
        baseline = None if other is None else Experiment(model, other, list(metrics.values())).scores
        if baseline is not None:
            both = (experiment.scores, baseline)
            _warn_if_swapped(metrics, *(both if self.changes == "corrupted" else both[::-1]))
        of_prompts = checked_groups(groups, experiment.scores.shape[1])
        run = _Run(self, experiment, metrics, baseline, resume_file, digest, of_prompts)
        try:
            run.run(progress)
            run.save()
            found = run.result()
            if not self.base:  # which makes two runs of the same prompts, such as noise
                _warn_if_same(tokens, other, found)
            return found
        except BaseException as error:
            run.save()
            if isinstance(error, KeyboardInterrupt):
                raise SweepInterrupted(run.result()) from None
            raise


def _warn_if_same(tokens: Rows, other: Rows | None, found: SweepResult) -> None:
    """Warns of clean prompts that are the corrupted ones, so that no cell changes anything."""
    are_same = isinstance(tokens, Tensor) and isinstance(other, Tensor) and torch.equal(tokens.cpu(), other.cpu())
    if are_same and not bool(found.effects().values.nan_to_num().any()):
        warn_caller(
            "the clean and the corrupted prompts are the same, so no cell changes anything and all effects are 0"
        )


def _warn_if_swapped(metrics: Mapping[str, Metric], corrupted: Tensor, clean: Tensor) -> None:
    """Warns once if an answer is better on the corrupted prompts than on the clean ones, in the mean of a metric."""
    for metric, changed, right in zip(metrics.values(), corrupted, clean, strict=True):
        low, high = changed.mean(), right.mean()
        if getattr(metric, "rises_with_answer", False) and low > high:
            name, swapped = getattr(metric, "name", "metric"), (changed > right).nonzero().flatten().tolist()
            which = f", of prompts {short_repr(swapped)} alone" if len(swapped) < len(right) else ""
            warn_caller(
                f"the answer is better on the corrupted prompts ({name} {low:.4g}) than on the clean ones ({high:.4g}){which}: "
                "are the two swapped? The arguments are (model, corrupted, clean)",
                SwapWarning,
            )
            return


def named(metric: Metrics) -> dict[str, Metric]:
    """The metrics by name, a single one as ""; raises TypeError for non-callables, ValueError for an empty mapping."""
    metrics = dict(metric) if isinstance(metric, Mapping) else {"": metric}
    for name, given in metrics.items():
        if not callable(given) or not isinstance(name, str):
            hint = ""
            if isinstance(given, str):
                hint = f': metric=metrics.{given}(...) of hooked_lm.analysis, or answers=(" Mary", " John") in place of metric'
            raise TypeError(
                f"metric must be a function of the logits, or several by name; got {given!r}{f' as {name!r}' * bool(name)}{hint}"
            )
    if not metrics:
        raise ValueError("metric is empty: name at least one")
    return metrics


class _Run:
    """A running study."""

    def __init__(
        self,
        study: Study,
        experiment: Experiment,
        metrics: Mapping[str, Metric],
        other: Tensor | None,
        resume_file: str | os.PathLike[str] | None,
        digest: str,
        groups: Sequence[Label] | None,
    ) -> None:
        self.groups = groups
        self.study, self.experiment, self.other = study, experiment, other
        self.resume_file = None if resume_file is None else Path(resume_file)
        self.fingerprint = digest
        self.names = [name for name in metrics if name]
        self.metric_name = {METRIC_NAME: name} if (name := metric_name(metrics.get(""))) else {}
        sizes = [len(labels) for labels in study.axes.values()]
        self.values = torch.full((len(metrics), *sizes, experiment.scores.shape[1]), torch.nan)
        self.indices = list(study.cells)
        if self.resume_file is not None and self.resume_file.exists():
            self._resume(self.resume_file)

    def _resume(self, path: Path) -> None:
        earlier, mine = SweepResult.load(path), self.result()
        if earlier.fingerprint != mine.fingerprint or earlier.values.shape != mine.values.shape:
            both = f"({_sizes(earlier.axes)}), this is {_sizes(mine.axes)}"
            raise ValueError(
                f"{path} holds another sweep {both}: its model, grid, prompts, values, metrics or version differ; "
                "give another file"
            )
        self.values = earlier.values.reshape(self.values.shape).clone()

    def run(self, progress: bool | None) -> None:
        """Runs the cells without scores."""
        left = [index for index in self.indices if bool(self.values[_at(index)].isnan().any())]
        saved = time.monotonic()
        torch.set_grad_enabled(False)  # until the study ends
        cells = [self.study.cells[index] for index in left]
        for number, scores in self.experiment.run_without_gradients(cells, self.study.title, progress):
            self.values[_at(left[number])] = scores
            if self.resume_file is not None and time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        """Writes the current result to the resume file, if there is one; a warning if that fails."""
        if self.resume_file is None:
            return
        try:
            self.result().save(self.resume_file)
        except OSError as error:
            message = f"{error}; the sweep continues, and returns its result"
            warn_caller(CheckpointWarning(message, self.result()))

    def result(self) -> SweepResult:
        """The current result."""
        named = bool(self.names)
        axes = {"metric": self.names, **self.study.axes} if named else dict(self.study.axes)

        def shaped(scores: Tensor) -> Tensor:
            return scores if named else scores[0]

        base = shaped(self.experiment.scores)
        clean = None if self.other is None else shaped(self.other)
        cost = asdict(self.experiment.cost)
        about: dict[str, Any] = {
            "cost": cost,
            "base": self.study.changes,
            "fingerprint": self.fingerprint,
            "groups": self.groups,
        }
        about["about"] = provenance(self.experiment.model, what=self.study.title) | self.metric_name
        if self.experiment.fallback_reason is not None:
            about["about"]["whole_forwards"] = f"each cell is one: {self.experiment.fallback_reason}"
        if self.study.changes == "clean":
            assert clean is not None, "the corrupted run"
            return SweepResult(shaped(self.values), axes, clean, base, **about)
        return SweepResult(shaped(self.values), axes, base, clean, **about)


def _at(index: tuple[int, ...]) -> tuple[slice | int, ...]:
    """The index of a grid cell, for all metrics and prompts."""
    return (slice(None), *index)


def _sizes(axes: Mapping[str, Sequence[Label]]) -> str:
    return " x ".join(f"{name} {len(labels)}" for name, labels in axes.items()) or "one cell"
