"""Groups of prompts that are not independent, such as those of one template, name or item: intervals count groups."""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.labels import Label

Groups: TypeAlias = (
    Collection[Any] | None
)  # a label for each prompt: strings or ints, in a list, a tensor, an array or a column


def checked_groups(groups: Groups, n_prompts: int) -> tuple[Label, ...] | None:
    """The label of each prompt; None for None.

    Raises ValueError unless there is one label for each prompt, and for labels that are neither strings nor ints.

    >>> checked_groups(torch.tensor([3, 3, 5]), 3)
    (3, 3, 5)
    """
    if groups is None:
        return None
    if isinstance(groups, str) or not hasattr(groups, "__len__"):
        raise ValueError(f"groups must be a list with a label for each prompt, got {groups!r}")
    labels = list(groups.tolist() if hasattr(groups, "tolist") else groups)
    if n_prompts == 1 < len(labels):
        raise ValueError(
            f"groups has {len(labels)} labels, and there is one number for all prompts: give a metric with one each"
        )
    if len(labels) != n_prompts:
        raise ValueError(
            f"groups has {len(labels)} labels, and there are {n_prompts} prompts: give the label of each prompt"
        )
    if odd := [label for label in labels if not isinstance(label, Label)]:
        raise ValueError(f"the labels of groups are strings or ints, got {odd[0]!r}")
    return tuple(labels)


def by_group(
    values: Float[Tensor, "cell prompt"], groups: Sequence[Label] | None
) -> Float[Tensor, "cell prompt_or_group"]:
    """A number for each group, whose mean is that of the prompts and whose spread is that of the groups: the values themselves
    without groups, the means of groups of one size, and else the linearised ratio of sums and sizes (Cochran 1977, 9A.1).

    >>> by_group(torch.tensor([[1.0, 3.0, 6.0, 8.0]]), ["a", "a", "b", "b"])
    tensor([[2., 7.]])
    """
    if groups is None:
        return values
    mean = values.double().mean(1, keepdim=True)
    sums = sums_by_group(values.double() - mean, groups)
    return (mean + sums * sums.shape[1] / len(groups)).to(values.dtype)


def sums_by_group(
    values: Float[Tensor, "cell prompt"], groups: Sequence[Label] | None
) -> Float[Tensor, "cell prompt_or_group"]:
    """The sum over the prompts of each group; the values themselves without groups.

    >>> sums_by_group(torch.tensor([[1.0, 3.0, 6.0]]), ["a", "a", "b"])
    tensor([[4., 6.]])
    """
    if groups is None:
        return values
    names = {label: place for place, label in enumerate(dict.fromkeys(groups))}
    which = torch.tensor([names[label] for label in groups])
    return torch.zeros(len(values), len(names), dtype=values.dtype).index_add_(1, which, values)
