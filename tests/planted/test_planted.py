"""Planted models do their tasks, their truth is what exact patching finds, and what misleads is stated."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
import torch

from hooked_lm import analysis, planted
from hooked_lm.analysis import circuits
from hooked_lm.patching import sweep
from hooked_lm.planted import Planted
from tests.close import assert_close

BY_NEURON = ["copy-suppression", "facts", "and-gate", "or-gate", "xor-gate", "redundancy"]
HIDDEN = {  # the true edges that patching of single edges does not find: in the corrupted run, and in the clean run
    "and-gate": (["input > L0H0<v>", "input > L0H2<v>", "L0H0 > m0", "L0H2 > m0"], []),
    "or-gate": ([], ["input > L0H0<v>", "input > L0H2<v>", "L0H0 > m0", "L0H2 > m0"]),
    "backup": (["L0H1 > L1H0<q>", "L1H0 > logits"], ["input > L0H1<v>", "input > L1H0<v>", "L1H0 > logits"]),
    "redundancy": 2 * ([edge for head in range(3) for edge in (f"input > L0H{head}<v>", f"L0H{head} > m0")],),
}


@cache
def example(name: str) -> Planted:
    return planted.load(name)


@cache
def checked(name: str) -> pd.DataFrame:
    return example(name).check()


def edges(table: pd.DataFrame) -> list[str]:
    return sorted(table["writer"] + " > " + table["reader"])


# ---- the tasks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", planted.names())
def test_the_model_does_its_task_and_its_untrained_twin_does_not(name: str) -> None:
    found = example(name)
    assert found.name == name
    assert found.description.endswith(".")
    for pairs in (found.pairs, found.held_out):
        assert len(pairs) >= 20
        assert found.accuracy(pairs) == 1.0
    difference = found.pairs.metric(found.model)
    clean, corrupted = (difference(found.model(prompts)) for prompts in (found.pairs.clean, found.pairs.corrupted))
    assert (clean > corrupted + 0.5).all()
    twins = [found.accuracy(found.pairs, found.model.untrained(seed)) for seed in range(4)]
    assert sum(twins) / 4 < 0.5


@pytest.mark.parametrize("name", planted.names())
def test_prompts_differ_and_held_out_ones_are_others(name: str) -> None:
    found = example(name)
    both = [torch.cat([pairs.clean, pairs.corrupted], 1) for pairs in (found.pairs, found.held_out)]
    rows = {tuple(row) for row in torch.cat(both).tolist()}
    assert len(rows) == len(found.pairs) + len(found.held_out)
    assert (found.pairs.clean != found.pairs.corrupted).any(1).all()
    assert (found.pairs.clean[:, 0] == 0).all()
    assert found.text(found.pairs.clean[0]).startswith("^ ")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", planted.names())
def test_other_seeds_give_other_prompts_and_the_same_truth(name: str, seed: int) -> None:
    found, again = planted.load(name, seed), planted.load(name, seed)
    assert torch.equal(found.pairs.clean, again.pairs.clean)
    assert all(map(torch.equal, found.model.parameters(), again.model.parameters()))
    assert not torch.equal(found.pairs.clean, example(name).pairs.clean)
    assert torch.equal(found.truth.edges, example(name).truth.edges)
    assert found.accuracy(found.pairs) == found.accuracy(found.held_out) == 1.0


# ---- the truth --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.names())
def test_exact_patching_of_all_edges_agrees_with_the_truth(name: str) -> None:
    found, table = example(name), checked(name)
    assert len(table) == found.truth.graph.n_edges
    assert edges(table[table["true"]]) == sorted(
        " > ".join(edge) for edge in found.truth.graph.named(found.truth.edges)
    )
    assert table["agrees"].all(), table[~table["agrees"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.names())
def test_what_single_edges_do_not_show_is_known(name: str) -> None:
    """Everywhere else an edge is true just if it has an effect, in each direction."""
    true = checked(name)[checked(name)["true"]]
    for direction, hidden in zip(("denoise", "noise"), HIDDEN.get(name, ([], [])), strict=True):
        assert edges(true[true[direction] < 1e-4]) == sorted(hidden)
    assert bool(example(name).misleading) == (name in (*HIDDEN, "distractor"))


@pytest.mark.parametrize("name", planted.names())
def test_the_truth_alone_does_what_the_model_does(name: str) -> None:
    """All other edges carry the corrupted prompts; and without the truth nothing of the clean ones is left."""
    found = example(name)
    runner = circuits.Runner(found.model, found.held_out)
    alone, rest = runner.values(torch.stack([found.truth.edges, found.truth.complement().edges]))
    assert_close(alone, runner.full)
    assert_close(rest, runner.empty())
    assert found.truth.pruned().n_edges == found.truth.n_edges


@pytest.mark.parametrize("name", BY_NEURON)
def test_exact_patching_of_all_neurons_agrees_with_the_truth(name: str) -> None:
    found = example(name)
    assert found.true_neurons.shape == (found.model.cfg.n_layers, found.model.cfg.d_mlp)
    assert 0 < found.true_neurons.sum() < found.true_neurons.numel()
    assert found.check("neurons")["agrees"].all()


def test_a_wrong_truth_is_found() -> None:
    """One edge is missing, and another one has no effect."""
    found = example("histogram")
    graph, wrong = found.truth.graph, found.truth.edges.clone()
    missing, extra = graph.edge("input", "L0H0<q>"), graph.edge("L0H1", "m0")
    assert wrong[missing]
    assert not wrong[extra]
    wrong[missing], wrong[extra] = False, True
    table = replace(found, truth=replace(found.truth, edges=wrong)).check().set_index(["writer", "reader"])
    assert not table.loc[[("input", "L0H0<q>"), ("L0H1", "m0")], "agrees"].any()
    assert table.loc[("input", "L0H0<q>"), "denoise"] > 0.1
    assert (
        table.loc[~table["true"], "joint"] > 0.1
    ).all()  # all edges that are said to be none have an effect together


def test_a_truth_without_redundant_edges_is_found() -> None:
    """No single one has an effect, all together have."""
    found = example("redundancy")
    only = circuits.Circuit.of(found.truth.graph, [("m0", "logits")])
    table = replace(found, truth=only).check()
    others = table[~table["true"]]
    assert (others[["denoise", "noise"]] < 1e-4).all(axis=None)
    assert not others["agrees"].any()


def test_neurons_that_are_no_part_of_the_truth_are_found() -> None:
    found = example("xor-gate")
    wrong = ~found.true_neurons
    assert not replace(found, neurons=wrong).check("neurons")["agrees"].any()


# ---- where single ablations and correlations mislead --------------------------------------------------------------------


def test_a_backup_head_hides_the_head_that_does_the_task() -> None:
    """Without the main head the model says the same; without both it says nothing."""
    found = example("backup")

    def accuracy(*heads: tuple[int, int]) -> float:
        cut = [
            (f"blocks.{layer}.attn.hook_z", lambda z, hook, head=head: z.index_fill(2, torch.tensor([head]), 0.0))
            for layer, head in heads
        ]
        with found.model.hooks(cut):
            return found.accuracy(found.pairs)

    assert accuracy((0, 1)) == accuracy((1, 0)) == 1.0
    assert accuracy((0, 1), (1, 0)) < 0.3


def test_distractors_know_the_answer_and_do_not_cause_it() -> None:
    found = example("distractor")
    _, cache = found.model.run_with_cache(found.pairs.clean, names_filter="blocks.0.attn.hook_result")
    written = cache["result", 0][:, -1]
    answers = torch.as_tensor(found.pairs.answers)
    for head in (0, 1):  # the copy that nobody reads, and the one that matters: as many vectors as answers
        pairs = {(int(answer), tuple(row)) for answer, row in zip(answers, written[:, head].tolist(), strict=True)}
        assert len(pairs) == len({row for _, row in pairs}) == len(answers.unique())
    exact = sweep(found.model, found.pairs, by="head", layers=[0]).effects().mean[0].abs()
    assert exact[1] > 0.5
    assert exact[0] == exact[2] == 0
    estimated = analysis.attribute_edges(found.model, found.pairs, method="eap", check=False).effects().mean.abs()
    of_mark = estimated[found.truth.graph.edge("L0H2", "m0")]
    assert of_mark > estimated[found.truth.edges].max(), "the gradient is larger than that of what matters"
    assert sweep(found.model, found.pairs, by="head", layers=[0], replace_with="zero").effects().mean[0, 2].abs() > 0.5


# ---- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="there is no planted model 'inducton'; did you mean 'induction'"):
        planted.load("inducton")
    with pytest.raises(KeyError, match="no planted model 'zzz'; did you mean 'previous-token', 'induction'"):
        planted.load("zzz")
    for ask in (lambda: example("induction").check("neurons"), lambda: example("induction").true_neurons):
        with pytest.raises(ValueError, match="the truth of 'induction' is by edges only, it has none by neuron"):
            ask()
    with pytest.raises(ValueError, match="of must be 'edges' or 'neurons', got 'heads'"):
        example("induction").check("heads")
