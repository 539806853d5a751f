"""Confidence intervals of means over prompts: the percentile bootstrap (Efron 1979, doi:10.1214/aos/1176344552), and Student's
interval (1908, doi:10.1093/biomet/6.1.1) where it is wider, as for few prompts and heavy tails. Wilson's interval (1927,
doi:10.1080/01621459.1927.10502953) of shares."""

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

NUMBERS = 1 << 22  # held at once, about


def bootstrap(
    values: Float[Tensor, "cell prompt"], level: float = 0.95, n_resamples: int = 1000, seed: int = 0
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """The confidence interval of each cell's mean over prompts.

    Each bound is the wider one of two intervals: the bootstrap quantiles, which follow a skewed distribution, and Student's
    interval, which accounts for the uncertain variance of few prompts. Prompts are drawn with replacement, the same for all
    cells, from a separate generator. NaN where a value is not finite, and everywhere for a single prompt. Raises ValueError
    for a level outside of (0, 1) or less than one resample.

    >>> low, high = bootstrap(torch.arange(100.0)[None])
    >>> bool(low < 49.5 < high)
    True
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must be between 0 and 1, got {level}")
    if n_resamples < 1:
        raise ValueError(f"an interval needs resamples, got n_resamples={n_resamples}")
    n_prompts = values.shape[1]
    ends = torch.full((2, len(values)), torch.nan)
    if n_prompts > 1:
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        reach = _students_t(level, n_prompts - 1) / math.sqrt(n_prompts)
        n_cells = max(1, NUMBERS // max(n_prompts, n_resamples))
        for cells in range(0, len(values), n_cells):
            chunk = values[cells : cells + n_cells].double()
            mean = chunk.mean(1, keepdim=True)
            weights = _weights(n_prompts, n_resamples, seed)
            # a mean is a product with how often each prompt was drawn; what is left to round is small
            means = torch.cat([(chunk - mean) @ drawn.T for drawn in weights], 1) + mean
            redrawn, student = means.quantile(tails, 1), chunk.std(1) * reach
            ends[0, cells : cells + n_cells] = redrawn[0].minimum(mean[:, 0] - student)
            ends[1, cells : cells + n_cells] = redrawn[1].maximum(mean[:, 0] + student)
    return ends[0], ends[1]


def wilson(
    values: Float[Tensor, "*cell prompt"], level: float = 0.95
) -> tuple[Float[Tensor, "*cell"], Float[Tensor, "*cell"]]:
    """The confidence interval of each cell's mean of numbers from 0 to 1, such as 1 for right and 0 for wrong.

    It stays between 0 and 1 and has a width even if all numbers are equal. For shares of groups, which vary less than zeros and
    ones with the same mean, it is wider than needed. Raises ValueError for a level outside of (0, 1).

    >>> low, high = wilson(torch.ones(12))
    >>> round(float(low), 2), float(high)
    (0.76, 1.0)
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must be between 0 and 1, got {level}")
    n, z = values.shape[-1], NormalDist().inv_cdf((1 + level) / 2)
    mean = values.double().mean(-1)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * (mean * (1 - mean) / n + z**2 / (4 * n**2)).clamp(min=0).sqrt()
    return (centre - reach).clamp(0, 1).float(), (centre + reach).clamp(0, 1).float()


def _students_t(level: float, freedom: int) -> float:
    """The half-width of Student's interval in standard errors, for a level and degrees of freedom."""
    angle = np.linspace(0, math.pi / 2, 20_001)  # the distribution function, by the angle atan(t / sqrt(freedom))
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, share / share[-1], angle)))


def _weights(n_prompts: int, n_resamples: int, seed: int) -> Iterator[Float[Tensor, "resample prompt"]]:
    """Yields the share of each prompt in the draws, for some resamples at a time."""
    generator = torch.Generator().manual_seed(seed)
    n_rows = max(1, NUMBERS // n_prompts)
    for start in range(0, n_resamples, n_rows):
        shape = (min(n_rows, n_resamples - start), n_prompts)
        drawn = torch.randint(n_prompts, shape, generator=generator)
        yield torch.zeros(shape, dtype=torch.float64).scatter_add_(1, drawn, torch.full(shape, 1 / n_prompts).double())
