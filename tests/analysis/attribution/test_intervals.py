"""Intervals of estimated effects are those of the exact ones: measured, widened by the error of the estimate, or absent."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribute, attribute_edges, metrics
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.demo import experiment
from hooked_lm.engine.result import SweepResult
from tests.close import assert_close, assert_near

N_CELLS = 200


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def simulated(n_prompts: int, n_exact: int, seed: int) -> tuple[Attribution, Tensor]:
    """Estimates that are 0.6 of exact effects, up to a tenth, with `n_exact` random cells measured; and the true means."""
    true = draw(N_CELLS, seed=1) ** 3
    exact = true[:, None] + 0.5 * draw(N_CELLS, n_prompts, seed=100 + seed)
    factor = 0.6 + 0.1 * draw(N_CELLS, 1, seed=2)
    estimated = factor * exact
    hidden = torch.randperm(N_CELLS, generator=torch.Generator().manual_seed(seed))[n_exact:]
    exact[hidden] = torch.nan
    found = Attribution(estimated, {"head": list(range(N_CELLS))}, torch.zeros(n_prompts), exact=exact)
    return found, true


def covered(ends: tuple[Tensor, Tensor], true: Tensor) -> Tensor:
    low, high = ends
    return ((low <= true) & (true <= high)).float()


@pytest.mark.parametrize("n_prompts", [8, 64])
def test_more_prompts_do_not_make_an_estimate_right(n_prompts: int) -> None:
    """The mean over 20 draws of the share of cells whose exact mean is in the interval; of the estimates' own, it falls."""
    shares, of_estimates, of_exact = [], [], []
    for seed in range(20):
        found, true = simulated(n_prompts, 40, seed)
        is_exact = ~found.exact.isnan().any(-1)
        inside = covered(found.interval(n_resamples=100), true)
        shares.append(inside[~is_exact].mean())
        of_exact.append(inside[is_exact].mean())
        of_estimates.append(covered(found.estimates.interval(n_resamples=100), true).mean())
    assert torch.stack(shares).mean() > 0.92
    assert torch.stack(of_exact).mean() > 0.93
    assert torch.stack(of_estimates).mean() < (0.85 if n_prompts == 8 else 0.6)


def test_without_exact_values_there_is_no_interval() -> None:
    found = Attribution(draw(6, 5), {"head": list(range(6))}, torch.zeros(5))
    assert torch.stack(found.interval()).isnan().all()
    assert list(found.top(2).columns) == ["head", "effect", "value"]
    assert "without intervals: no cell was patched exactly" in found._repr_html_()
    assert found.plot().data[0].error_y.array is None
    plain = SweepResult(found.values, found.axes, found.corrupted)
    assert isinstance(found.estimates, SweepResult)
    assert not isinstance(found.estimates, Attribution)
    assert_close(torch.stack(found.estimates.interval()), torch.stack(plain.interval()))


def test_few_exact_cells_have_intervals_and_no_others() -> None:
    """An error that 95% of cells do not exceed takes 19 cells; one that half do not exceed takes one."""
    found, _ = simulated(8, 18, 0)
    is_exact = ~found.exact.isnan().any(-1)
    low, high = found.interval()
    assert torch.equal(low.isnan(), ~is_exact)
    assert torch.equal(high.isnan(), ~is_exact)
    assert torch.stack(found.interval(0.5)).isfinite().all()
    assert torch.stack(simulated(8, 19, 0)[0].interval()).isfinite().all()


def test_an_exact_cell_has_the_interval_of_its_exact_values_up_to_the_estimate() -> None:
    found, _ = simulated(8, N_CELLS, 0)
    exact = SweepResult(found.exact, found.axes, found.corrupted)
    (low, high), (exact_low, exact_high) = found.interval(), exact.interval()
    assert_close(low, exact_low.minimum(found.mean))
    assert_close(high, exact_high.maximum(found.mean))


def test_the_error_is_that_of_random_cells_relative_to_the_size() -> None:
    found, _ = simulated(8, 40, 0)
    is_exact = ~found.exact.isnan().any(-1)
    mean, exact = found.mean.double(), found.exact.double().mean(-1)
    relative = ((exact - mean).abs() / (mean.abs() + mean.abs().mean()))[is_exact].sort().values
    error = relative[38] * (mean.abs() + mean.abs().mean())  # the 39th of 40
    (low, high), (own_low, own_high) = found.interval(), found.estimates.interval()
    cell = int((~is_exact).nonzero()[0])
    assert_near(mean[cell] - low[cell], torch.hypot(mean[cell] - own_low[cell], error[cell]), 1e-4, because="in fp32")
    assert_near(high[cell] - mean[cell], torch.hypot(own_high[cell] - mean[cell], error[cell]), 1e-4, because="in fp32")


