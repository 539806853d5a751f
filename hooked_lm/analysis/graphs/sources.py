"""The nodes of a graph that are inside of the model: features or neurons at positions, and what they leave unexplained."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FINAL, FrozenModel, Jacobian, Values
from hooked_lm.engine.edit import Edit

Rows = Int[Tensor, " row"]


class Sources(ABC):
    """Features at positions that are active on one prompt, and the error nodes of their layers.

    `features` [feature, 3] are layer, position and index, in this order; `errors` [error, 2] layer and position. `totals` are
    what the edges into each feature and its bias sum to.
    """

    unit: str
    errors_hold_the_rest = False  # whether error nodes include the features that a graph leaves out
    frozen: FrozenModel
    features: Int[Tensor, "feature 3"]
    activations: Float[Tensor, " feature"]
    totals: Float[Tensor, " feature"]
    errors: Int[Tensor, "error 2"]

    @property
    def eps(self) -> float:
        """The rounding of the dtype with the fewest digits in which values are computed."""
        return max(float(torch.finfo(self.frozen.values[FINAL].dtype).eps), self.own_eps)

    @property
    def own_eps(self) -> float:
        """The rounding of weights that are not the model's."""
        return 0.0

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """The memory of what is kept of the features."""

    @abstractmethod
    def edges(self, gradients: Values) -> Float[Tensor, "read source"]:
        """What each feature, then each error node, adds to some reads, for their gradients [read, pos, width] at write sites."""

    @abstractmethod
    def gradients_of(self, rows: Rows, jacobian: Jacobian) -> Values:
        """The gradients [row, pos, width], at the read sites, of what some features read."""

    @abstractmethod
    def reads(self, values: Mapping[str, Tensor], rows: Rows) -> Float[Tensor, " row"]:
        """What some features read of the values at read sites, with their own biases."""

    @abstractmethod
    def biases(self) -> Values:
        """What the write sites are given if no feature is active: biases, and the outputs of MLPs at constant positions."""

    @abstractmethod
    def written(self, row: int) -> dict[str, tuple[int, Float[Tensor, " width"]]]:
        """What an active feature writes: the position and the vector, for each write site."""

    def edits(self, row: int, times: float, direction: Sequence[Tensor] = ()) -> list[Edit]:
        """The edits of the model itself that add this many times what a feature writes, or that many times other vectors."""
        found = []
        for place, (site, (position, vector)) in enumerate(self.written(row).items()):
            change = times * (direction[place] if direction else vector)
            found.append(Edit(site, partial(_added, change), positions=(position,)))
        return found


def _added(change: Tensor, old: Tensor) -> Tensor:
    return old + change.to(old)


def by_position(features: Int[Tensor, "feature 3"]) -> list[tuple[int, slice]]:
    """The features of one layer by position: the position and their rows.

    >>> import torch
    >>> by_position(torch.tensor([[0, 2, 7], [0, 2, 9], [0, 5, 1]]))
    [(2, slice(0, 2, None)), (5, slice(2, 3, None))]
    """
    found, counts = features[:, 1].unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    return [
        (position, slice(stop - count, stop))
        for position, stop, count in zip(found.tolist(), stops.tolist(), counts.tolist(), strict=True)
    ]
