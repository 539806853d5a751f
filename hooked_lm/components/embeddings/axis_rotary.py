"""Rotary embeddings of positions with several axes: each pair of features is rotated by the position on one of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.constants import constant
from hooked_lm.components.embeddings.rotary import Frequencies, Rotary
from hooked_lm.components.norms.norm import upcast

Angles = tuple[Float[Tensor, "batch pos 1 width"], Float[Tensor, "batch pos 1 width"]]


@dataclass(frozen=True)
class AxisRotary(Rotary, ABC):
    """A rotary embedding with an axis for each pair. Where all axes have the same position it is a plain `Rotary`."""

    @abstractmethod
    def axes(self) -> Int[Tensor, " half"]:
        """The axis of each pair."""

    def angles_on_axes(self, positions: Int[Tensor, "axis batch pos"]) -> Angles:
        """Cosine and sine of positions on the axes, in fp32; scalings depend on the largest position."""
        length = 0 if self.scaling is None else self.scaling.length(int(positions.max()) + 1)
        frequencies, temperature = constant(positions, self.frequencies, length)
        of_pairs = positions[constant(positions, self.axes)].movedim(0, -1)
        return self.cos_sin(of_pairs[..., None, :].float() * frequencies, temperature)


@dataclass(frozen=True)
class MultimodalRotary(AxisRotary):
    """Positions in time, row and column, with so many pairs for each axis in `sections` (Qwen2-VL, arXiv:2409.12191).

    The pairs of an axis are contiguous. If `interleaved`, axes alternate from pair to pair instead, and time has the pairs that
    the others leave (Qwen3-VL, arXiv:2511.21631).

    >>> MultimodalRotary(16, sections=(2, 3, 3)).axes().tolist()
    [0, 0, 1, 1, 1, 2, 2, 2]
    >>> MultimodalRotary(16, sections=(4, 2, 2), interleaved=True).axes().tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """

    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        half = self.dim // 2
        if not self.interleaved and sum(self.sections) != half:
            raise ValueError(
                f"the sections {self.sections} have {sum(self.sections)} pairs, but {self.dim} features are {half}"
            )

    def axes(self) -> Int[Tensor, " half"]:
        if self.interleaved:
            axes = torch.zeros(self.dim // 2, dtype=torch.long)
            for axis in (1, 2):
                axes[axis : 3 * self.sections[axis] : 3] = axis
            return axes
        return torch.cat([torch.full((n,), i % 3) for i, n in enumerate(self.sections)])


@dataclass(frozen=True)
class AxialRotary(AxisRotary):
    """Rows and columns of an image, each with half of the pairs and the same frequencies. Rotates in fp32.

    If `alternating`, they share the frequencies of a plain `Rotary`: rows have the first, third, ..., columns the others
    (Pixtral, Agrawal et al. 2024, arXiv:2410.07073).
    """

    alternating: bool = False

    def __post_init__(self) -> None:
        if self.dim % 4:
            raise ValueError(f"pairs of features for rows and columns need a multiple of 4 features, got {self.dim}")

    def by_pair(self, frequencies: Frequencies) -> Frequencies:
        rows, columns = frequencies[::2], frequencies[1::2]
        return torch.cat([rows, columns if self.alternating else rows])

    def axes(self) -> Int[Tensor, " half"]:
        return torch.arange(2).repeat_interleave(self.dim // 4)

    def precise(self, x: Tensor) -> Tensor:
        return upcast(x)