def test_parts_and_scales_keep_the_error(tmp_path: Path) -> None:
    axes = {"metric": ["a", "b"], "layer": [0, 1], "head": list(range(30))}
    around, means = draw(2, 2, 30, 3), draw(2, 2, 30, 1, seed=1)
    values = means + torch.cat([around, -around], -1)  # not skewed, in any part
    exact = 1.5 * values + 0.1
    exact[:, :, 15:] = torch.nan
    runs = {"corrupted": draw(2, 6, seed=2), "clean": draw(2, 6, seed=3) + 9}
    found = Attribution(values, axes, **runs, exact=exact)
    low, high = found.interval()
    assert torch.stack([low, high]).isfinite().all()
    part = found.select(metric="b", layer=1, head=[20, 21])  # none of them is exact
    assert_close(torch.stack(part.interval()), torch.stack([low[1, 1, 20:22], high[1, 1, 20:22]]))
    gap = (found.clean - found.corrupted).mean(-1)
    effects = torch.stack(found.effects().interval())
    scaled = torch.stack(found.effects().normalized().interval())
    assert_close(scaled, effects / gap[None, :, None, None], scale=effects / gap.min())
    again = torch.stack(found.normalized().effects().interval())
    assert_close(again, scaled, scale=effects / gap.min())
    found.save(tmp_path / "found")
    assert_close(torch.stack(Attribution.load(tmp_path / "found").interval()), torch.stack([low, high]))


def test_groups_are_those_of_exact_values_too() -> None:
    found, _ = simulated(8, N_CELLS, 0)
    by_item = found.grouped([0, 0, 1, 1, 2, 2, 3, 3])
    exact = SweepResult(found.exact, found.axes, found.corrupted, groups=by_item.groups)
    assert_close(by_item.interval()[1], exact.interval()[1].maximum(found.mean))


@pytest.mark.slow
@pytest.mark.parametrize("n_prompts", [8, 64])
def test_coverage_of_the_exact_effect_on_the_bundled_model(n_prompts: int) -> None:
    """Heads of 72 pairs, of which some are drawn: the interval of an estimated cell, with 20 exact ones, contains the exact mean
    of all pairs."""
    model, pairs = HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(72)
    clean, corrupted = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
    metric = metrics.logit_difference(
        [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs], model=model
    )
    options = {"sites": "z", "positions": None, "heads": "each", "check": True, "progress": False}
    whole = attribute(model, corrupted, clean, metric=metric, **options).effects()
    true = whole.exact.mean(-1).flatten()
    shares, before = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        some = torch.randperm(72, generator=generator)[:n_prompts]
        values, exact = (part.flatten(0, -2)[:, some] for part in (whole.values, whole.exact))
        hidden = torch.randperm(len(values), generator=generator)[20:]
        exact[hidden] = torch.nan
        found = Attribution(values, {"head": list(range(len(values)))}, torch.zeros(n_prompts), exact=exact)
        shares.append(covered(found.interval(n_resamples=100), true)[hidden].mean())
        before.append(covered(found.estimates.interval(n_resamples=100), true)[hidden].mean())
    assert torch.stack(shares).mean() > 0.92, shares
    assert torch.stack(before).mean() < 0.85, before


def test_attribution_takes_groups() -> None:
    model, pairs = HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(4)
    clean, corrupted = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
    metric = metrics.logit_difference(
        [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs], model=model
    )
    labels = [f"pair {row // 2}" for row in range(len(corrupted))]
    common = {"metric": metric, "check": False, "groups": labels}
    assert attribute(model, corrupted, clean, sites="z", heads="each", **common).groups == tuple(labels)
    assert attribute_edges(model, corrupted, clean, **common).groups == tuple(labels)
    with pytest.raises(ValueError, match=f"groups has 1 labels, and there are {len(labels)} prompts"):
        attribute(model, corrupted, clean, sites="z", heads="each", **common | {"groups": ["a"]})


@pytest.mark.parametrize("n_exact", [0, 1, 2, 3])
def test_significance_is_of_estimates_or_of_exact_effects_but_not_of_both(n_exact: int):
    """By the estimates the first cell has an effect, by the exact values the second; the last does not exist."""
    effect, none = torch.tensor([2.0, 3] * 4), torch.tensor([1.0, -1] * 4)
    missing = torch.full((8,), torch.nan)
    estimates, all_exact = torch.stack([effect, none, none, missing]), torch.stack([none, effect, none, missing])
    exact = torch.full_like(all_exact, torch.nan)
    exact[3 - n_exact : 3] = all_exact[3 - n_exact : 3]
    axes = {"layer": [0, 1, 2, 3]}
    found = Attribution(
        estimates, axes, torch.zeros(8), method="gradient", exact=exact if n_exact else None
    ).significant()
    by_exact = n_exact == 3
    assert found.is_significant.tolist() == [not by_exact, by_exact, False, False]
    assert f"tested: {'the exact effects' if by_exact else 'the estimates, not exact effects'}" in repr(found)
