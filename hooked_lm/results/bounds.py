"""Bounds: what values can be at most and at least, and the intervals of those that are shares, or differences of 0/1 numbers.

Wilson's interval (1927, doi:10.1080/01621459.1927.10502953) of a share, and of a difference of paired 0/1 numbers the two of its
shares combined (Newcombe 1998, doi:10.1002/(SICI)1097-0258(19981130)17:22<2635::AID-SIM954>3.0.CO;2-C; Zou and Donner 2008,
doi:10.1002/sim.3095). Of many cells at once Hoeffding's (1963, doi:10.1080/01621459.1963.10500830)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.results.bootstrap import check_interval, wilson_ends
from hooked_lm.results.groups import by_group
from hooked_lm.results.labels import Label

HALVINGS = 60  # of an interval that contains the end: as many as a double has digits, about


class Bounds(NamedTuple):
    """The least and the largest value that is possible; infinite if unknown.

    `is_difference`: values are `least`, their middle or `most`, differences of two numbers that are each one of two, plus the
    middle. Otherwise they are numbers from `least` to `most`, whose mean is a share between both.
    """

    least: float = -math.inf
    most: float = math.inf
    is_difference: bool = False

    @property
    def middle(self) -> float:
        """Of differences, the value of no difference."""
        return (self.least + self.most) / 2

    @property
    def are_finite(self) -> bool:
        """Whether means have the intervals of shares."""
        return math.isfinite(self.most - self.least)

    def interval(
        self,
        values: Float[Tensor, "cell prompt"],
        groups: Sequence[Label] | None,
        level: float = 0.95,
        at_once: bool = False,
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
        """The confidence interval of each cell's mean over prompts, or groups. It stays between the bounds, and has a width even
        if all values are equal.

        With `at_once` for a level so high that all cells contain their means at once. There Wilson's, which is an approximation,
        is too narrow for shares near 0 or 1, and Hoeffding's holds for any share.

        >>> low, high = SHARE.interval(torch.ones(1, 12), None)
        >>> round(float(low), 2), float(high)
        (0.76, 1.0)
        >>> low, high = Bounds(-1, 1, is_difference=True).interval(torch.zeros(1, 12), None)
        >>> round(float(low), 2), round(float(high), 2)
        (-0.24, 0.24)
        """
        check_interval(level)
        shares = [by_group(each, groups) for each in self._shares(values)]
        low, high = self._ends([each.double().mean(1) for each in shares], shares[0].shape[1], level, at_once)
        return low.float(), high.float()

    def prompts_needed(
        self, values: Float[Tensor, "cell prompt"], width: float | int, level: float = 0.95, at_once: bool = False
    ) -> Float[Tensor, " cell"]:
        """The smallest number of prompts for which the interval of the same shares is no wider than `width`; NaN for NaN.

        >>> SHARE.prompts_needed(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), 0.2)
        tensor([93., 16.])
        """
        check_interval(level, width=width)
        means = [each.double().mean(1) for each in self._shares(values)]

        def is_narrow(n: Float[Tensor, " cell"]) -> Tensor:
            low, high = self._ends(means, n, level, at_once)
            return ~(high - low > width)  # also where it is NaN

        most = torch.ones(len(values), dtype=torch.float64)
        while not bool(is_narrow(most).all()):
            most = most.where(is_narrow(most), 2 * most)
        least = (most / 2).floor()
        while bool((most - least > 1).any()):
            middle = ((least + most) / 2).floor().clamp(min=1)
            least, most = least.where(is_narrow(middle), middle), middle.where(is_narrow(middle), most)
        return most.clamp(min=2).where(~means[0].isnan(), torch.nan).float()

    def _shares(self, values: Float[Tensor, "cell prompt"]) -> list[Float[Tensor, "cell prompt"]]:
        """The values from 0 to 1; of differences, which are `most` and which are `least`."""
        if self.is_difference:
            differences = (values - self.middle) / (self.most - self.middle)
            return [differences.clamp(min=0), (-differences).clamp(min=0)]
        return [(values.double() - self.least) / (self.most - self.least)]

    def _ends(
        self, means: list[Float[Tensor, " cell"]], n: int | Float[Tensor, " cell"], level: float, at_once: bool
    ) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
        """The intervals for these means of shares over `n` prompts."""
        if self.is_difference:
            low, high = (hoeffding_difference if at_once else newcombe)(means[0], means[1], n, level)
            return self.middle + low * (self.most - self.middle), self.middle + high * (self.most - self.middle)
        low, high = (hoeffding_ends if at_once else wilson_ends)(means[0], n, level)
        return self.least + (self.most - self.least) * low, self.least + (self.most - self.least) * high


UNBOUNDED, SHARE = Bounds(), Bounds(0.0, 1.0)


def newcombe(
    up: Float[Tensor, " cell"], down: Float[Tensor, " cell"], n: int | Float[Tensor, " cell"], level: float
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """The interval of the difference of two shares of the same `n` prompts that exclude each other, of those that change up and
    of those that change down: the distances to the ends of Wilson's intervals, combined as the errors of correlated numbers."""
    (up_low, up_high), (down_low, down_high) = wilson_ends(up, n, level), wilson_ends(down, n, level)
    correlation = -(up * down / ((1 - up) * (1 - down))).sqrt().nan_to_num(nan=0.0, posinf=1.0).clamp(max=1)

    def reach(of_up: Float[Tensor, " cell"], of_down: Float[Tensor, " cell"]) -> Float[Tensor, " cell"]:
        return (of_up**2 + of_down**2 - 2 * correlation * of_up * of_down).sqrt()

    mean = up - down
    low, high = mean - reach(up - up_low, down_high - down), mean + reach(up_high - up, down - down_low)
    return low.clamp(-1, 1), high.clamp(-1, 1)


def hoeffding_ends(
    mean: Float[Tensor, " cell"], n: int | Float[Tensor, " cell"], level: float
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """The interval of a share outside of which a mean of `n` numbers from 0 to 1 has at most the remaining probability, whatever
    their distribution: n times the divergence of the mean from the share is at most log(2 / (1 - level)) (Hoeffding's first
    theorem)."""
    most = math.log(2 / (1 - level)) / n
    entropy = torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)

    def end(bound: float) -> Float[Tensor, " cell"]:
        inside, outside = mean, torch.full_like(mean, bound)
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            is_inside = entropy - torch.xlogy(mean, middle) - torch.xlogy(1 - mean, 1 - middle) <= most
            inside, outside = middle.where(is_inside, inside), outside.where(is_inside, middle)
        return outside

    return end(0.0), end(1.0)


def hoeffding_difference(
    up: Float[Tensor, " cell"], down: Float[Tensor, " cell"], n: int | Float[Tensor, " cell"], level: float
) -> tuple[Float[Tensor, " cell"], Float[Tensor, " cell"]]:
    """As `newcombe`, from Hoeffding's intervals of both shares, each of which misses half as often (Bonferroni)."""
    (up_low, up_high), (down_low, down_high) = (hoeffding_ends(share, n, (1 + level) / 2) for share in (up, down))
    return up_low - down_high, up_high - down_low
