"""The input of an encoder-decoder as one value: sources, and the targets that continue each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookPoint


@dataclass(frozen=True, eq=False)
class SourceAndTarget:
    """Token ids of sources and of their targets, a row each: what a run of an encoder-decoder reads.

    `len` is the number of rows, `shape` counts the tokens of both.

    >>> rows = SourceAndTarget(torch.tensor([[5, 3, 1]]), torch.tensor([[0, 7]]))
    >>> rows.tokens, rows.repeated(2).shape
    (tensor([[5, 3, 1, 0, 7]]), torch.Size([2, 5]))
    """

    source: Int[Tensor, "batch source_pos"]
    target: Int[Tensor, "batch target_pos"]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(f"each source has one target; there are {len(self.source)} and {len(self.target)}")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, which: slice | Sequence[int]) -> "SourceAndTarget":
        return SourceAndTarget(self.source[which], self.target[which])

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """The ids of both, those of the source first."""
        return torch.cat([self.source, self.target], 1)

    @property
    def shape(self) -> torch.Size:
        """The number of rows, and that of the tokens of both."""
        return torch.Size([len(self), self.source.shape[1] + self.target.shape[1]])

    def to(self, device: torch.device | str) -> "SourceAndTarget":
        """The same rows on a device."""
        return SourceAndTarget(self.source.to(device), self.target.to(device))

    def repeated(self, n: int) -> "SourceAndTarget":
        """The same rows, `n` times one after the other."""
        return SourceAndTarget(self.source.repeat(n, 1), self.target.repeat(n, 1))

    def tokens_at(self, point: HookPoint) -> Int[Tensor, "batch site_pos"]:
        """The ids at the positions of a site. Keys of cross-attention are positions of the source."""
        of_keys = point.dims[1:2] == ("key_pos",)
        return self.target if point.grows and not of_keys else self.source
