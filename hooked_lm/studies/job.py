"""Computes the shards of a study: runs pairs of one length together, and writes a row for each pair and cell."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hooked_lm import shards
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import has_two_stacks
from hooked_lm.engine.study import SwapWarning
from hooked_lm.files import unfinished_path
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.token_labels import KEYS
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import joined
from hooked_lm.results import Label, Scores
from hooked_lm.results.labels import POSITION
from hooked_lm.shards.job import Advance
from hooked_lm.shards.records import commit
from hooked_lm.studies.experiments import Experiment, MakesMetric
from hooked_lm.studies.pairs import Pair
from hooked_lm.studies.plan import StudyPlan

if TYPE_CHECKING:
    import pyarrow

SUFFIX = ".parquet"
PAIR, VALUE, FROM_END = "pair", "value", "from_end"
WRITING: dict[str, Any] = {"compression": "zstd", "version": "2.6", "store_schema": False}  # of parquet


@dataclass
class StudyJob(shards.Job):
    """A study in its folder."""

    plan: StudyPlan
    folder: Path
    model: HookedRootModule
    pairs: Sequence[Pair]
    experiment: Experiment
    metrics: Mapping[str, MakesMetric]
    UNIT: ClassVar[str] = "pairs"

    def n_units(self, n_shards: int) -> int:
        return min(len(self.pairs), n_shards * self.plan.items_per_shard)

    def write(self, shard: int, advance: Advance) -> bool:
        import pyarrow
        from pyarrow import parquet

        tables: dict[int, pyarrow.Table] = {}
        results = []
        for numbers in self._together(*self.plan.places(shard)):
            result = self.run(numbers)
            tables |= dict(zip(numbers, self._tables(result, numbers), strict=True))
            results.append(result)
            advance(len(numbers))
        if len({(*result.axes, type(result), *_measured(result)) for result in results}) > 1:
            raise ValueError("the experiment has other axes or columns for some pairs: they make no one table")
        whole = pyarrow.concat_tables([tables[number] for number in sorted(tables)]).combine_chunks()
        path = self.folder / f"shard-{shard:06d}{SUFFIX}"
        unfinished = unfinished_path(path)
        try:
            parquet.write_table(whole, unfinished, **WRITING)
            places, [result, *_] = list(self.plan.places(shard)), results
            record = {
                "shard": shard,
                "pairs": places,
                "rows": whole.num_rows,
                "axes": {name: _mixed(name, labels) for name, labels in result.axes.items()},
            }
            commit(unfinished, path, {**record, **{name: getattr(result, name, None) for name in ("base", "method")}})
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _together(self, start: int, end: int) -> Iterator[list[int]]:
        """Yields the numbers of pairs that run together: of one length and the same turns, `batch_size` at most."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number in range(start, end):
            groups.setdefault(self.pairs[number].sizes, []).append(number)
        size = self.plan.batch_size
        for group in groups.values():
            yield from (group[i : i + size] for i in range(0, len(group), size))

    def run(self, numbers: Sequence[int]) -> Scores:
        """The result of the experiment on some pairs of one length. Raises ValueError for anything but a number for each pair."""
        device, some = next(self.model.parameters()).device, [self.pairs[number] for number in numbers]
        clean, corrupted = _prompts(some, device)
        answers = [list(pair.answer) for pair in some], [list(pair.wrong_answer) for pair in some]
        metrics = {name: make(*answers) for name, make in self.metrics.items()}
        metric = metrics if len(metrics) > 1 else next(iter(metrics.values()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SwapWarning)  # there is one for all pairs, in the end
            warnings.filterwarnings("ignore", ".* hardly differ")  # of a few pairs; `scores().normalised()` has all
            result = self.experiment(self.model, corrupted, clean, metric=metric)
        if not isinstance(result, Scores) or result.n_prompts != len(some):
            raise ValueError(
                f"the experiment must return Scores with a number for each of the pairs {numbers[0]} to {numbers[-1]} "
                f"({len(some)} that run together), got {result!r}"
            )
        return result

    def _tables(self, result: Scores, numbers: Sequence[int]) -> Iterator["pyarrow.Table"]:
        """Yields the rows of each pair: its number, the labels of the cells, and what was measured."""
        import pyarrow

        n_cells = result.values[..., 0].numel()
        places = np.indices(result.values.shape[:-1]).reshape(len(result.axes), n_cells)
        labels = {name: _labels(name, some) for name, some in result.axes.items()}
        columns = {name: labels[name].take(place) for name, place in zip(labels, places, strict=True)}
        n_tokens = len(self.pairs[numbers[0]].clean)
        if "position" in columns and columns["position"].type == "int64" and not has_two_stacks(self.model):
            numbered = columns["position"].to_numpy()
            columns[FROM_END] = pyarrow.array(numbered - n_tokens)
            for of_clean, *_ in filter(None, [self.pairs[numbers[0]].labels]):
                some = [of_clean[position] for position in numbered]
                columns |= {name: pyarrow.array([getattr(label, name) for label in some]) for name in KEYS}
        measured = _measured(result)
        for i, number in enumerate(numbers):
            values = {name: pyarrow.array(tensor[..., i].flatten().numpy()) for name, tensor in measured.items()}
            yield pyarrow.table({PAIR: pyarrow.array(np.full(n_cells, number)), **columns, **values})


def _prompts(pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor | Chat, Tensor | Chat]:
    """The clean and the corrupted prompts of pairs of one length."""
    chats = [pair.chats for pair in pairs if pair.chats is not None]
    if chats:
        sides = [joined(side) for side in zip(*chats, strict=True)]
        return sides[0].to(device), sides[1].to(device)
    ids = [torch.tensor([getattr(pair, side) for pair in pairs], device=device) for side in ("clean", "corrupted")]
    return ids[0], ids[1]


def _measured(result: Scores) -> dict[str, Tensor]:
    """The numbers of each cell and pair: the values, others on the grid, and the metric of the unchanged runs."""
    found: dict[str, Tensor | None] = {VALUE: result.values}
    found |= {name: getattr(result, name) for name in result.GRID if name != "values"}
    if isinstance(result, SweepResult):
        found |= {"corrupted": result.corrupted, "clean": result.clean}
    n_axes = result.values.ndim
    return {
        name: tensor.reshape(*tensor.shape[:-1], *[1] * (n_axes - tensor.ndim), tensor.shape[-1]).expand_as(
            result.values
        )
        for name, tensor in found.items()
        if isinstance(tensor, Tensor)
    }


def _mixed(name: str, labels: Sequence[Label]) -> Sequence[Label] | None:
    """Labels of both kinds, numbers and strings, which a column holds as strings; a column of positions holds numbers."""
    if name == "position" and _numbers(labels) is not None:
        return None
    return labels if len({type(label) for label in labels}) > 1 else None


def _numbers(labels: Sequence[Label]) -> list[int] | None:
    """The numbers of positions; None if a label has none."""
    numbers: list[int] = []
    for label in labels:
        match = None if isinstance(label, int) else POSITION.fullmatch(label)
        if isinstance(label, str) and match is None:
            return None
        numbers.append(int(match[1] if match else label))
    return numbers


def _labels(name: str, labels: Sequence[Label]) -> "pyarrow.Array":
    """The labels of an axis: numbers of positions without their tokens, which differ between pairs."""
    import pyarrow

    if name == "position" and (numbers := _numbers(labels)) is not None:
        return pyarrow.array(numbers, pyarrow.int64())
    if all(isinstance(label, int) for label in labels):
        return pyarrow.array(labels, pyarrow.int64())
    return pyarrow.array([str(label) for label in labels], pyarrow.string())
