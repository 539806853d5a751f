"""The difference of two samples: Newcombe's published example, Welch's interval as SciPy has it, and how often both hold."""

import math

import pytest
import torch
from scipy import stats

from hooked_lm.results.difference import difference
from tests.close import assert_near


def test_shares_have_the_interval_of_newcombes_paper():
    """Table II (a) of the paper: 56 of 70 against 48 of 80."""
    first, second = torch.arange(70) < 56, torch.arange(80) < 48
    found = difference(first.float(), second.float())
    assert_near(torch.tensor(found), torch.tensor([0.2, 0.0524, 0.3339]), 3e-4, because="the paper has four digits")


def test_equal_samples_of_shares_have_a_width():
    found = difference(torch.ones(10), torch.ones(10))
    assert found.mean == 0
    assert found.low < -0.2
    assert found.high > 0.2


def test_other_numbers_have_welchs_interval():
    first, second = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.linspace(-3, 9, 7)
    expected = stats.ttest_ind(first.double(), second.double(), equal_var=False)
    found = difference(first, second, 0.9)
    low, high = expected.confidence_interval(0.9)
    for end, wanted in ((found.low, low), (found.high, high)):
        assert_near(end - found.mean, wanted - found.mean, 1e-4, because="quantiles are interpolated")


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.6), (0.02, 0.1)])
def test_intervals_contain_the_true_difference_as_often_as_they_say(shares):
    generator, hits = torch.Generator().manual_seed(1), 0
    for _ in range(600):
        first, second = ((torch.rand(40, generator=generator) < share).float() for share in shares)
        found = difference(first, second)
        hits += found.low <= shares[0] - shares[1] <= found.high
    assert 0.92 < hits / 600 < 0.99


def test_what_is_not_known_is_nan():
    assert all(map(math.isnan, difference(torch.ones(3), torch.zeros(0))))
    assert math.isnan(difference(torch.tensor([2.0]), torch.tensor([1.0, 3.0])).low)
    assert difference(torch.tensor([2.0, 2.0]), torch.tensor([5.0, 5.0])) == (-3.0, -3.0, -3.0)
    with pytest.raises(ValueError, match="level"):
        difference(torch.ones(3), torch.ones(3), 1.0)
