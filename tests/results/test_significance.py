"""Which cells have an effect: p-values by flipping signs, their corrections, and how often they are wrong."""

import math
import warnings
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import Attribution
from hooked_lm.demo import experiment
from hooked_lm.engine.result import SweepResult
from hooked_lm.results import Scores, SkewWarning
from hooked_lm.results.power import prompts_for_effect
from hooked_lm.results.sign_flips import CORRECTIONS, TIE, corrected, flip_test
from hooked_lm.results.significance import Significance
from tests.close import assert_close, assert_near


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sweep(effects: Tensor) -> SweepResult:
    return SweepResult(effects + 3.0, {"cell": list(range(len(effects)))}, torch.full((effects.shape[1],), 3.0))


# ---- p-values --------------------------------------------------------------------------------------------------------


def by_definition(values: Tensor) -> tuple[list[float], list[float]]:
    """The share of all flips with a |t| as large, and with a largest |t| of the cells that are no larger."""
    n = values.shape[1]

    def size(flipped: Tensor) -> Tensor:
        return (flipped.mean(1) / flipped.std(1)).abs()

    every = [size(values.double() * torch.tensor(signs)) for signs in product((1.0, -1.0), repeat=n)]
    own = size(values.double())
    alone = [sum(bool(one[i] >= own[i] * TIE) for one in every) / 2**n for i in range(len(own))]
    of_all = [sum(bool(one[own <= own[i]].max() >= own[i] * TIE) for one in every) / 2**n for i in range(len(own))]
    order = own.argsort(descending=True).tolist()
    for before, after in pairwise(order):
        of_all[after] = max(of_all[before], of_all[after])
    return alone, of_all


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(6, 8), shift=st.floats(0, 2))
def test_p_values_are_those_of_the_definition(seed: int, n: int, shift: float):
    values = draw(4, n, seed=seed)
    values[0] += shift
    found = flip_test(values)
    alone, of_all = by_definition(values)
    assert found.n_flips == 2 ** (n - 1)
    for mine, theirs in (
        (found.p, alone),
        (found.adjusted, of_all),
    ):  # up to a flip and its mirror that are ties by rounding
        assert float((mine - torch.tensor(theirs)).abs().max()) < 3 / 2**n


def test_flips_at_random_are_near_all_flips():
    values = draw(5, 14) + torch.tensor([0.0, 0.3, 0.6, 0.9, 1.2])[:, None]
    exact, some = flip_test(values, n_flips=1 << 13), flip_test(values, n_flips=4000, seed=3)
    assert exact.n_flips == 1 << 13
    assert float((exact.p - some.p).abs().max()) < 0.03
    assert float((exact.adjusted - some.adjusted).abs().max()) < 0.03
    assert not torch.equal(some.p, flip_test(values, n_flips=4000, seed=4).p)
    assert torch.equal(some.p, flip_test(values, n_flips=4000, seed=3).p)


