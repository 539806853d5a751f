"""How many prompts an experiment needs: for an interval this narrow, or to find an effect this large.

Student's test of a mean over n prompts with a standard deviation s notices an effect d with probability P if d sqrt(n) / s is at
least t (1 - 1 / 4f) + z sqrt(1 + t² / 2f), where t is its critical value, f = n - 1 and z the normal quantile of P. That is the
normal approximation of the noncentral t (Abramowitz and Stegun 1964, 26.7.10). For many prompts n = ((t + z) s / d)² + t² / 2
(Guenther 1981, The American Statistician 35, 243-244)."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.bootstrap import TABLE, prompts_needed, students_t
from hooked_lm.results.bounds import Bounds
from hooked_lm.results.groups import by_group
from hooked_lm.results.labels import Label
from hooked_lm.results.sign_flips import fewest_units

Number = float | int
PROBABILITY = 0.8  # with which an effect is to be found


class Aim(NamedTuple):
    """What an experiment is to give: an interval no wider than `width`, or with this `probability` an interval that excludes
    0 if the mean is `effect`. `level` is that of a cell's interval, `of_all` that of all cells at once."""

    width: Number | None
    effect: Number | None
    level: float
    of_all: float
    probability: float = PROBABILITY


def units_needed(
    values: Float[Tensor, "cell prompt"], groups: Sequence[Label] | None, bounds: Bounds, aim: Aim
) -> Float[Tensor, " cell"]:
    """The number of prompts, or of groups, that each cell needs if values vary as much as these.

    Raises ValueError unless either a width or an effect is wanted.
    """
    if (aim.width is None) == (aim.effect is None):
        raise ValueError("give the width of an interval, or effect=, the size of an effect to be found")
    if aim.width is not None and bounds.are_finite:
        return bounds.prompts_needed(values, aim.width, aim.level, aim.level > aim.of_all)
    values = by_group(values, groups)
    deviations = values.double().std(1) if values.shape[1] > 1 else torch.full((len(values),), torch.nan)
    if aim.width is not None:
        return prompts_needed(deviations, aim.width, aim.level)
    assert aim.effect is not None, "one of both is given"
    found = prompts_for_effect(deviations, aim.effect, aim.level, aim.probability)
    return found.clamp(min=fewest_units(1 - aim.of_all))


def prompts_for_effect(
    deviations: Float[Tensor, " cell"], effect: Number, level: float = 0.95, probability: float = PROBABILITY
) -> Float[Tensor, " cell"]:
    """The smallest number of prompts with which a mean effect of this size has an interval that excludes 0 with this
    probability, for values with these standard deviations: 2 for none, NaN for NaN.

    Raises ValueError for an effect of 0, and for a level or a probability outside of (0, 1).

    >>> prompts_for_effect(torch.tensor([0.0, 1.0, 5.0]), 0.5).tolist()
    [2.0, 34.0, 787.0]
    """
    if not 0 < level < 1 or not 0 < probability < 1:
        raise ValueError(f"level and probability must be between 0 and 1, got {level} and {probability}")
    if not abs(effect) > 0:
        raise ValueError(f"effect must be the size of an effect to be found, got {effect}")
    z, freedom = NormalDist().inv_cdf(probability), torch.arange(1.0, TABLE + 1, dtype=torch.float64)
    t = torch.tensor([students_t(level, f) for f in freedom.tolist()], dtype=torch.float64)
    least = t * (1 - 1 / (4 * freedom)) + z * (1 + t**2 / (2 * freedom)).sqrt()  # the effect in standard errors
    found = (least / (freedom + 1).sqrt()).cummin(0).values  # and in deviations, which falls with the number of prompts
    wanted = abs(effect) / deviations.double()
    place = torch.searchsorted(-found, -wanted)
    of_many = NormalDist().inv_cdf((1 + level) / 2)
    many = ((of_many + z) / wanted) ** 2 + of_many**2 / 2
    n = torch.where(place < TABLE, freedom[place.clamp(max=TABLE - 1)] + 1, many.ceil())
    return n.where(~deviations.isnan(), torch.nan).float()
