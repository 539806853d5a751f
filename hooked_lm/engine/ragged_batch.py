"""Packing: the tokens of many rows side by side, [1, token, ...], though each row has only some positions of its prompt.

What treats each token by itself (norms, projections, MLPs, experts) then works on all of them in one product. The order is cell
by cell, in a cell prompt by prompt, in a prompt position by position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hooked_lm.engine.edit import NONE, Interval


@dataclass(frozen=True)
class LayerSpans:
    """Which positions of a cell take part in one layer: those that came from the layer below, those that the layer reads,
    those that tell (have keys and values of their own) and those that ask (and leave the layer)."""

    came: Interval = NONE
    reading: Interval = NONE
    key_rows: Interval = NONE
    query_rows: Interval = NONE


@dataclass(frozen=True)
class Run:
    """Cells that stand side by side and take the same steps in a layer."""

    cells: Sequence[int]
    steps: LayerSpans


class Packing:
    """Where each run's tokens stand: `n_prompts` rows for each of its cells, with the positions of an interval."""

    def __init__(self, n_prompts: int, n_cells: Sequence[int], intervals: Sequence[Interval]) -> None:
        self.n_prompts, self.n_cells, self.intervals = n_prompts, n_cells, intervals
        self.rows = [n * n_prompts for n in n_cells]
        self.lengths = [stop - start for start, stop in intervals]
        ends = [0]
        for rows, length in zip(self.rows, self.lengths, strict=True):
            ends.append(ends[-1] + rows * length)
        self.starts = ends[:-1]
        self.n_tokens = ends[-1]

    def part(self, x: Tensor, run: int) -> Tensor:
        """The rows of a run, [row, pos, ...]: a view."""
        rows, length, start = self.rows[run], self.lengths[run], self.starts[run]
        return x[0, start : start + rows * length].view(rows, length, *x.shape[2:])

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """The rows of all runs."""
        return (self.part(x, run) for run in range(len(self.rows)))

    @cached_property
    def positions(self) -> Tensor:
        """The position of every token."""
        parts = [
            torch.arange(start, stop).repeat(rows)
            for rows, (start, stop) in zip(self.rows, self.intervals, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Rows [row, pos, ...] of runs, side by side."""
    flat = [part.flatten(0, 1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat))[None]


def cut(part: Tensor, own: Interval, wanted: Interval) -> Tensor:
    """Of rows with the positions of `own` those of `wanted`, which lie inside."""
    if own == wanted:
        return part
    if wanted[0] == wanted[1]:
        return part[:, :0]
    return part[:, wanted[0] - own[0] : wanted[1] - own[0]]