def test_chunks_of_flips_are_those_of_one():
    values = draw(40, 20)
    whole = flip_test(values, n_flips=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hooked_lm.results.sign_flips.NUMBERS", 40 * 300)
        parts = flip_test(values, n_flips=2000)
    assert float((whole.p - parts.p).abs().max()) < 0.05
    assert parts.p.min() >= 1 / 2000


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_corrections_are_ordered(seed: int):
    """The false discovery rate is the mildest, and none is below the p-value alone. Sizes and signs of cells change nothing."""
    values = draw(6, 12, seed=seed) + draw(6, 1, seed=seed + 1)
    p, of_max, n_flips = flip_test(values)
    assert n_flips == 1 << 11
    holm, bh = (flip_test(values, correction=name).adjusted for name in ("holm", "bh"))
    assert bool((p <= bh).all() and (bh <= holm + 1e-6).all() and (p <= of_max).all())
    scaled = flip_test(values * torch.tensor([1.0, -1, 10, 0.1, -5, 3])[:, None])
    assert_near(
        scaled.adjusted, of_max, 0.01, because="flips whose statistics are equal up to rounding may change places"
    )


def test_cells_that_are_alike_cost_nothing_by_the_largest_t():
    one = draw(1, 16) + 0.8
    copies = one.expand(50, 16)
    alone = flip_test(one).p[0]
    assert alone < 0.05
    assert_close(flip_test(copies).adjusted, alone.expand(50))
    assert float(flip_test(copies, correction="holm").adjusted.min()) > min(1.0, 40 * float(alone))


def test_cells_without_a_value_or_an_effect_do_not_count():
    values = draw(5, 12) + 0.5
    more = torch.cat([values, torch.zeros(3, 12), torch.full((2, 12), torch.nan), 1e-7 * draw(2, 12)])
    more[9, 1:] = 1.0  # one prompt has no value
    for correction in CORRECTIONS:
        found, alone = flip_test(more, correction=correction), flip_test(values, correction=correction)
        assert_close(found.adjusted[:5], alone.adjusted)
        assert found.p[5:8].tolist() == [1.0] * 3
        assert bool(found.p[8:10].isnan().all() and found.adjusted[8:10].isnan().all())
        assert found.adjusted[10:].tolist() == [1.0] * 2
    shown = repr(sweep(more).significant())
    assert "of 5 cells significant at 0.05" in shown
    assert "5 without any effect are not counted, 2 without a value" in shown
    nothing = sweep(torch.zeros(3, 8)).significant()
    assert nothing.n_significant == 0
    assert "0 of 0 cells" in repr(nothing)


def test_groups_are_flipped_together():
    values = draw(6, 8) + 0.7
    twice = values.repeat_interleave(2, 1)
    groups = [i // 2 for i in range(16)]
    found = sweep(twice).significant()
    grouped = sweep(twice).grouped(groups).significant()
    assert_close(grouped.adjusted, sweep(values).significant().adjusted)
    assert bool((found.p < grouped.p).all())
    assert grouped.n_flips == 1 << 7
    unequal = Scores(values, {"cell": list(range(6))}, groups=list("aabcdefg"))
    sums = torch.cat([values[:, :2].sum(1, keepdim=True), values[:, 2:]], 1)
    assert_close(Significance.of(unequal).p, flip_test(sums).p)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "options", "says"),
    [
        (
            1,
            {},
            "significance needs several prompts, there is one, or the metric has one number for all prompts: give at least 6 "
            "prompts, and a metric with a number for each",
        ),
        (5, {}, "5 prompts give no p below 0.062: for level 0.05 give at least 6 prompts$"),
        (6, {"level": 0.01}, "for level 0.01 give at least 8 prompts$"),
        (
            8,
            {"correction": "holm"},
            "8 prompts give no p of 30 cells, which Holm's rule multiplies by their number, below 0.0078: for level 0.05 give at "
            "least 11 prompts, or correction='max'",
        ),
        (
            20,
            {"n_permutations": 10},
            "10 permutations give no p below 0.1: for level 0.05 give n_permutations=20 or more$",
        ),
        (20, {"n_permutations": 0}, "n_permutations must be at least 1, got 0"),
        (20, {"level": 5}, "level must be between 0 and 1, the share of errors that is allowed, got 5"),
        (20, {"correction": "fdr"}, "correction must be one of 'max', 'holm', 'bh', got 'fdr'"),
    ],
)
def test_what_cannot_be_tested_is_refused(n: int, options: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        sweep(draw(30, n)).significant(**options)


def test_the_needed_number_of_groups_is_named():
    result = sweep(draw(3, 12)).grouped([i // 4 for i in range(12)])
    with pytest.raises(ValueError, match=r"3 groups give no p below 0.25: for level 0.05 give at least 6 groups"):
        result.significant()
    assert sweep(draw(3, 6) + 5).significant().n_significant == 3, "six are enough"


# ---- the result ------------------------------------------------------------------------------------------------------


def two_metrics() -> SweepResult:
    effects = torch.stack([draw(3, 9), draw(3, 9, seed=1) + 2])
    return SweepResult(effects, {"metric": ["a", "b"], "layer": [0, 1, 2]}, torch.zeros(2, 9))


def test_each_metric_is_corrected_for_its_own_cells():
    whole = two_metrics().significant()
    for name in ("a", "b"):
        assert_close(whole.select(metric=name).adjusted, two_metrics().select(metric=name).significant().adjusted)
    assert "b: 3" in repr(whole)


def test_tables_parts_and_files(tmp_path: Path):
    found = two_metrics().significant()
    table = found.to_dataframe()
    assert list(table.columns) == ["metric", "layer", "mean", "low", "high", "p", "adjusted", "significant"]
    assert table["significant"].tolist() == found.is_significant.flatten().tolist()
    assert list(found.top(1).columns) == ["metric", "layer", "effect", "low", "high", "p", "adjusted", "significant"]
    found.save(tmp_path / "found.safetensors")
    again = Significance.load(tmp_path / "found.safetensors")
    assert torch.equal(again.adjusted, found.adjusted)
    assert repr(again) == repr(found)
    assert again.select(metric="b", layer=[0, 2]).p.shape == (2,)


def test_a_figure_leaves_other_cells_blank():
    effects = torch.cat([draw(1, 9), draw(1, 9, seed=1) + 3])
    found = SweepResult(effects[:, None], {"layer": [0, 1], "head": [0]}, torch.zeros(9)).significant()
    assert found.is_significant.flatten().tolist() == [False, True]
    bars = found.plot().data[0].y
    assert math.isnan(bars[0]) and not math.isnan(bars[1])  # noqa: PT018
    assert "1 of 2 cells significant at 0.05" in found.plot().layout.title.subtitle.text


def test_estimates_are_tested_unless_all_cells_are_exact():
    estimates, exact = draw(2, 8) + 5, torch.tensor([1.0, -1]).repeat(2, 4)
    of_exact = Attribution(estimates, {"layer": [0, 1]}, torch.zeros(8), exact=exact)
    assert of_exact.significant().n_significant == 0
    exact[1] = torch.nan
    of_some = Attribution(estimates, {"layer": [0, 1]}, torch.zeros(8), exact=exact)
    assert of_some.significant().n_significant == 2
    assert of_some.significant().about != of_exact.significant().about


def test_skewed_effects_are_warned_of():
    values = torch.empty(100, 16).exponential_(generator=torch.Generator().manual_seed(0)) - 1
    with pytest.warns(SkewWarning, match="more cells may be significant without an effect than level 0.05 says"):
        found = sweep(values).significant()
    assert "effects are skewed" in repr(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "skewed" not in repr(sweep(draw(100, 16)).significant())


# ---- how often they are wrong ----------------------------------------------------------------------------------------


def correlated(n_cells: int, n_prompts: int, seed: int) -> Tensor:
    """Cells that depend on each other, as those of a sweep do, with scales of their own and no effect."""
    common, own = draw(n_cells // 10, n_prompts, seed=seed), draw(n_cells, n_prompts, seed=seed + 1)
    sizes = draw(n_cells, 1, seed=seed + 2).exp()
    return sizes * (0.8 * common.repeat(10, 1) + 0.6 * own)


def most(n: int, share: float = 0.05) -> float:
    """Of n trials with this probability, a number that is exceeded once in a thousand."""
    return n * share + 3.1 * (n * share * (1 - share)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("n_prompts", [8, 24])
def test_tables_of_700_cells_without_effect(n_prompts: int):
    """One in twenty tables shows a cell, neither more nor much less, and by single p-values nearly each does."""
    n, wrong, uncorrected = 300, 0, 0
    for seed in range(n):
        found = flip_test(correlated(700, n_prompts, 10 * seed), n_flips=400, seed=seed)
        wrong += bool((found.adjusted <= 0.05).any())
        uncorrected += bool((found.p <= 0.05).any())
    assert 2 * n * 0.05 - most(n) <= wrong <= most(n), wrong
    assert uncorrected > 0.95 * n


@pytest.mark.slow
def test_cells_without_effect_beside_those_with_one():
    """Of 60 cells ten have an effect. Step-down and Holm's rule show one of the others in one table of twenty; of what the false
    discovery rate shows, one cell in twenty has none. All find the large effects."""
    n, wrong, shares, found_effects = 200, {"max": 0, "holm": 0}, [], 0
    for seed in range(n):
        values = draw(60, 16, seed=seed)
        values[:10] += 2.0
        for name in wrong:
            significant = flip_test(values, correction=name, n_flips=4000, seed=seed).adjusted <= 0.05
            wrong[name] += bool(significant[10:].any())
            found_effects += int(significant[:10].sum())
        some = flip_test(values, correction="bh", n_flips=4000, seed=seed).adjusted <= 0.05
        shares.append(int(some[10:].sum()) / max(1, int(some.sum())))
    assert max(wrong.values()) <= most(n), wrong
    assert sum(shares) / n < 0.05 + 0.015, shares
    assert found_effects > 0.95 * 2 * n * 10


@pytest.mark.slow
def test_an_untrained_model_with_tossed_answers_shows_nothing_and_the_trained_one_does():
    model = HookedTransformer.from_pretrained("demo")
    pairs = experiment.prompt_pairs(16)
    clean, corrupted = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
    answers = [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs]
    real = patching.sweep(model, corrupted, clean, answers=answers, by="head")
    found = real.significant()
    assert found.n_significant >= 8
    assert bool(found.is_significant[2, 3]), "a name mover"
    wrong, n = 0, 12
    for seed in range(n):
        tossed = torch.rand(len(pairs), generator=torch.Generator().manual_seed(seed)) < 0.5
        both = [list(each) for each in answers]
        for i in tossed.nonzero().flatten().tolist():
            both[0][i], both[1][i] = both[1][i], both[0][i]
        twin = model.untrained(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it does not do the task
            result = patching.sweep(
                twin, corrupted, clean, answers=(both[0], both[1]), sites="z", heads="each", control=None
            )
            wrong += result.significant(n_permutations=1000).n_significant > 0
    assert wrong <= most(n), wrong


# ---- how many prompts an effect takes --------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [0.3, 0.8, 1.5])
def test_as_many_prompts_as_are_needed_find_the_effect(effect: float):
    """Of 4,000 experiments, in four of five; with a fifth fewer prompts in less."""
    n = int(prompts_for_effect(torch.tensor([1.0]), effect))

    def share(n_prompts: int) -> float:
        low, high = Scores(draw(4000, n_prompts, seed=n_prompts) + effect, {"run": list(range(4000))}).interval(
            n_resamples=1
        )
        return float(((low > 0) | (high < 0)).float().mean())

    assert_near(share(n), 0.8, 0.06, because="prompts are whole numbers, and the share of 4,000 has an error of 0.006")
    assert share(n) >= 0.78
    assert share(max(2, int(0.8 * n))) < 0.8


def test_power_for_an_effect():
    scores = Scores(draw(3, 30) * torch.tensor([[1.0], [2.0], [0.01]]), {"head": [0, 1, 2]})
    found = scores.power(effect=0.5)
    assert 2.5 < float(found[1] / found[0]) < 6
    assert float(found[2]) == 6, "fewer give no p-value of 0.05"
    assert bool((scores.power(effect=0.5, simultaneous=True)[:2] > found[:2]).all())
    assert_close(scores.power(effect=-0.5), found)
    both = SweepResult(torch.stack([scores.values] * 2), {"metric": ["a", "b"], **scores.axes}, torch.zeros(2, 30))
    assert_close(both.power(effect=0.5)[1], found)
    for wrong in ({}, {"width": 1.0, "effect": 1.0}):
        with pytest.raises(ValueError, match="give the width of an interval, or effect="):
            scores.power(**wrong)
    with pytest.raises(ValueError, match="effect must be the size of an effect to be found, got 0"):
        scores.power(effect=0)


def test_corrections_of_no_cell():
    assert len(corrected(torch.zeros(0), "holm")) == len(corrected(torch.zeros(0), "bh")) == 0
