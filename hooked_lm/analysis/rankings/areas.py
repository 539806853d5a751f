"""The areas of MIB's circuit track (Mueller et al. 2025, arXiv:2504.13151) under a curve of faithfulness, and their spread.

Of the circuits of a ranking, f is the faithfulness over the share of edges. CPR (circuit performance ratio) is the area under f,
CMD (circuit-model distance) that between f and 1, both by the trapezoidal rule from the first share to the last. MIB reads them
from two rankings: CPR from the order by signed scores, CMD from that by their size.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of all edges at which MIB measures circuits."""


def check_shares(shares: Sequence[float]) -> None:
    """Raises ValueError unless these are ascending shares, two at least, the last one 1."""
    if len(shares) < 2 or not all(0 < one < other for one, other in pairwise(shares)):
        raise ValueError(f"shares are ascending fractions of all edges, two at least, got {list(shares)}")
    if shares[-1] != 1:
        raise ValueError(f"the last share must be 1, all edges, where faithfulness is 1; got {shares[-1]}")


def areas(
    faithfulness: Float[Tensor, "*ranking share"], shares: Sequence[float] = SHARES
) -> tuple[Float[Tensor, "*ranking"], Float[Tensor, "*ranking"]]:
    """CPR and CMD of curves of faithfulness. Of circuits that are the model, CPR is the width of the shares, and CMD 0.

    >>> cpr, cmd = areas(torch.ones(len(SHARES)))
    >>> round(float(cpr), 3), float(cmd)
    (0.999, 0.0)
    """
    x = torch.tensor(shares, dtype=torch.float64)
    curve = faithfulness.double()
    return torch.trapezoid(curve, x), torch.trapezoid((1 - curve).abs(), x)


def faithfulness_of(
    values: Float[Tensor, "*ranking share prompt"], full: Float[Tensor, " prompt"], empty: Float[Tensor, " prompt"]
) -> Float[Tensor, "*ranking share"]:
    """The share of the difference between no edges and all edges that each circuit makes up: a ratio of means."""
    low = empty.double()
    return (values.double() - low).mean(-1) / (full.double() - low).mean()


def by_prompt(
    values: Float[Tensor, "ranking share prompt"],
    full: Float[Tensor, " prompt"],
    empty: Float[Tensor, " prompt"],
    shares: Sequence[float],
) -> tuple[Float[Tensor, "ranking prompt"], Float[Tensor, "ranking prompt"]]:
    """CPR and CMD as means over prompts: numbers for each prompt whose mean is the area, and whose spread is that of the
    linearised ratios of means (Cochran 1977, 6.3)."""
    curve = faithfulness_of(values, full, empty)
    gap = (full - empty).double()
    residual = (values.double() - empty.double() - curve[..., None] * gap) / gap.mean()
    width = torch.tensor(shares, dtype=torch.float64).diff()
    weights = torch.cat([width, width.new_zeros(1)]) + torch.cat([width.new_zeros(1), width])
    of_share = residual * weights[:, None] / 2
    cpr, cmd = areas(curve, shares)
    side = (1 - curve).sign()[..., None]
    return cpr[:, None] + of_share.sum(1), cmd[:, None] - (side * of_share).sum(1)
