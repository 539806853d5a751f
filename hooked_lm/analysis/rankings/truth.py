"""How well scores find the edges of a circuit that is known."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def auroc(scores: Float[Tensor, " edge"], is_true: Bool[Tensor, " edge"]) -> float:
    """The area under the ROC curve: how often a true edge has a larger score than another one, where equal ones count half.

    Edges with the score NaN are last. Raises ValueError if it is undefined: all scores are equal, or all edges are true or none.

    >>> auroc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))
    0.5
    """
    scores = _checked(scores, is_true, "AUROC")
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    n_true = int(is_true.sum())
    return float((ranks[is_true].sum() - n_true * (n_true + 1) / 2) / (n_true * (len(scores) - n_true)))


def average_precision(scores: Float[Tensor, " edge"], is_true: Bool[Tensor, " edge"]) -> float:
    """The mean of the precision at each true edge, by descending score; equal scores are one step.

    Edges with the score NaN are last. Raises as `auroc`.

    >>> round(
    ...     average_precision(
    ...         torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True])
    ...     ),
    ...     3,
    ... )
    0.833
    """
    scores = _checked(scores, is_true, "average precision")
    _, place, counts = (-scores).unique(return_inverse=True, return_counts=True)
    found = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, is_true.double())
    precision = found.cumsum(0) / counts.cumsum(0)
    return float((precision * found).sum() / found.sum())


def _checked(scores: Float[Tensor, " edge"], is_true: Bool[Tensor, " edge"], name: str) -> Float[Tensor, " edge"]:
    """The scores, with numbers in place of NaN that are less than all others; raises ValueError if the number is undefined."""
    if scores.shape != is_true.shape or scores.ndim != 1:
        raise ValueError(f"scores {list(scores.shape)} and truth {list(is_true.shape)} must be lists of the same edges")
    scores = scores.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if not bool((scores != scores[:1]).any()):
        raise ValueError(f"{name} is undefined: all {len(scores)} scores are equal, so they rank nothing")
    if bool(is_true.all()) or not bool(is_true.any()):
        which = "all edges are" if bool(is_true.all()) else "no edge is"
        raise ValueError(f"{name} is undefined: {which} in the true circuit")
    return scores
