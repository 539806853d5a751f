"""Values at some tokens of a conversation, of which each row has its own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def at_columns(value: Tensor, axis: int, columns: Sequence[Sequence[int]], has_batch_dim: bool) -> Tensor:
    """The values at these positions of each row, of an axis of positions.

    >>> at_columns(torch.tensor([[1, 2, 3], [4, 5, 6]]), 1, [[0, 1], [2, 0]], True)
    tensor([[1, 2],
            [6, 4]])
    """
    index = torch.tensor(columns, device=value.device)
    shape = [1] * value.ndim
    shape[axis] = index.shape[1]
    if has_batch_dim:
        shape[0] = len(index)
    return value.take_along_dim(index.view(shape), axis)


def at_means(
    value: Float[Tensor, "..."], axis: int, groups: Sequence[Sequence[Sequence[int]]], has_batch_dim: bool
) -> Float[Tensor, "..."]:
    """The means over groups of positions of each row, which take the place of the positions.

    >>> at_means(
    ...     torch.tensor([[1.0, 2.0, 6.0], [4.0, 5.0, 6.0]]),
    ...     1,
    ...     [[[0], [1, 2]], [[0, 1], [2]]],
    ...     True,
    ... )
    tensor([[1.0000, 4.0000],
            [4.5000, 6.0000]])
    """
    if not has_batch_dim:
        return torch.stack([value[(slice(None),) * axis + (places,)].mean(axis) for places in groups[0]], axis)
    rows = value.expand(len(groups), *value.shape[1:])
    return torch.stack([at_means(row, axis - 1, [of], False) for row, of in zip(rows, groups, strict=True)])
