"""Intervals of 0/1 numbers, of differences of such numbers, and of all cells of them at once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import metrics
from hooked_lm.demo import experiment
from hooked_lm.engine.result import SweepResult
from hooked_lm.interventions import ZeroAblate
from hooked_lm.results import Scores
from hooked_lm.results.bootstrap import bootstrap, wilson
from hooked_lm.results.bounds import SHARE, Bounds
from hooked_lm.results.measures import MetricScores
from tests.close import assert_apart, assert_close

DIFFERENCE = Bounds(-1, 1, is_difference=True)
RIGHT, HALF, NONE = [1.0] * 8, [1.0, 0.0] * 4, [0.0] * 8


def sweep(**about: object) -> SweepResult:
    """Two layers of accuracies: all are right in the first one, half in the second, one of eight in the corrupted run."""
    return SweepResult(
        torch.tensor([RIGHT, HALF]), {"layer": [0, 1]}, torch.tensor([1.0, *NONE[1:]]), torch.tensor(RIGHT), **about
    )


def both(found: Scores, **options: object) -> Tensor:
    return torch.stack(found.interval(**options))


# ---- which values are 0/1 numbers ------------------------------------------------------------------------------------


def test_accuracies_of_sweeps_have_the_interval_of_those_that_are_evaluated() -> None:
    found = sweep()
    assert found.binary == [True]
    assert_close(both(found), torch.stack(wilson(found.values)))
    assert_close(both(found), both(MetricScores(found.values, found.axes, [True])))
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    assert_close(both(found.grouped(groups)), both(MetricScores(found.values, found.axes, [True], groups=groups)))
    assert_apart(both(found.grouped(groups)), both(found))
    several = torch.stack([found.values, found.values + 0.5])
    axes, runs = (
        {"metric": ["right", "logit"], **found.axes},
        (found.corrupted.expand(2, -1), found.clean.expand(2, -1)),
    )
    mixed = SweepResult(several, axes, *runs)
    assert mixed.binary == [True, False]
    assert_close(both(mixed)[:, 0], both(found))
    assert_close(both(mixed.select(metric="logit")), torch.stack(bootstrap(several[1])))
    assert_close(both(mixed.select(metric="logit")), both(mixed)[:, 1])


@pytest.mark.filterwarnings("ignore::hooked_lm.results.SkewWarning")
@pytest.mark.parametrize(
    ("values", "corrupted"),
    [
        ([RIGHT, [0.5, *HALF[1:]]], NONE),
        ([RIGHT, HALF], [2.0, *NONE[1:]]),
        ([NONE, NONE], NONE),
        ([RIGHT, [-1.0, *HALF[1:]]], NONE),
    ],
)
def test_other_values_have_the_interval_of_numbers(values: list[list[float]], corrupted: list[float]) -> None:
    """One that is no 0 or 1, in a cell or a run; and zeros alone, which may be the divergence of a run from itself."""
    found = SweepResult(torch.tensor(values), {"layer": [0, 1]}, torch.tensor(corrupted))
    assert found.binary == [False]
    assert_close(both(found), torch.stack(bootstrap(found.values)))


def test_a_part_is_what_the_whole_is(tmp_path: Path) -> None:
    """Zeros of an accuracy are a share, and ones of a saturated probability none."""
    axes = {"layer": [0, 1]}
    accuracy = SweepResult(torch.tensor([RIGHT, NONE]), axes, torch.tensor(NONE))
    part = accuracy.select(layer=1)
    assert_close(both(part), torch.stack(wilson(torch.tensor(NONE))))
    part.save(tmp_path / "part")
    assert SweepResult.load(tmp_path / "part").binary == [True]
    assert (both(accuracy.effects().select(layer=1)).diff(dim=0) > 0).all()
    probability = SweepResult(torch.tensor([RIGHT, [0.5, *RIGHT[1:]]]), axes, torch.tensor(RIGHT))
    assert both(probability.select(layer=0)).tolist() == [1.0, 1.0]
    holes = SweepResult(torch.tensor([RIGHT, [torch.nan] * 8]), axes, torch.tensor(NONE))
    assert both(holes).isnan().tolist() == [[False, True]] * 2
    assert both(holes, simultaneous=True).isnan().tolist() == [[False, True]] * 2


def test_one_prompt_or_group_says_nothing_and_entries_are_those_of_metrics() -> None:
    one = SweepResult(torch.ones(2, 1), {"layer": [0, 1]}, torch.zeros(1))
    assert both(one).isnan().all()
    assert both(sweep(groups=["same"] * 8)).isnan().all()
    with pytest.raises(ValueError, match="binary has an entry for each of 1 metrics, got 2"):
        sweep(binary=[True, False])


# ---- scales and differences ------------------------------------------------------------------------------------------


def test_a_scale_scales_the_interval() -> None:
    found, start, span = sweep(), 1 / 8, 7 / 8
    assert_close(both(found.normalized()), (both(found) - start) / span)
    effects = found.effects()
    assert_close(both(effects.normalized()), both(effects) / span)
    assert_close(both(found.normalized().effects()), both(effects) / span)
    assert_close(both(found.restored()), both(effects) / span)
    noising = SweepResult(found.values, found.axes, found.corrupted, found.clean, base="clean")
    assert_close(both(noising.restored()), 1 + both(noising.effects()) / span)
    falling = SweepResult(
        found.values, found.axes, found.clean, found.corrupted
    )  # the clean run is the one that is wrong
    assert_close(both(falling.normalized()), 1 - both(found.normalized()).flip(0))


def test_an_effect_on_an_accuracy_is_no_share() -> None:
    """It may be negative, whatever the sign of those that are there; its interval is that of two shares."""
    found = sweep().effects()
    low, high = both(found)
    assert_close(torch.stack([low, high]), torch.stack(DIFFERENCE.interval(found.values, None)))
    shares = torch.tensor([[7 / 8, 0.0], [3 / 8, 0.0]]).double()
    (up_low, up_high), (_, down_high) = (
        wilson(torch.tensor(each)) for each in ([[1.0] * 7 + [0.0], [1.0] * 3 + [0.0] * 5], [NONE, NONE])
    )
    assert_close(low, (shares[:, 0] - torch.hypot(shares[:, 0] - up_low, down_high.double())).float())
    assert_close(high, up_high)
    table = found.top().sort_values("layer")
    at_once = torch.stack(DIFFERENCE.interval(found.values, None, 0.975, at_once=True))
    assert_close(torch.tensor(table[["low", "high"]].to_numpy().T), at_once)
    assert_close(table["low"].to_numpy(), sweep().top().sort_values("layer")["low"].to_numpy())


def test_differences_without_zeros_are_shares() -> None:
    """Of +1 and -1 alone, the interval is Wilson's, stretched; the sign turns it round."""
    values = torch.tensor([[1.0] * 9 + [-1.0] * 3, [1.0] * 12, [1.0] + [0.0] * 10 + [-1.0]])
    low, high = DIFFERENCE.interval(values, None)
    of_shares = torch.stack(wilson((values + 1) / 2))
    assert_close(torch.stack([low, high])[:, 0], 2 * of_shares[:, 0] - 1)
    turned = torch.stack(DIFFERENCE.interval(-values, None))
    assert_close(turned, -torch.stack([high, low]))
    assert bool((low[2] < 0) & (high[2] > 0))
    assert_close(low[2], -high[2])


