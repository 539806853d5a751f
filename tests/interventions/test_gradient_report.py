"""Gradients that explode, vanish or are not finite are named; figures against PyTorch's own."""

from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm import HookedTransformer
from hooked_lm.hooks import wrap
from hooked_lm.interventions.gradient_report import GradientReport
from tests.close import assert_close


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def report_on(*factors: float, **settings: Any) -> GradientReport:
    net = wrap(nn.Sequential(*[nn.Sequential(Times(factor)) for factor in factors]))
    report = GradientReport("?", **settings)
    with net.hooks([report]):
        net(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return report


def test_healthy_gradients_have_no_problems() -> None:
    table = report_on(1.0, 2.0, 0.5).to_dataframe()
    assert table["site"].tolist() == ["0", "1", "2"]
    assert table["rms"].tolist() == [1.0, 0.5, 1.0]  # of the sum behind the last; before it times 0.5, and times 2
    assert table["verdict"].tolist() == ["", "", ""]
    assert report_on(1.0, 2.0, 0.5).problems == []


def test_exploding_vanishing_and_broken_gradients() -> None:
    exploding = report_on(1.0, 1e5, 1.0, 1.0)
    assert exploding.to_dataframe()["verdict"].tolist() == ["explodes", "", "", ""]
    assert exploding.problems == ["'0': the gradient explodes, its root mean square is 1e+05"]
    assert report_on(1.0, 0.0, 1.0, 1.0).to_dataframe()["verdict"].tolist() == ["vanishes", "", "", ""]
    assert report_on(1.0, 0.1, 1.0, 1.0, factor=5).to_dataframe()["verdict"].tolist()[0] == "vanishes"
    broken = report_on(1.0, float("nan"), 1.0)
    assert broken.to_dataframe()["not_finite"].tolist() == [6, 0, 0]
    assert broken.problems == ["'0': the gradient is not finite in 6 places"]


def test_figures_of_several_calls_on_a_model() -> None:
    model = HookedTransformer.from_pretrained("demo")
    report, kept = GradientReport("blocks.*.hook_resid_post"), []
    with model.hooks([report], [("blocks.2.hook_resid_post", lambda gradient, hook: kept.append(gradient.clone()))]):
        for prompt in ("The capital of France is", "Mary and John"):
            model(prompt, return_type="loss").backward()
    row = report.to_dataframe().iloc[2]
    numbers = torch.cat([gradient.flatten() for gradient in kept])
    assert row["calls"] == 2
    assert_close(row["rms"], numbers.square().mean().sqrt().item())
    assert_close(row["largest"], numbers.abs().max().item())
    report.clear()
    assert len(report.to_dataframe()) == 0


def test_a_factor_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="above 1, got 1"):
        GradientReport("z", factor=1)
