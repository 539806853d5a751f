"""Confidence intervals of means: of one cell, of all cells at once, of skewed values, and of prompts in groups."""

import math
import warnings
from itertools import combinations

import pytest
import torch
from torch import Tensor

from hooked_lm.engine.result import SweepResult
from hooked_lm.results import Scores, SkewWarning
from hooked_lm.results import bootstrap as module
from hooked_lm.results.bootstrap import (
    TOO_L_SKEWED,
    TOO_SKEWED,
    bootstrap,
    largest_t,
    prompts_needed,
    simultaneous_level,
    skewness,
    students_t,
)
from hooked_lm.results.groups import by_group
from hooked_lm.results.measures import MetricScores
from tests.close import assert_close, assert_near


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def result(n_prompts: int = 5) -> SweepResult:
    axes = {"layer": [0, 1, 2], "head": [0, 1, 2, 3]}
    return SweepResult(draw(3, 4, n_prompts), axes, draw(n_prompts, seed=1) - 3, draw(n_prompts, seed=2) + 3)


@pytest.fixture
def skewed_values():
    """Their warning is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkewWarning)
        yield


# ---- of one cell -----------------------------------------------------------------------------------------------------


def coverage(values: Tensor, true_mean: float, level: float = 0.95) -> float:
    low, high = bootstrap(values, level)
    return float(((low <= true_mean) & (true_mean <= high)).float().mean())


@pytest.mark.usefixtures("skewed_values")
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_intervals_hold_the_true_mean_as_often_as_they_say(level: float):
    """3,000 experiments of 80 prompts each, drawn from a skewed distribution of mean 2."""
    values = torch.empty(3000, 80).exponential_(0.5, generator=torch.Generator().manual_seed(0))
    assert abs(coverage(values, 2.0, level) - level) < 0.03
    assert coverage(values, 2.5, level) < level - 0.3, "a wrong mean would pass, too"


@pytest.mark.parametrize(("n_prompts", "at_least"), [(2, 0.94), (3, 0.94), (5, 0.94), (20, 0.94), (80, 0.94)])
def test_intervals_of_few_prompts_are_wide_enough(n_prompts: int, at_least: float):
    assert at_least < coverage(draw(3000, n_prompts), 0.0) < 0.97


@pytest.mark.usefixtures("skewed_values")
def test_intervals_of_skewed_numbers_reach_further_on_the_side_of_the_tail():
    values = torch.empty(50, 40).exponential_(1.0, generator=torch.Generator().manual_seed(0)).square()
    low, high = bootstrap(values)
    up, down = high - values.mean(1), values.mean(1) - low
    assert (up / down).mean() > 1.3


def test_the_interval_of_many_prompts_is_that_of_the_normal_distribution():
    values = draw(50, 2000)
    low, high = bootstrap(values, 0.95, n_resamples=4000)
    error = values.std(1) / 2000**0.5
    assert_near((values.mean(1) - low) / error, torch.full((50,), 1.96), 0.05, because="quantiles of 4,000 draws")
    assert_near((high - values.mean(1)) / error, torch.full((50,), 1.96), 0.05, because="quantiles of 4,000 draws")


def test_the_interval_is_that_of_means_of_redrawn_prompts():
    values = torch.cat([draw(4, 3), -draw(4, 3)], 1)  # not skewed
    means = redrawn(values)[0]
    low, high = bootstrap(values, 0.9, 500, seed=3)
    ends = means.quantile(torch.tensor([0.05, 0.95]).double(), 1)
    student = 2.015048 * values.double().std(1) / 6**0.5  # Student's quantile for five degrees of freedom, from a table
    mean = values.double().mean(1)
    expected = torch.stack([ends[0].minimum(mean - student), ends[1].maximum(mean + student)]).float()
    assert_close(torch.stack([low, high]), expected, scale=values)


def redrawn(values: Tensor) -> tuple[Tensor, Tensor]:
    """The means of 500 resamples, and their standard errors."""
    n = values.shape[1]
    drawn = values.double()[:, torch.randint(n, (500, n), generator=torch.Generator().manual_seed(3))]
    return drawn.mean(-1), drawn.std(-1) / n**0.5


def test_skewed_values_have_the_bootstrap_t_too():
    values = torch.tensor([[0.0, 0.1, 0.3, 0.2, 2.0, 0.4], [1.0, 0.9, 0.8, 0.7, -1.0, 0.6]])
    assert skewness(values) > 0.5
    mean, errors = values.double().mean(1, keepdim=True), values.double().std(1, keepdim=True) / 6**0.5
    means, of_means = redrawn(values)
    t = (means - mean) / of_means.maximum(errors / 4)
    low_t, high_t = t.quantile(torch.tensor([0.05, 0.95]).double(), 1)
    low, high = bootstrap(values, 0.9, 500, seed=3)
    assert_close(high[0], (mean - low_t[:, None] * errors)[0, 0].float(), scale=values)  # the tail is above
    assert_close(low[1], (mean - high_t[:, None] * errors)[1, 0].float(), scale=values)  # and below
    assert float(high[0] - mean[0]) > 1.3 * float(2.015048 * errors[0]), "as Student's interval"


def test_the_skewness_is_that_of_half_of_the_cells_that_vary():
    tail = torch.tensor([0.0] * 9 + [1.0])
    c = (tail - 0.1).double()
    expected = float((c**3).mean() / (c**2).mean() ** 1.5)
    flat = torch.tensor([-1.0, 1.0] * 5)
    assert_near(skewness(tail[None]), expected, 1e-5, because="one moment by another")
    assert_near(skewness(-3 * tail[None] + 7), expected, 1e-5, because="one moment by another")
    assert skewness(torch.stack([tail, flat, flat])) < 1e-6
    assert_near(skewness(torch.stack([tail, tail, flat])), expected, 1e-5, because="one moment by another")
    negligible = torch.stack([flat, tail / 1000, torch.full((10,), 3.3), torch.full((10,), torch.nan)])
    assert skewness(negligible) < 1e-6
    assert skewness(torch.full((2, 9), 0.1)) == 0


def test_of_few_prompts_the_l_skewness_counts():
    """A skewness of 0.75 over eight prompts is that of normal numbers in a fifth of samples."""
    lacking = torch.tensor([[-0.3, -0.3, -0.3, -0.2, -0.1, 0.2, 0.5, 0.7]])  # of one sign, another rule would warn
    assert 0.7 < skewness(lacking) < TOO_SKEWED * 8**0.5
    ordered = sorted(lacking[0].tolist())  # the L-moments of all samples of three and two (Hosking 1990)
    triples = [c - 2 * b + a for a, b, c in combinations(ordered, 3)]
    gaps = [b - a for a, b in combinations(ordered, 2)]
    expected = (sum(triples) / len(triples) / 3) / (sum(gaps) / len(gaps) / 2)
    assert_near(skewness(lacking, by_rank=True), expected, 1e-5, because="sums of differences by ranks")
    assert_near(skewness(7 - 3 * lacking, by_rank=True), expected, 1e-5, because="sums of differences by ranks")
    with pytest.warns(SkewWarning):
        Scores(lacking, {"head": [0]}).interval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scores(lacking.repeat(1, 2), {"head": [0]}).interval()


def warned(values: Tensor) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bootstrap(values, n_resamples=1)
    return any(issubclass(one.category, SkewWarning) for one in caught)


def test_few_values_on_one_side_of_0_are_mostly_skewed():
    wide = torch.tensor([[0.1, 0.3, 0.5, 0.8, 1.0, 1.2, 1.6, 1.9]])
    assert skewness(wide, by_rank=True) < TOO_L_SKEWED
    assert 0.6 < wide.std() / wide.mean() < 0.7
    with pytest.warns(
        SkewWarning, match=r"8 prompts .* one side of 0, with a standard deviation of 0.68 of their mean"
    ):
        bootstrap(wide)
    assert warned(-wide), "below 0"
    assert warned(torch.cat([wide, wide, wide - 0.2])), "most cells"
    assert not warned(torch.cat([wide, wide - 0.2, wide - 0.2]))
    assert not warned(wide + 0.3), "a smaller share of the mean"
    assert not warned(wide[:, 1:]), "seven say little"
    assert not warned(wide.repeat(1, 2)), "of 16 the skewness is known"


@pytest.mark.usefixtures("skewed_values")
@pytest.mark.parametrize("deviation", [0.8, 1.0, 1.3])
def test_of_few_values_with_a_tail_what_misses_is_named(deviation: float):
    """800 experiments of eight log-normal numbers: of the last, 84% of the intervals contain the mean."""
    values = (draw(800, 8, seed=1) * deviation).exp()
    low, high = bootstrap(values, n_resamples=400)
    inside, true = 0, math.exp(deviation**2 / 2)
    for i, each in enumerate(values):
        inside += bool(low[i] <= true <= high[i]) or warned(each[None])
    assert inside / 800 > 0.93


@pytest.mark.parametrize("n_prompts", [8, 11, 15, 16])
def test_normal_numbers_are_warned_of_as_rarely_as_by_skewness(n_prompts: int):
    values = draw(4000, n_prompts)

    def share(threshold: float, by_rank: bool) -> float:
        return sum(skewness(one[None], by_rank) > threshold for one in values) / len(values)

    by_rank, by_moment = share(TOO_L_SKEWED, True), share(TOO_SKEWED * n_prompts**0.5, False)
    assert abs(by_rank - by_moment) < 0.015, "two deviations of 4,000 draws"
    assert by_rank < 0.2


@pytest.mark.parametrize(
    ("about", "advice"),
    [
        (
            {"metric": "probability"},
            "use more prompts, or a metric that is less skewed, such as a logit difference .* of a prob",
        ),
        ({"metric": "logit difference"}, "use more prompts, and see which have most of the logit difference: to_data"),
        ({"metric": "log_probability"}, "use more prompts, and see which have most of the log probability: to_data"),
        ({}, "use more prompts, or a metric that is less skewed"),
    ],
)
def test_skewed_values_are_advised_of_what_is_not_done_yet(about: dict[str, str], advice: str):
    tail = torch.tensor([[0.01, 0.02, 0.01, 0.03, 0.02, 0.01, 0.02, 0.9]])
    sweep = SweepResult(tail, {"head": [0]}, torch.zeros(8), about=about)
    with pytest.warns(SkewWarning, match=advice):
        sweep.top()
    wide = torch.tensor([[0.1, 0.3, 0.5, 0.8, 1.0, 1.2, 1.6, 1.9]])
    with pytest.warns(SkewWarning, match=f"one side of 0.*{advice}"):
        SweepResult(wide, {"head": [0]}, torch.zeros(8), about=about).interval()


def test_skewed_values_are_named_from_eight_prompts_on():
    tail = torch.tensor([[0.01, 0.02, 0.01, 0.03, 0.02, 0.01, 0.02, 0.9]])
    with pytest.warns(SkewWarning, match=r"skewed over the 8 prompts .*\(skewness 2.3\).* such as a logit difference"):
        Scores(tail, {"head": [0]}).interval()
    with pytest.warns(SkewWarning):
        Scores(tail, {"head": [0]}).top()
    with pytest.warns(SkewWarning):
        Scores(tail, {"head": [0]}).to_dataframe()
    assert "values are skewed" in Scores(tail, {"head": [0]})._repr_html_(), "what is shown says it and does not warn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scores(tail[:, 2:], {"head": [0]}).interval()  # the skewness of six says little
        Scores(draw(12, 8), {"head": list(range(12))}).interval()
        Scores(torch.full((2, 9), 0.1), {"head": [0, 1]}).interval()


def test_intervals_are_the_same_in_pieces_and_leave_the_global_generator_alone(monkeypatch: pytest.MonkeyPatch):
    values, state = draw(40, 6), torch.random.get_rng_state()
    whole = bootstrap(values)
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(module, "NUMBERS", 6000)  # a thousand resamples of six prompts: still drawn at once
    pieces = bootstrap(values)
    for one, other in zip(whole, pieces, strict=True):
        assert_close(one, other)
    monkeypatch.undo()
    many = draw(20, 2000)  # the bootstrap is the wider one of about half of these
    assert not torch.equal(bootstrap(many, seed=1)[1], bootstrap(many)[1])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """Nothing larger than the bound is made, whatever the number of cells, prompts and resamples."""
    monkeypatch.setattr(module, "NUMBERS", 1000)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out is not values:
                largest = max(largest, out.numel())
            return out

    values = draw(30, 20)
    with Watch():
        low, high = bootstrap(values, n_resamples=200)
    assert largest <= 1000
    assert (low < high).all()


def test_equal_prompts_have_no_width_and_one_prompt_says_nothing():
    values = torch.full((2, 9), 0.1)
    low, high = bootstrap(values)
    assert torch.equal(low, values[:, 0])
    assert torch.equal(high, values[:, 0])
    assert torch.stack(bootstrap(draw(3, 1))).isnan().all()


@pytest.mark.parametrize(
    ("kind", "says"), [({"level": 1.0}, "between 0 and 1, got 1.0"), ({"n_resamples": 0}, "n_resamples=0")]
)
def test_intervals_that_make_no_sense(kind: dict, says: str):
    with pytest.raises(ValueError, match=says):
        result().interval(**kind)


# ---- of all cells at once --------------------------------------------------------------------------------------------


def excludes_zero(low: Tensor, high: Tensor) -> bool:
    return bool(((low > 0) | (high < 0)).any())


@pytest.mark.slow
@pytest.mark.usefixtures("skewed_values")
@pytest.mark.parametrize("n_prompts", [4, 8, 32])
def test_nothing_is_real_in_sweeps_without_effect(n_prompts: int):
    """200 sweeps of 60 cells with common noise: at least one cell excludes 0 in one of twenty, where the intervals of single
    cells do so in most."""
    generator = torch.Generator().manual_seed(n_prompts)
    real, by_itself = 0, 0
    for _ in range(200):
        noise = torch.randn(60, n_prompts, generator=generator) + torch.randn(n_prompts, generator=generator)
        scores = Scores(noise, {"head": list(range(60))})
        table = scores.top(10)
        real += bool(((table.low > 0) | (table.high < 0)).any())
        by_itself += excludes_zero(*scores.interval(n_resamples=50))
    assert real <= 0.05 * 200 + 4, real
    assert by_itself > 0.5 * 200, by_itself


def test_effects_are_real_still():
    values = draw(40, 12) / 4
    values[7] += 3
    table = Scores(values, {"head": list(range(40))}).top(3)
    assert table["head"][0] == 7
    assert table.low[0] > 1
    assert (table.low[1:] < 0).all()


def test_intervals_of_all_cells_contain_those_of_each_and_are_those_of_the_top():
    found = result().effects()
    single, both = found.interval(), found.interval(simultaneous=True)
    assert bool((both[0] < single[0]).all() and (both[1] > single[1]).all())
    table = found.top(12).sort_values(["layer", "head"])
    assert_close(table.low.to_numpy(), both[0].flatten().numpy())
    assert_close(table.high.to_numpy(), both[1].flatten().numpy())
    one = found.select(layer=0, head=0)
    assert_close(torch.stack(one.interval(simultaneous=True)), torch.stack(one.interval()))


@pytest.mark.filterwarnings("ignore::hooked_lm.results.bootstrap.SkewWarning")
def test_the_intervals_of_the_top_do_not_depend_on_how_many_are_asked_for():
    few, many = (
        20 + torch.linspace(-1, 1, 8).repeat(3, 1),
        draw(9, 8, seed=1).exp(),
    )  # the largest cells are not skewed, most others are
    found = Scores(torch.cat([few, many]), {"head": list(range(12))})
    _, high = found.interval(simultaneous=True)
    for n in (1, 2, 3, 5, 12):
        table = found.top(n)
        assert_close(table["high"].tolist(), high[table["head"].tolist()])
    alone = found.select(head=[0, 1, 2]).interval()[1]
    assert not torch.equal(alone, found.interval()[1][:3])  # what is chosen beforehand is judged by itself


def test_each_metric_has_the_intervals_that_it_has_alone():
    values = torch.stack([draw(3, 4, 8), 1000 * draw(3, 4, 8, seed=1).abs().sqrt()])
    axes = {"metric": ["a", "b"], "layer": [0, 1, 2], "head": [0, 1, 2, 3]}
    found = Scores(values, axes)
    for simultaneous in (False, True):
        low, high = found.interval(simultaneous=simultaneous)
        for place, metric in enumerate("ab"):
            alone = found.select(metric=metric).interval(simultaneous=simultaneous)
            assert_close(torch.stack([low[place], high[place]]), torch.stack(alone))


def test_bonferroni_is_the_least():
    values = draw(30, 20)
    level = simultaneous_level(torch.cat([values, torch.ones(5, 20), torch.full((1, 20), torch.nan)]), 0.95)
    assert_near(level, 1 - 0.05 / 30, 1e-9, because="one division")
    low, high = Scores(values, {"head": list(range(30))}).interval(simultaneous=True)
    reach = students_t(level, 19) * values.std(1) / 20**0.5
    assert bool((low <= values.mean(1) - reach + 1e-5).all() and (high >= values.mean(1) + reach - 1e-5).all())


def test_the_largest_t_is_that_of_resamples():
    values = draw(5, 9)
    means, of_means = (torch.empty(5, 300).double() for _ in range(2))
    drawn = values.double()[:, torch.randint(9, (300, 9), generator=torch.Generator().manual_seed(0))]
    means, of_means = drawn.mean(-1) - values.double().mean(1, keepdim=True), drawn.std(-1) / 3
    least = values.double().std(1, keepdim=True) / 3 / 3
    expected = (means / of_means.maximum(least)).abs().amax(0).quantile(0.9)
    assert_near(largest_t(values, 0.9, 300), float(expected), 1e-6, because="doubles")
    assert largest_t(draw(3, 1)) == largest_t(torch.ones(3, 6)) == 0
    holed = torch.cat([values, torch.full((1, 9), torch.nan)])
    assert_near(largest_t(holed, 0.9, 300), float(expected), 1e-6, because="doubles")


def test_figures_and_notebooks_say_which_intervals_they_have():
    found = result()
    assert "95% intervals of all 12 cells at once" in found.plot().data[0].hovertemplate
    assert "95% intervals of all 12 cells at once" in found._repr_html_()
    assert "its 95% interval" in found.select(layer=0, head=0)._repr_html_()
    assert "interval" not in Scores(draw(3, 1), {"head": [0, 1, 2]})._repr_html_()


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_count_and_not_prompts():
    """2,000 cells of six groups of five prompts that differ by group: intervals of prompts contain the mean in two of three."""
    noise = torch.Generator().manual_seed(0)
    values = torch.randn(2000, 6, 1, generator=noise) + 0.3 * torch.randn(2000, 6, 5, generator=noise)
    scores = Scores(values.flatten(1), {"head": list(range(2000))})
    by_name = scores.grouped([name for name in "abcdef" for _ in range(5)])
    assert_close(by_name.mean, scores.mean)

    def covered(found: Scores) -> float:
        low, high = found.interval(n_resamples=200)
        return float(((low < 0) & (high > 0)).float().mean())

    assert 0.94 < covered(by_name) < 0.97
    assert covered(scores) < 0.75
    assert "30 prompts in 6 groups" in repr(by_name)


def test_groups_of_unequal_sizes():
    """The mean is that of the prompts; 2,000 cells."""
    noise = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])
    labels = torch.arange(12).repeat_interleave(sizes)
    values = torch.randn(2000, 12, generator=noise)[:, labels] + 0.3 * torch.randn(2000, len(labels), generator=noise)
    found = by_group(values, labels.tolist())
    assert found.shape == (2000, 12)
    assert_close(found.mean(1), values.mean(1), scale=values)
    low, high = bootstrap(found, n_resamples=200)
    assert 0.91 < float(((low < 0) & (high > 0)).float().mean()) < 0.97


def test_groups_of_one_prompt_change_nothing_and_the_order_of_prompts_nothing():
    found = result(8).effects()
    alone = found.grouped(list(range(8)))
    assert_close(torch.stack(alone.interval()), torch.stack(found.interval()))
    order = torch.tensor([3, 1, 6, 0, 7, 2, 5, 4])
    mixed = Scores(found.values[..., order], found.axes, groups=[place // 2 for place in order.tolist()])
    sorted_ones = Scores(found.values, found.axes, groups=[place // 2 for place in range(8)])
    means = [by_group(each.values.flatten(0, 1), each.groups).sort(1).values for each in (mixed, sorted_ones)]
    assert_close(*means)


def test_one_group_says_nothing_and_groups_stay():
    found = result().grouped(["same"] * 5)
    assert torch.stack(found.interval()).isnan().all()
    assert "in 1 group;" in repr(found)
    kept = result().grouped(list("aabbc"))
    for part in (kept.effects(), kept.normalized(), kept.select(layer=1), kept.effects().select(head=[0, 2])):
        assert part.groups == tuple("aabbc")
    assert kept.grouped(None).groups is None


def test_groups_are_saved(tmp_path):
    kept = result().grouped(torch.tensor([4, 4, 5, 5, 6]))
    kept.save(tmp_path / "sweep")
    assert SweepResult.load(tmp_path / "sweep").groups == (4, 4, 5, 5, 6)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([1, 2], "groups has 2 labels, and there are 5 prompts: give the label of each prompt"),
        ("aabbc", "groups must be a list with a label for each prompt, got 'aabbc'"),
        ([0.5] * 5, "labels of groups are strings or ints, got 0.5"),
    ],
)
def test_groups_that_are_no_labels(groups: object, says: str):
    with pytest.raises(ValueError, match=says):
        result().grouped(groups)


# ---- how many prompts ------------------------------------------------------------------------------------------------


def test_as_many_prompts_as_are_needed_give_the_width():
    few = Scores(draw(40, 30), {"head": list(range(40))})
    n = int(few.power(0.5).median())
    assert 45 < n < 90
    low, high = Scores(draw(40, n, seed=5), few.axes).interval()
    assert_near(float((high - low).mean()), 0.5, 0.04, because="deviations of 40 draws")
    all_at_once = few.power(0.5, simultaneous=True)
    assert bool((all_at_once > 2 * few.power(0.5)).all())
    assert bool((few.power(0.25) > 3.5 * few.power(0.5)).all())


def test_the_needed_number_is_the_smallest():
    deviations = torch.tensor([0.3, 1.0, 3.4, 3.6, 10.0])
    for deviation, n in zip(deviations.tolist(), prompts_needed(deviations, 1.0).tolist(), strict=True):
        widths = [2 * students_t(0.95, int(m) - 1) * deviation / m**0.5 for m in (max(2, n - 1), n)]
        assert widths[1] <= 1.0
        assert widths[0] > 1.0 or n == 2


def test_power_of_groups_missing_cells_and_widths_that_are_none():
    values = torch.cat([draw(1, 6), torch.full((1, 6), torch.nan), torch.ones(1, 6)])
    scores = Scores(values, {"head": [0, 1, 2]})
    found = scores.power(1.0)
    assert found[0] > 2
    assert math.isnan(float(found[1]))
    assert float(found[2]) == 2
    groups = scores.grouped(list("aabbcc")).power(1.0)
    assert float(groups[0]) != float(found[0])
    assert Scores(draw(3, 1), {"head": [0, 1, 2]}).power(1.0).isnan().all()
    with pytest.raises(ValueError, match="width of an interval must be positive, got 0"):
        scores.power(0)


def test_intervals_of_shares_stay_between_0_and_1_for_all_cells_at_once() -> None:
    """With a width where all are right."""
    values = torch.ones(4, 10)
    values[1, :3] = values[2, 4] = 0
    found = MetricScores(values, {"layer": [0, 1, 2, 3]}, [True])
    low, high = found.interval(simultaneous=True)
    alone_low, alone_high = found.interval()
    assert (low < alone_low).all()
    assert ((high > alone_high) | (high == 1)).all()
    assert low.min() > 0
    assert high.max() <= 1
