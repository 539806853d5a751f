"""A ragged batch: rows with different positions of their prompts, concatenated into [1, token, ...].

Norms, projections, MLPs and experts, which treat each token by itself, process all rows in one product. Rows are ordered by cell,
then by prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hooked_lm.engine.edit import NONE, Interval, union


@dataclass(frozen=True)
class LayerSpans:
    """The positions of a cell that one layer computes, as intervals.

    changed_input: positions whose residual stream differs from the base run at the layer's input. query_rows: positions that are
    computed through the whole layer. key_rows: earlier positions, computed only for their keys and values, or for the state of
    a mixer after them. keys: positions whose keys and values differ from the base run: of key_rows and query_rows, or of the
    layer that provides shared keys and values. entry_site: the site after attention at which the query rows enter the layer, with
    the value of the base run; empty if they pass all of the layer.
    """

    changed_input: Interval = NONE
    key_rows: Interval = NONE
    query_rows: Interval = NONE
    keys: Interval = NONE
    entry_site: str = ""

    @cached_property
    def rows(self) -> Interval:
        """All positions that the layer computes."""
        return union(self.key_rows, self.query_rows)


@dataclass(frozen=True)
class CellRun:
    """Neighbouring cells with the same spans in a layer."""

    cells: Sequence[int]
    spans: LayerSpans


class Packing:
    """The layout of the runs' tokens in the batch: for each cell of a run, `n_prompts` rows with the positions of an interval."""

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


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates the rows [row, pos, ...] of several runs."""
    flat = [part.flatten(0, 1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat))[None]
