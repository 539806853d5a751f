"""Confidence intervals of means over prompts.

Student's interval (1908, doi:10.1093/biomet/6.1.1), and where they are wider the percentile bootstrap (Efron 1979,
doi:10.1214/aos/1176344552) and, of skewed values, the bootstrap-t (Hall 1988, doi:10.1214/aos/1176350933). Intervals of many
cells at once: Bonferroni's (Dunn 1961, doi:10.1080/01621459.1961.10482090), and where it is wider that of the largest |t| of
resamples. Wilson's interval (1927, doi:10.1080/01621459.1927.10502953) of shares. Skewness is that of moments, and of few
prompts the L-skewness (Hosking 1990, doi:10.1111/j.2517-6161.1990.tb01775.x)."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.callers import warn_caller

NUMBERS = 1 << 22  # held at once, about
SKEWED = 0.5  # the skewness from which on the bootstrap-t counts, and
TOO_SKEWED = 0.28  # times the root of the number of prompts: that from which on even it holds too few means
TOO_L_SKEWED = (
    0.265  # the same of the L-skewness: as many samples of normal numbers exceed either, of eight to 16 prompts
)
TOO_WIDE = 0.6  # the standard deviation in means: of fewer than 16 that are all on one side of 0
FEWEST_PROMPTS, ENOUGH_PROMPTS = 4, 8  # the skewness of fewer is chance: to widen intervals, and to warn
MANY_PROMPTS = 16  # from which on the skewness says more than the L-skewness, as values of the tail are among them
SMALLEST_ERROR = (
    0.25  # of a resample, in standard errors of the sample: else a few equal values make an interval endless
)
SMALLEST_OF_ALL = 1 / 3  # the same for the largest |t|, of which the tail counts more
MOST_DRAWS = 1 << 26  # of cells in resamples, to find the largest |t|
FEWEST_RESAMPLES = 200
LEAST_SKEWED = ("logit", "log prob", "loss")  # in the names of metrics for which no other is less skewed
TABLE = 200  # numbers of prompts for which Student's quantile is computed


class SkewWarning(UserWarning):
    """Values are so skewed that intervals of their means contain the true ones less often than their level says."""


class Resampling(NamedTuple):
    """How intervals are made: their level, the number of resamples of the bootstrap, and the seed of its draws."""

    level: float = 0.95
    n_resamples: int = 1000
    seed: int = 0


def bootstrap(
    values: Float[Tensor, "cell prompt"],
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    chosen: Int[Tensor, " chosen"] | None = None,
    measure: str = "",
) -> tuple[Float[Tensor, " chosen"], Float[Tensor, " chosen"]]:
    """The confidence interval of each cell's mean over prompts, or of the `chosen` cells alone: the same as among all.

    Each bound is the wider one of two intervals: the bootstrap quantiles, and Student's interval, which accounts for the
    uncertain variance of few prompts. If half of the cells or more have a skewness above 0.5, over four prompts or more, the
    bootstrap-t is a third one: it divides the mean of each resample by its own standard error, and so reaches far on the side of
    the tail. Prompts are drawn with replacement, the same for all cells, from a separate generator. NaN where a value is not
    finite, and everywhere for a single prompt.

    Warns (SkewWarning) of a skewness above 0.28 times the root of the number of prompts (1.1 for 16, 2.2 for 64), as the error of
    the level falls with that root. The skewness of fewer than 16 is too small where they lack the tail, and at most 2.3 of eight:
    from eight on, it warns of an L-skewness (Hosking 1990) above 0.265, which normal numbers exceed as rarely, and of values on
    one side of 0 with a standard deviation above 0.6 of their mean. The warning advises by the `measure`, the name of what the
    values are. Raises ValueError for a level outside of (0, 1) or less than one resample.

    >>> low, high = bootstrap(torch.arange(100.0)[None])
    >>> bool(low < 49.5 < high)
    True
    """
    check_interval(level, n_resamples)
    n_prompts = values.shape[1]
    of_all, values = values, values if chosen is None else values[chosen]
    ends = torch.full((2, len(values)), torch.nan)
    if n_prompts > 1:
        is_skewed = warn_if_skewed(of_all, measure) > SKEWED and n_prompts >= FEWEST_PROMPTS
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        student = students_t(level, n_prompts - 1)
        for cells in _chunks(values, n_resamples):
            mean, errors, part = _centred(values[cells])
            weights = _weights(n_prompts, n_resamples, seed)
            # a mean is a product with how often each prompt was drawn; what is left to round is small
            means, of_means = (
                _resampled(part, SMALLEST_ERROR * errors, weights) if is_skewed else (_means(part, weights), None)
            )
            reach = (student * errors)[:, 0]
            low, high = means.quantile(tails, 1)
            low, high = low.minimum(-reach), high.maximum(reach)
            if of_means is not None:
                t_low, t_high = (means / of_means).quantile(tails, 1) * errors[:, 0]
                low, high = low.minimum(-t_high), high.maximum(-t_low)
            ends[:, cells] = torch.stack([mean[:, 0] + low, mean[:, 0] + high]).float()
    return ends[0], ends[1]


def simultaneous_level(values: Float[Tensor, "cell prompt"], level: float) -> float:
    """The level of each cell's interval for which all of them contain their means at once at this level, by Bonferroni.

    Cells that are the same for all prompts do not count, nor do those with a value that is not finite.

    >>> round(simultaneous_level(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 5.0]]), 0.9), 3)
    0.95
    """
    n_cells = int(((values != values[:, :1]).any(1) & values.isfinite().all(1)).sum())
    return 1 - (1 - level) / max(1, n_cells)


def largest_t(
    values: Float[Tensor, "cell prompt"], level: float = 0.95, n_resamples: int = 1000, seed: int = 0
) -> float:
    """The number of standard errors within which the means of all cells are at once, in this share of the resamples.

    Of each resample the cell counts whose mean is farthest from that of the prompts, in standard errors of the resample, which
    count as at least a third of those of the prompts. Resamples are fewer for many cells. 0 for a single prompt, and for cells
    that do not vary; cells with a value that is not finite do not count. Raises as `bootstrap`.
    """
    check_interval(level, n_resamples)
    n_prompts = values.shape[1]
    n_resamples = max(min(n_resamples, FEWEST_RESAMPLES), min(n_resamples, MOST_DRAWS // max(1, len(values))))
    found = torch.zeros(n_resamples, dtype=torch.float64)
    if n_prompts > 1:
        for cells in _chunks(values, n_resamples):
            _, errors, part = _centred(values[cells])
            least = SMALLEST_OF_ALL * errors
            means, of_means = _resampled(part, least, _weights(n_prompts, n_resamples, seed))
            found = found.maximum((means / of_means).abs().nan_to_num(nan=0.0, posinf=0.0).amax(0))
    return float(found.quantile(level))


def skewness(values: Float[Tensor, "cell prompt"], by_rank: bool = False) -> float:
    """The median over cells of the size of the skewness over prompts: the third moment in standard deviations, or `by_rank` the
    L-skewness.

    Cells that vary less than a hundredth of the one that varies most do not count, nor do those that vary by rounding. 0 for
    none.

    >>> (
    ...     skewness(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])),
    ...     round(skewness(torch.tensor([[0.0, 0.0, 0.0, 1.0]])), 2),
    ... )
    (0.0, 1.15)
    """
    of_cells, deviations, sizes = [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)]
    for cells in _chunks(values, 1):
        mean, _, part = _centred(values[cells])
        spread = part.square().mean(1).sqrt()
        of_cells.append((_l_skewness(part) if by_rank else (part**3).mean(1) / spread**3).float())
        deviations.append(spread.float())
        sizes.append(mean[:, 0].abs().float())
    spread = torch.cat(deviations).nan_to_num(nan=0.0, posinf=0.0)
    if not bool((spread > 0).any()):
        return 0.0
    live = (spread > spread.amax() / 100) & (spread > 1e-6 * torch.cat(sizes))
    found = torch.cat(of_cells)[live].abs().sort().values
    return float(found[len(found) // 2] + found[(len(found) - 1) // 2]) / 2 if len(found) else 0.0


def _l_skewness(centred: Float[Tensor, "cell prompt"]) -> Float[Tensor, " cell"]:
    """The third L-moment in second ones (Hosking 1990), of three prompts or more, from -1 to 1. Both are sums of values by rank:
    without powers, few prompts estimate them without bias, and the largest value counts less."""
    n = centred.shape[1]
    rank = torch.arange(n, dtype=torch.float64)
    ordered = centred.sort(1).values
    once, twice = rank / (n - 1), rank * (rank - 1) / ((n - 1) * (n - 2))
    return 3 * (ordered @ twice) / (ordered @ once) - 3


def warn_if_skewed(values: Float[Tensor, "cell prompt"], measure: str = "") -> float:
    """Warns if intervals of the means contain the true ones less often than their level says; returns the skewness."""
    found, n_prompts = skewness(values), values.shape[1]
    if n_prompts >= MANY_PROMPTS:
        is_too_skewed = found > TOO_SKEWED * n_prompts**0.5
    else:
        is_too_skewed = n_prompts >= ENOUGH_PROMPTS and skewness(values, by_rank=True) > TOO_L_SKEWED
    if is_too_skewed:
        what = f"are skewed over the {n_prompts} prompts or groups (skewness {found:.2g}): a few have most of the sum"
        _warn(what, measure)
    else:
        warn_if_one_sided(values, measure)
    return found


def warn_if_one_sided(values: Float[Tensor, "cell prompt"], measure: str = "") -> None:
    """Warns of eight to 15 prompts whose values, in half of the cells, are on one side of 0 with a standard deviation above 0.6
    of their mean: as probabilities and divergences they are mostly skewed, and so few lack the tail that would show it."""
    n_prompts = values.shape[1]
    if not ENOUGH_PROMPTS <= n_prompts < MANY_PROMPTS:
        return
    wide: list[Tensor] = []
    for cells in _chunks(values, 1):
        mean, errors, _ = _centred(values[cells])
        on_one_side = (values[cells] * mean.sign() >= 0).all(1)
        spread = (errors / mean.abs())[:, 0] * n_prompts**0.5
        wide.append(spread.where(on_one_side, 0.0)[(errors > 0)[:, 0]])
    found = torch.cat(wide)
    if len(found) and float(found.median()) > TOO_WIDE:
        _warn(
            f"over the {n_prompts} prompts or groups are on one side of 0, with a standard deviation of "
            f"{float(found.median()):.2g} of their mean: such values are mostly skewed, and so few lack the tail",
            measure,
        )


def _warn(what: str, measure: str) -> None:
    if any(name in measure for name in LEAST_SKEWED):
        advice = f", and see which have most of the {measure}: to_dataframe(per_prompt=True)"
    else:
        advice = (
            ", or a metric that is less skewed, such as a logit difference or log-probability instead of a "
            f"{measure or 'probability'}"
        )
    warn_caller(
        f"the values {what}, and intervals contain the true means less often than their level says; use more prompts{advice}",
        SkewWarning,
    )


@contextmanager
def in_words() -> Iterator[list[str]]:
    """Skewed values are not warned of inside this context: the list that it gives has a word about them after it. For what is
    shown, which must not warn."""
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SkewWarning)
        yield words
    if any(issubclass(one.category, SkewWarning) for one in caught):
        words.append("values are skewed, so intervals may be too narrow")


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
    check_interval(level)
    low, high = wilson_ends(values.double().mean(-1), values.shape[-1], level)
    return low.float(), high.float()


def wilson_ends(
    mean: Float[Tensor, "*cell"], n: int | Float[Tensor, "*cell"], level: float
) -> tuple[Float[Tensor, "*cell"], Float[Tensor, "*cell"]]:
    """Wilson's interval of a share, for its mean over `n` prompts."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * (mean * (1 - mean) / n + z**2 / (4 * n**2)).clamp(min=0).sqrt()
    return (centre - reach).clamp(0, 1), (centre + reach).clamp(0, 1)