# ---- of all cells at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 16, 100])
def test_intervals_of_all_cells_contain_those_of_each(n: int) -> None:
    values = torch.ones(n + 1, n).tril(-1)  # 0 to n right ones
    for bounds, cells in ((SHARE, values), (DIFFERENCE, values - values.flip(0))):
        low, high = bounds.interval(cells, None)
        all_low, all_high = bounds.interval(cells, None, 0.975, at_once=True)
        assert bool((all_low <= low).all() and (all_high >= high).all())
        assert bool((low < high).all() and (low >= bounds.least).all() and (high <= bounds.most).all())


def test_of_prompts_that_agree_hoeffdings_interval_is_exact() -> None:
    """The probability that all of n are right is the nth power of the share."""
    low, high = SHARE.interval(torch.tensor([RIGHT, NONE]), None, 0.9, at_once=True)
    assert_close(low, torch.tensor([0.05 ** (1 / 8), 0.0]))
    assert_close(high, torch.tensor([1.0, 1 - 0.05 ** (1 / 8)]))


# ---- how many prompts ------------------------------------------------------------------------------------------------


def test_the_needed_number_is_the_smallest() -> None:
    for found in (sweep(), sweep().effects(), sweep().normalized()):
        for simultaneous in (False, True):
            needed = found.power(0.4, simultaneous=simultaneous)
            level = 0.975 if simultaneous else 0.95
            means = [each.double().mean(1) for each in found._bounds._shares(found.values)]
            for n, is_enough in ((needed, True), (needed - 1, False)):
                low, high = found._bounds._ends(means, n.double(), level, simultaneous)
                assert bool(((high - low <= 0.4) == is_enough).all())
    assert MetricScores(torch.tensor([RIGHT, HALF]), {"layer": [0, 1]}, [True]).power(0.2).tolist() == [16, 93]
    with pytest.raises(ValueError, match="width of an interval must be positive, got 0"):
        sweep().power(0)
    assert SHARE.prompts_needed(torch.tensor([[torch.nan, 1.0]]), 0.2).isnan().all()


