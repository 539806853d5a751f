"""The cells of heat maps: first columns that are equal as one, and the largest of each block where there are more than pixels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.figure import Interval, ends_of
from hooked_lm.viz.labels import Axis

FEWEST = 4  # equal columns that are drawn as one
EQUAL = 1e-6  # of the largest value: nearer values count as equal
MOST_ACROSS = 600  # rows and columns of a map, of all panels beside each other


@dataclass(frozen=True)
class Cells:
    """What a heat map draws: `numbers` [which, panel, row, column] are the values, and the lower and upper ends of their
    intervals if there are any; `said` is how cells differ from what was given."""

    numbers: Float[Tensor, "which panel row column"]
    x_axis: Axis
    y_axis: Axis
    said: str = ""

    @classmethod
    def of(cls, table: Tensor, interval: Interval | None, x_axis: Axis, y_axis: Axis, every: bool) -> "Cells":
        """The cells of values [row, column] or [panel, row, column]: all of them, or with equal first columns as one."""
        ends = ends_of(table, interval)
        numbers = table[None] if ends is None else torch.cat([table[None], torch.from_numpy(ends).movedim(-1, 0)])
        cells = cls(numbers.reshape(len(numbers), -1, *table.shape[-2:]), x_axis, y_axis)
        return cells if every else cells.folded()

    def folded(self) -> "Cells":
        """The first columns as one where they are equal in every row, as those of tokens that a sweep cannot reach."""
        reach = self.numbers.abs().nan_to_num(0.0, 0.0, 0.0).max()
        same = torch.isclose(self.numbers, self.numbers[..., :1], 0.0, EQUAL * float(reach), equal_nan=True)
        n = int(same.flatten(0, 2).all(0).cumprod(0).sum())
        names = self.x_axis.names
        if not FEWEST <= n < len(names):
            return self
        label, turns = f"{n} equal {self.x_axis.of_several}", self.x_axis.turns
        turns = (turns[0] if len({*turns[:n]}) == 1 else None, *turns[n:]) if turns else ()
        axis = replace(self.x_axis, names=(label, *names[n:]), turns=turns)
        return replace(self, numbers=self.numbers[..., n - 1 :], x_axis=axis)

    def in_blocks(self, white: Sequence[float], across: int) -> "Cells":
        """The value of each block that is farthest from white, if there are more cells than pixels: so single ones are seen.
        `white` is one number for all panels, or one for each."""
        n_rows, n_columns = self.numbers.shape[-2:]
        down, along = (-(-n // (MOST_ACROSS // across)) for n in (n_rows, n_columns))
        if down == along == 1:
            return self
        sizes = (self.numbers[0] - torch.tensor(white)[:, None, None]).abs().nan_to_num(nan=-1.0)
        _, places = torch.nn.functional.max_pool2d(sizes, (down, along), ceil_mode=True, return_indices=True)
        every = self.numbers.flatten(2).gather(2, places.flatten(1).expand(len(self.numbers), -1, -1))
        axes = {"x_axis": _blocks(self.x_axis, along), "y_axis": _blocks(self.y_axis, down)}
        return replace(
            self,
            numbers=every.unflatten(2, places.shape[1:]),
            said=f"each cell is the largest of {down} x {along}",
            **axes,
        )


def _blocks(axis: Axis, n: int) -> Axis:
    """The axis with a name for every `n` labels: the first and the last of them; the turn is that of the first."""
    ends = pairwise([*range(0, len(axis.names), n), len(axis.names)])
    names = tuple(f"{axis.names[a]} … {axis.names[b - 1]}" for a, b in ends)
    return replace(axis, names=names, turns=axis.turns[::n]) if n > 1 else axis
