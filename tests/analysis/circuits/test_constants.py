"""Constants in place of ablated values."""

import copy

import pytest
import torch

from hooked_lm.analysis import circuits
from hooked_lm.analysis.circuits import Runner, mean_constants, optimal_constants
from hooked_lm.demo.tasks import tasks
from tests.close import assert_close

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task():
    [found] = tasks(names=["agreement"], n=16)
    return found


def kl(task, pairs) -> Runner:
    return Runner(task.model, pairs.corrupted, pairs.clean)


def test_means_are_those_over_prompts_and_positions(task) -> None:
    found = mean_constants(task.model, task.pairs)
    sites = ["blocks.1.attn.hook_result", "blocks.2.hook_mlp_out"]
    _, cache = task.model.run_with_cache(task.pairs.corrupted, names_filter=sites)
    assert_close(found["blocks.1.attn.hook_result"], cache["blocks.1.attn.hook_result"].mean((0, 1)))
    assert_close(found["blocks.2.hook_mlp_out"][0], cache["blocks.2.hook_mlp_out"].mean((0, 1)))


def test_constants_that_are_zero_are_ablation_by_zero(task) -> None:
    zeros = {site: torch.zeros_like(each) for site, each in mean_constants(task.model, task.pairs).items()}
    runner = Runner(task.model, task.pairs)
    gates = torch.rand(3, *runner.graph.is_edge.shape, generator=torch.Generator().manual_seed(0))
    expected = Runner(task.model, task.pairs, replace_with="zero").values(gates)
    assert_close(runner.ablating(zeros).values(gates), expected)
    assert_close(runner.ablating(zeros).full, runner.full)


def test_learnt_ones_are_better_also_on_other_prompts(task) -> None:
    """Where the right words are few: of names, few pairs teach the names."""
    mean, best = mean_constants(task.model, task.pairs), optimal_constants(task.model, task.pairs, steps=20)
    for pairs in (task.pairs, task.held_out):
        runner = kl(task, pairs)
        assert runner.ablating(best).empty().mean() < 0.5 * runner.ablating(mean).empty().mean()


def test_they_are_learnt_in_half_precision(task) -> None:
    model = copy.deepcopy(task.model).half()
    found = optimal_constants(model, task.pairs, steps=2)
    assert all(bool(each.isfinite().all()) for each in found.values())


def test_of_one_circuit(task) -> None:
    circuit = circuits.discover(task.model, task.pairs, method="eap", n_edges=100, check=False, held_out=0)
    runner, gates = kl(task, task.pairs), circuit.edges[None]
    found = [
        runner.ablating(optimal_constants(task.model, task.pairs, circuit=which, steps=10)).values(gates).mean()
        for which in (circuit, None)
    ]
    assert found[0] < found[1]


def test_what_is_refused(task) -> None:
    runner, found = kl(task, task.pairs), mean_constants(task.model, task.pairs)
    with pytest.raises(
        ValueError, match=r"constants are for each site of writers, .*'blocks.3.hook_mlp_out' is missing"
    ):
        runner.ablating({site: each for site, each in found.items() if site != "blocks.3.hook_mlp_out"})
    with pytest.raises(ValueError, match=r"needs constants \[8, 128\], got \[8, 4\]"):
        runner.ablating({**found, "blocks.0.attn.hook_result": torch.zeros(8, 4)})
    with pytest.raises(ValueError, match="there must be one step at least, got 0"):
        optimal_constants(task.model, task.pairs, steps=0)