# ---- on a model, and simulations -------------------------------------------------------------------------------------


def test_ablations_by_accuracy() -> None:
    model, pairs = HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(12)
    answers = [[pair.answer] for pair in pairs]
    options = {"metric": metrics.accuracy(answers, [[pair.wrong_answer] for pair in pairs], model=model)}
    cells = {f"L{layer}": ZeroAblate("attn_out", layer) for layer in (0, 1)}
    found = patching.run_each(model, [pair.clean for pair in pairs], cells, **options)
    assert found.binary == [True]
    assert_close(both(found), torch.stack(wilson(found.values)))
    assert (both(found.effects()).diff(dim=0) > 0).all()


def tossed(p: float, *shape: int, seed: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < p).float()


def covered(ends: tuple[Tensor, Tensor], true: float) -> Tensor:
    low, high = ends
    return (low <= true + 1e-6) & (true <= high + 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hooked_lm.results.SkewWarning")
@pytest.mark.parametrize("n", [8, 16, 64])
@pytest.mark.parametrize("p", [0.5, 0.8, 0.95])
def test_coverage_of_shares_and_differences(p: float, n: int) -> None:
    """Of 1,000 draws: the bootstrap contains a share of 0.95 in 34, 56 and 96 % of eight, 16 and 64 prompts."""
    right, before = tossed(p, 1000, n, seed=n), tossed(0.3, 1000, n, seed=n + 1)
    assert covered(SHARE.interval(right, None), p).float().mean() > 0.9
    assert covered(DIFFERENCE.interval(right - before, None), p - 0.3).float().mean() > 0.92
    of_numbers = covered(bootstrap(right, n_resamples=200), p).float().mean()
    assert of_numbers < 0.65 if p == 0.95 and n < 64 else of_numbers > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hooked_lm.results.SkewWarning")
@pytest.mark.parametrize("n", [8, 64])
def test_coverage_of_all_cells_at_once(n: int) -> None:
    """100 cells with shares near 1, in 60 draws: Wilson's intervals of Bonferroni's level hold all in less than 80 % of them."""
    right = tossed(0.99, 60, 100, n, seed=n)
    before = tossed(0.95, 60, 100, n, seed=n + 1)
    at_once, of_wilson, of_differences = [], [], []
    for one, other in zip(right, before, strict=True):
        at_once.append(covered(SHARE.interval(one, None, 0.9995, at_once=True), 0.99).all())
        of_wilson.append(covered(SHARE.interval(one, None, 0.9995), 0.99).all())
        of_differences.append(covered(DIFFERENCE.interval(one - other, None, 0.9995, at_once=True), 0.04).all())
    assert torch.stack(at_once).float().mean() > 0.92
    assert torch.stack(of_differences).float().mean() > 0.92
    assert torch.stack(of_wilson).float().mean() < 0.85
