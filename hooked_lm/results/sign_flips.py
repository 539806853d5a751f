"""p-values of means by flipping signs, one by one and corrected for the number of cells.

If a cell has no effect, the effect on a pair of prompts is as likely to be x as -x. So the signs of pairs are flipped, in all
cells together, which keeps how cells depend on each other (Fisher 1935; Winkler et al. 2014,
doi:10.1016/j.neuroimage.2014.01.060). Corrections: the step-down of the largest |t| (Westfall and Young 1993; Romano and Wolf
2005, doi:10.1198/016214504000000539), Holm (1979), Benjamini and Hochberg (1995, doi:10.1111/j.2517-6161.1995.tb02031.x)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.results.bootstrap import NUMBERS

CORRECTIONS = {
    "max": "by the largest |t| of all cells",
    "holm": "by Holm's rule",
    "bh": "by the false discovery rate",
}
FLIPS, MOST_FLIPS = 10_000, 100_000  # by default, for the largest |t| and for corrections of single p-values
FEWEST_FLIPS, MOST_DRAWS = 1_000, 1 << 26  # of the largest |t| of many cells: flips, and cells in flips
PER_CELL = 2  # flips beyond those without which no cell passes Holm's rule
ROUNDING = 1e-5  # of the largest effect; cells with smaller ones have none
TIE = 1 - 1e-5  # of a statistic: those of flips that differ less are equal to it, up to rounding


class FlipTest(NamedTuple):
    """The p-value of each cell alone, the p-value that is corrected for all cells, and how many flips they are of."""

    p: Float[Tensor, " cell"]
    adjusted: Float[Tensor, " cell"]
    n_flips: int


def flip_test(
    values: Float[Tensor, "cell unit"],
    level: float = 0.05,
    correction: str = "max",
    n_flips: int | None = None,
    seed: int = 0,
    counted: str = "pair",
) -> FlipTest:
    """Whether the means over units, such as pairs of prompts, differ from 0.

    The statistic is |t|. All 2^(n-1) flips of n units are tried if they are no more than `n_flips`, else so many at random,
    with the values as they are among them. p is the share of flips with a |t| that is as large. Cells with a value that is
    not finite have p NaN, and those without any effect, up to a hundred-thousandth of the largest, 1; neither counts for the
    correction.

    Raises ValueError for an unknown correction, for a level outside of (0, 1), and if no cell could pass: with too few units
    or flips.

    >>> found = flip_test(torch.tensor([[1.0, 2, 1, 2, 1, 2], [1.0, -2, 1, -2, 1, 2]]))
    >>> found.p.tolist(), found.n_flips
    ([0.03125, 1.0], 32)
    """
    _check(values.shape[1], level, correction, n_flips, counted)
    is_known, is_tested = values.isfinite().all(1), has_effect(values)
    n_cells = max(1, int(is_tested.sum()))
    if n_flips is None:
        n_flips = _flips(n_cells, level, correction)
    n_all = 1 << (values.shape[1] - 1)
    n_flips = min(n_flips, n_all)
    _check_reachable(n_cells if correction == "holm" else 1, values.shape[1], n_all, n_flips, level, counted)
    p, adjusted = (torch.ones(len(values), dtype=torch.float64).where(is_known, torch.nan) for _ in range(2))
    if bool(is_tested.any()):
        alone, of_all = _p_values(values[is_tested].double(), n_flips, n_all, seed)
        p[is_tested], adjusted[is_tested] = alone, of_all if correction == "max" else corrected(alone, correction)
    return FlipTest(p.float(), adjusted.float(), n_flips)


def has_effect(values: Float[Tensor, "cell unit"]) -> Bool[Tensor, " cell"]:
    """Which cells have an effect on some unit that is more than rounding, and no missing value."""
    sizes = values.abs().amax(1).where(values.isfinite().all(1), 0.0)
    return sizes > ROUNDING * sizes.max() if len(sizes) else sizes.bool()


def fewest_units(level: float) -> int:
    """The smallest number of units with a p-value that is no larger than this.

    >>> fewest_units(0.05), fewest_units(0.5)
    (6, 2)
    """
    return 1 + max(1, math.ceil(-math.log2(level) - 1e-9))


def corrected(p: Float[Tensor, " cell"], correction: str) -> Float[Tensor, " cell"]:
    """p-values corrected for their number, by "holm" (no false one in 1 - level of all cases) or "bh" (the share of false
    ones).

    >>> [
    ...     [
    ...         round(one, 3)
    ...         for one in corrected(torch.tensor([0.01, 0.04, 0.03]), name).tolist()
    ...     ]
    ...     for name in ("holm", "bh")
    ... ]
    [[0.03, 0.06, 0.06], [0.03, 0.04, 0.04]]
    """
    order, n = p.argsort(), len(p)
    rank = torch.arange(1, n + 1, dtype=p.dtype)
    if correction == "holm":
        ordered = ((n + 1 - rank) * p[order]).cummax(0).values
    else:
        ordered = (n / rank * p[order]).flip(0).cummin(0).values.flip(0)
    return torch.empty_like(p).scatter_(0, order, ordered.clamp(max=1))


def _flips(n_cells: int, level: float, correction: str) -> int:
    """How many flips there are by default."""
    if correction == "max":
        return max(FEWEST_FLIPS, math.ceil(2 / level), min(FLIPS, MOST_DRAWS // n_cells))
    return max(FLIPS, min(MOST_FLIPS, math.ceil(PER_CELL * n_cells / level)))


def _p_values(
    values: Float[Tensor, "cell unit"], n_flips: int, n_all: int, seed: int
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """The p-value of each cell alone, and that of the step-down largest |t|: a cell is compared with the largest of the cells
    that are no larger than it.

    Flips do not change the squares, so |t| rises with the sum over their root, which is compared instead.
    """
    scaled = (values / values.square().sum(1, keepdim=True).sqrt()).float()
    found = scaled.sum(1).abs()
    order = found.argsort(stable=True)
    scaled, least = scaled[order], TIE * found[order][:, None]
    counts = torch.zeros(2, len(values), dtype=torch.float64)
    for signs in _signs(values.shape[1], n_flips, n_all, seed, max(1, NUMBERS // len(values))):
        flipped = (scaled @ signs.T).abs()
        counts[0] += (flipped >= least).sum(1)
        counts[1] += (flipped.cummax(0).values >= least).sum(1)
    alone, of_all = counts / n_flips
    of_all = of_all.flip(0).cummax(0).values.flip(0)  # no smaller than that of a larger effect
    return torch.empty_like(alone).scatter_(0, order, alone), torch.empty_like(of_all).scatter_(0, order, of_all)


def _signs(n_units: int, n_flips: int, n_all: int, seed: int, at_once: int) -> Iterator[Float[Tensor, "flip unit"]]:
    """Yields the signs of the units, 1 or -1, for some flips at a time; the first flip is none, and the first unit keeps its
    sign, as -t counts as t."""
    generator, is_whole = torch.Generator().manual_seed(seed), n_flips == n_all
    for start in range(0, n_flips, at_once):
        stop = min(start + at_once, n_flips)
        if is_whole:
            bits = (torch.arange(start, stop)[:, None] >> torch.arange(n_units - 1)) & 1
        else:
            bits = torch.randint(2, (stop - start, n_units - 1), generator=generator)
            bits[0] = bits[0] if start else 0
        yield torch.cat([torch.ones(stop - start, 1), 1 - 2 * bits], 1)


def _check(n_units: int, level: float, correction: str, n_flips: int | None, counted: str) -> None:
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(map(repr, CORRECTIONS))}, got {correction!r}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, the share of errors that is allowed, got {level}")
    if n_flips is not None and n_flips < 1:
        raise ValueError(f"n_permutations must be at least 1, got {n_flips}")
    if n_units < 2:
        or_metric = "" if counted == "group" else f", or the metric has one number for all {counted}s"
        raise ValueError(
            f"significance needs several {counted}s, there is one{or_metric}: give at least {fewest_units(level)} {counted}s, "
            "and a metric with a number for each"
        )


def _check_reachable(n_cells: int, n_units: int, n_all: int, n_flips: int, level: float, counted: str) -> None:
    """Raises ValueError if the smallest p-value, times the number of cells by which it is multiplied, is above the level."""
    if n_cells / n_flips <= level:
        return
    of = f" of {n_cells:,} cells, which Holm's rule multiplies by their number," if n_cells > 1 else ""
    or_max = ", or correction='max'" if n_cells > 1 else ""
    if n_cells / n_all > level:
        needed = fewest_units(level / n_cells)
        raise ValueError(
            f"{n_units} {counted}s give no p{of} below {1 / n_all:.2g}: for level {level:g} give at least {needed} {counted}s"
            f"{or_max}"
        )
    raise ValueError(
        f"{n_flips:,} permutations give no p{of} below {1 / n_flips:.2g}: for level {level:g} give n_permutations="
        f"{math.ceil(n_cells / level):,} or more{or_max}"
    )