def students_t(level: float, freedom: float | int) -> float:
    """The half-width of Student's interval in standard errors, for a level and degrees of freedom.

    >>> round(students_t(0.95, 7), 3)
    2.365
    """
    angle = np.linspace(0, math.pi / 2, 20_001)  # the distribution function, by the angle atan(t / sqrt(freedom))
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, share / share[-1], angle)))


# ---- how many prompts ------------------------------------------------------------------------------------------------------


def prompts_needed(
    deviations: Float[Tensor, " cell"], width: float | int, level: float = 0.95
) -> Float[Tensor, " cell"]:
    """The smallest number of prompts for which Student's interval of a mean is no wider than `width`, for values with these
    standard deviations: 2 for none, NaN for NaN. Raises ValueError for a width that is not positive.

    >>> prompts_needed(torch.tensor([0.0, 1.0, 10.0]), 1.0).tolist()
    [2.0, 18.0, 1540.0]
    """
    check_interval(level, width=width)
    few = torch.arange(2.0, TABLE + 2, dtype=torch.float64)
    widths = torch.tensor([2 * students_t(level, int(n) - 1) for n in few]) / few.sqrt()  # in deviations
    wanted = width / deviations.double()
    place = torch.searchsorted(-widths, -wanted)  # the widths fall
    z = NormalDist().inv_cdf((1 + level) / 2)
    many = (2 * z / wanted) ** 2 + (z**2 + 1) / 2  # t is z + (z³ + z) / 4n, up to 1 / n²
    found = torch.where(place < TABLE, few[place.clamp(max=TABLE - 1)], many.ceil())
    return found.where(~deviations.isnan(), torch.nan).float()


