"""Estimates beside exact values: how well they agree, and that both stay together."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution, agreement
from tests.close import assert_close, assert_equal

NAN = torch.nan


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def estimate(**changes: object) -> Attribution:
    axes = {"metric": ["a", "b"], "site": ["z", "mlp_out"], "layer": [0, 1, 2]}
    values, exact = draw(2, 2, 3, 4), draw(2, 2, 3, 4, seed=1)
    exact[:, :, 1] = NAN  # a sample
    given = {"corrupted": draw(2, 4, seed=2), "clean": draw(2, 4, seed=3) + 5, "method": "gradient", "exact": exact}
    return Attribution(values, axes, **{**given, **changes})


def test_agreement_by_hand() -> None:
    exact = torch.tensor([1.0, 2.0, -3.0, 1000.0])
    found = agreement(torch.tensor([1.0, -2.0, 5.0, 6.0]), exact)
    assert found["cells"] == 4
    assert_close(found["spearman"], 0.2)  # 1 - 6 * (0 + 4 + 4 + 0) / 60, from the ranks 2 1 3 4 and 2 3 1 4
    assert found["sign"] == 1.0, "only the largest is above a hundredth of the largest"
    same = agreement(exact, exact)
    assert math.isnan(same.pop("spearman_live")), "one cell has no rank"
    assert_close(same, {"cells": 4, "spearman": 1, "pearson": 1, "slope": 1, "top": 1, "sign": 1})
    assert_close(agreement(-exact, exact)["spearman"], -1)


def test_agreement_of_sizes_and_of_the_cells_that_matter_by_hand() -> None:
    """Estimates that are half as large, that mix up the cells without an effect, and miss one of the two largest."""
    exact = torch.tensor([*[1e-3 * i for i in range(-18, 18)], 4.0, 3.0, 2.0, 1.0])
    estimated = torch.tensor([*[1e-3 * (i % 7) for i in range(36)], 2.0, 1.0, 1.5, 0.5])
    found = agreement(estimated, exact)
    assert_close(found["spearman_live"], 1 - 6 * (1 + 1) / (4 * 15))  # ranks 4 2 3 1 for 4 3 2 1
    assert_close(found["slope"], float((estimated * exact).sum() / exact.square().sum()))
    assert 0.4 < found["slope"] < 0.5
    assert found["top"] == 0.5  # two are the largest 5 % of 40
    assert_close(agreement(2 * exact, exact)["slope"], 2)
    assert math.isnan(agreement(exact, torch.zeros(40))["top"])


def test_ties_share_a_rank_and_no_variation_is_nan() -> None:
    assert_close(agreement(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 5.0]))["spearman"], 1)
    assert math.isnan(agreement(torch.ones(3), draw(3))["spearman"])


def test_the_order_of_rounding_errors_counts_for_nothing() -> None:
    exact = torch.tensor([3e-7, -2e-7, 1e-7, 0.0, 1.0, 2.0])
    assert_close(agreement(torch.tensor([-1e-7, 2e-7, 0.0, 3e-7, 1.0, 2.0]), exact)["spearman"], 1)
    assert agreement(torch.tensor([-1e-2, 2e-2, 0.0, 3e-2, 1.0, 2.0]), exact)["spearman"] < 0.99


def test_the_agreement_of_each_metric_and_site_over_the_cells_that_were_measured() -> None:
    found = estimate()
    table = found.agreement
    assert table[["metric", "site"]].to_numpy().tolist() == [["a", "z"], ["a", "mlp_out"], ["b", "z"], ["b", "mlp_out"]]
    assert table["cells"].tolist() == [2] * 4
    assert found.exact is not None
    start = found.corrupted[1].mean()
    here = [(of[1, 0].mean(-1) - start)[[0, 2]] for of in (found.values, found.exact)]
    assert_close(table["pearson"][2], agreement(*here)["pearson"])


def test_exact_values_go_with_the_estimates() -> None:
    found = estimate()
    part = found.select(metric="b", layer=[2, 0])
    assert found.exact is not None
    assert part.exact is not None
    assert torch.equal(part.exact, found.exact[1][:, [2, 0]])
    effects, scaled = found.effects(), found.normalized()
    assert effects.exact is not None
    assert scaled.exact is not None
    assert_close(effects.exact[0], found.exact[0] - found.corrupted[0])
    low, high = found.corrupted[1].mean(), found.clean[1].mean()  # type: ignore[index]
    assert_close(scaled.exact[1], (found.exact[1] - low) / (high - low))
    assert_close(effects.agreement["spearman"].tolist(), found.agreement["spearman"].tolist())


def test_at_a_glance() -> None:
    assert "not checked by exact patching" in repr(estimate(exact=None).select(metric="a"))
    assert "agrees with exact patching of 4 cells: rank correlation" in repr(estimate().select(metric="a"))


def test_files_keep_both(tmp_path: Path) -> None:
    found = estimate(about={"seed": 3})
    found.save(tmp_path / "a.safetensors")
    again = Attribution.load(tmp_path / "a.safetensors")
    assert again.exact is not None
    assert_equal(again.exact, found.exact)
    assert (again.method, again.about, dict(again.axes)) == (found.method, found.about, dict(found.axes))


def test_shapes_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="exact values"):
        estimate(exact=draw(2, 2, 3, 1))


def test_exact_values_stand_beside_estimates_in_tables() -> None:
    estimated, exact = torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.tensor([[2.0, 4.0], [torch.nan, torch.nan]])
    found = Attribution(estimated, {"layer": [0, 1]}, torch.zeros(2), exact=exact)
    assert found.to_dataframe()["exact"].tolist()[0] == 3.0
    assert found.to_dataframe(per_prompt=True)["exact"].tolist()[:2] == [2.0, 4.0]
    assert "exact" not in Attribution(estimated, {"layer": [0, 1]}, torch.zeros(2)).to_dataframe()


def test_an_undefined_correlation_is_named() -> None:
    flat, some = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [torch.nan]])
    found = Attribution(flat, {"layer": [0, 1, 2]}, torch.ones(1), exact=some)
    assert "exact patching of 2 cells is undefined" in repr(found)
    assert "not checked" in repr(found.select(layer=[2]))
