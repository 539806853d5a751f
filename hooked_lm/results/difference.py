"""The difference of the means of two independent samples, with its interval."""

import math
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.bootstrap import check_interval, students_t, wilson_ends


class Difference(NamedTuple):
    """A difference of means, and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def difference(first: Float[Tensor, " one"], second: Float[Tensor, " other"], level: float = 0.95) -> Difference:
    """The mean of one sample less that of another, independent one.

    Of zeros and ones the interval is Newcombe's, the tenth of his paper
    (1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I), which has a width even if all of a sample are
    equal; of other numbers Welch's (1947, doi:10.1093/biomet/34.1-2.28). NaN without numbers, and ends that are NaN for other
    numbers of which a sample has but one.

    >>> import torch
    >>> found = difference(torch.ones(20), torch.zeros(20))
    >>> [round(number, 2) for number in found]
    [1.0, 0.77, 1.0]
    """
    check_interval(level)
    if not len(first) or not len(second):
        return Difference(math.nan, math.nan, math.nan)
    samples = first.double(), second.double()
    means = [sample.mean() for sample in samples]
    mean = float(means[0] - means[1])
    if all(bool(((sample == 0) | (sample == 1)).all()) for sample in samples):
        pairs = zip(means, samples, strict=True)
        (low, high), (other_low, other_high) = (wilson_ends(share, len(sample), level) for share, sample in pairs)
        below = math.hypot(float(means[0] - low), float(other_high - means[1]))
        above = math.hypot(float(high - means[0]), float(means[1] - other_low))
        return Difference(mean, max(-1.0, mean - below), min(1.0, mean + above))
    if min(len(first), len(second)) < 2:
        return Difference(mean, math.nan, math.nan)
    errors = [float(sample.var()) / len(sample) for sample in samples]
    if not sum(errors):
        return Difference(mean, mean, mean)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(s) - 1) for e, s in zip(errors, samples, strict=True))
    reach = students_t(level, freedom) * math.sqrt(sum(errors))
    return Difference(mean, mean - reach, mean + reach)