# ---- resamples -----------------------------------------------------------------------------------------------------------


def check_interval(level: float, n_resamples: int = 1, width: float | int = 1) -> None:
    """Raises ValueError for a level, a number of resamples or a width that no interval has."""
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must be between 0 and 1, got {level}")
    if n_resamples < 1:
        raise ValueError(f"an interval needs resamples, got n_resamples={n_resamples}")
    if not width > 0:
        raise ValueError(f"the width of an interval must be positive, got {width}")


def _chunks(values: Float[Tensor, "cell prompt"], n_resamples: int) -> Iterator[slice]:
    """The cells, some at a time."""
    n_cells = max(1, NUMBERS // max(values.shape[1], n_resamples))
    for start in range(0, len(values), n_cells):
        yield slice(start, start + n_cells)


def _centred(
    values: Float[Tensor, "cell prompt"],
) -> tuple[Float[Tensor, "cell 1"], Float[Tensor, "cell 1"], Float[Tensor, "cell prompt"]]:
    """The mean of each cell, its standard error, and the values minus it."""
    values = values.double()
    mean = values.mean(1, keepdim=True)
    errors = values.std(1, keepdim=True, correction=min(1, values.shape[1] - 1)) / math.sqrt(values.shape[1])
    return mean, errors, values - mean


def _means(
    centred: Float[Tensor, "cell prompt"], weights: Iterator[Float[Tensor, "some prompt"]]
) -> Float[Tensor, "cell resample"]:
    return torch.cat([centred @ drawn.T for drawn in weights], 1)


def _resampled(
    centred: Float[Tensor, "cell prompt"],
    least: Float[Tensor, "cell 1"],
    weights: Iterator[Float[Tensor, "some prompt"]],
) -> tuple[Float[Tensor, "cell resample"], Float[Tensor, "cell resample"]]:
    """The means of resamples, and their standard errors, which count as at least `least`."""
    n_prompts, square = centred.shape[1], centred.square()
    both = [(centred @ drawn.T, square @ drawn.T) for drawn in weights]
    means, squares = (torch.cat(parts, 1) for parts in zip(*both, strict=True))
    of_means = ((squares - means**2).clamp(min=0) / (n_prompts - 1)).sqrt()
    return means, of_means.maximum(least).clamp(min=torch.finfo(torch.float64).tiny)


def _weights(n_prompts: int, n_resamples: int, seed: int) -> Iterator[Float[Tensor, "resample prompt"]]:
    """Yields the share of each prompt in the draws, for some resamples at a time."""
    generator = torch.Generator().manual_seed(seed)
    n_rows = max(1, NUMBERS // n_prompts)
    for start in range(0, n_resamples, n_rows):
        shape = (min(n_rows, n_resamples - start), n_prompts)
        drawn = torch.randint(n_prompts, shape, generator=generator)
        yield torch.zeros(shape, dtype=torch.float64).scatter_add_(1, drawn, torch.full(shape, 1 / n_prompts).double())
