"""The leaderboard: its numbers are those of the parts, on the bundled model, on planted ones and on untrained twins."""

import warnings
from dataclasses import replace
from inspect import unwrap
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer, Pairs, planted
from hooked_lm.analysis import CircuitTask, Graph, Leaderboard, attribute_edges, circuits, leaderboard, patch_edges
from hooked_lm.analysis.attribution import edges
from hooked_lm.analysis.attribution.attribution_result import agreement
from hooked_lm.analysis.rankings import METHODS, SHARES, areas, auroc, selected
from hooked_lm.analysis.rankings.methods import NamedMethod, methods_of
from hooked_lm.demo.tasks import tasks
from tests.close import assert_close, assert_equal

FEW_PROMPTS = "ignore:.* held-out clean prompts of task '(or|and|xor)-gate'"  # there are few
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(FEW_PROMPTS)]


@pytest.fixture(scope="module")
def task() -> CircuitTask:
    [found] = tasks(names=["agreement"], n=8)
    return found


@pytest.fixture(scope="module")
def board(task: CircuitTask) -> Leaderboard:
    return leaderboard(task, ["exact", "eap", "random"], shares=(0.01, 0.1, 0.5, 1.0), progress=False)


@pytest.fixture(scope="module")
def of_planted() -> Leaderboard:
    return leaderboard([planted.load(name) for name in ("induction", "or-gate")], progress=False)


def test_curves_are_those_of_circuits(board: Leaderboard, task: CircuitTask) -> None:
    found = board["agreement"]
    effects = patch_edges(task.model, task.pairs, direction="noise", progress=False)
    graph = Graph.of(task.model)
    scores = circuits.discover(task.model, task.pairs, method=effects, n_edges=1, held_out=0).scores
    assert scores is not None
    kept = [circuits.Circuit(graph, selected(graph, scores, int(share * graph.n_edges))) for share in found.shares]
    evaluation = circuits.evaluate(task.model, kept, task.held_out, n_random=0)
    assert_close(found.values[found.methods.index("exact")], evaluation.values[0])
    assert_close(found.faithfulness[found.methods.index("exact")], evaluation.faithfulness)
    cpr, _ = areas(found.signed_faithfulness, found.shares)
    _, cmd = areas(found.faithfulness, found.shares)
    assert_close(found.column("cpr"), cpr.float())
    assert_close(found.column("cmd"), cmd.float())
    for name in ("cpr", "cmd"):
        low, high = found.interval_of(name)
        assert bool(((low <= found.column(name)) & (found.column(name) <= high)).all())


def test_cpr_is_of_signed_scores(board: Leaderboard, task: CircuitTask) -> None:
    """Edges that lower the metric come last, so it is no other word for CMD. Random scores have no sign."""
    found, graph = board["agreement"], Graph.of(task.model)
    scores = circuits.discover(task.model, task.pairs, method="exact", n_edges=1, held_out=0).scores
    assert scores is not None
    sizes = [int(share * graph.n_edges) for share in found.shares]
    kept = [circuits.Circuit(graph, selected(graph, scores, n, absolute=False)) for n in sizes]
    evaluation = circuits.evaluate(task.model, kept, task.held_out, n_random=0)
    exact, chance = (found.methods.index(name) for name in ("exact", "random"))
    assert_close(found.signed_faithfulness[exact], evaluation.faithfulness)
    assert found.signed_faithfulness[exact].max() > 1
    assert_equal(found.signed[chance], found.values[chance])
    assert not torch.equal(found.signed[exact], found.values[exact])


def test_sizes_alone_have_one_order() -> None:
    """Effects above 0 say that the metric is better without these edges: by sign they come last. Sizes do not say it."""
    example = planted.load("induction")
    known = example.truth.edges.float()
    methods = {
        "signs": lambda model, pairs: known,
        "circuit": lambda model, pairs: replace(example.truth, scores=known),
    }
    [found] = leaderboard(example, methods, untrained=False, progress=False).tasks
    assert_equal(found.values[0], found.values[1])
    assert_equal(found.signed[1], found.values[1])
    assert found.signed_faithfulness[0, -2] < 0.1 < found.faithfulness[0, -2]


def test_agreement_and_cost(board: Leaderboard, task: CircuitTask) -> None:
    table = board.to_dataframe().set_index("method")
    assert table.loc["exact", ["spearman", "sign", "slope"]].tolist() == [1.0, 1.0, 1.0]
    both = (
        attribute_edges(task.model, task.pairs, direction="noise", check=False),
        patch_edges(task.model, task.pairs, direction="noise", progress=False),
    )
    expected = agreement(*(each.effects().mean.flatten() for each in both))
    assert_close(float(table.loc["eap", "spearman"]), float(expected["spearman"]))
    assert_close(float(table.loc["eap", "slope"]), float(expected["slope"]))
    assert table.loc["eap", "passes"] == 3  # two forward, one backward
    assert table.loc["exact", "passes"] > 50
    assert table.loc["random", "passes"] == 0


def test_random_rankings_are_worst_and_twins_are_controls(board: Leaderboard) -> None:
    table = board.to_dataframe()
    assert table["method"].iloc[-1] == "random"
    of_twin = table.set_index("method")["cmd_untrained"]
    assert of_twin.isna().tolist() == [name == "random" for name in table["method"]]
    assert (of_twin.dropna() > table.set_index("method")["cmd"].drop("random")).all()


def test_a_planted_truth_tells_methods_apart(of_planted: Leaderboard) -> None:
    """Each of the two kinds of methods misses the circuit that the other one finds."""
    assert of_planted.methods == list(METHODS) == ["exact", *edges.METHODS, "random"]
    induction, either = (of_planted[name].to_dataframe().set_index("method") for name in ("induction", "or-gate"))
    assert induction.loc["exact", "auroc"] == induction.loc["eap-ig-activations", "auroc"] == 1
    assert induction.loc["eap", "auroc"] < 0.8  # saturated attention has no gradient
    assert either.loc["eap-ig-activations", "auroc"] == 1
    assert either.loc["exact", "auroc"] < 0.7  # without one of both, the other one does it
    assert not of_planted.failures(reference="eap-ig-activations").empty
    assert {"or-gate"} == set(of_planted.failures(reference="eap-ig-activations").query("method == 'exact'")["task"])


def test_the_truth_is_what_scores_are_compared_with() -> None:
    example = planted.load("induction")
    known = example.truth.edges.float()
    methods = {
        "truth": lambda model, pairs: known,
        "opposite": lambda model, pairs: 1 - known,
        "circuit": lambda model, pairs: replace(example.truth, scores=known),
    }
    table = leaderboard(example, methods, untrained=False).to_dataframe().set_index("method")
    assert table["auroc"].to_dict() == {"truth": 1.0, "circuit": 1.0, "opposite": 0.0}
    assert "spearman" not in table
    assert table.loc["truth", "cmd"] < 0.1 < table.loc["opposite", "cmd"]
    graph = Graph.of(example.model)
    drawn = torch.randn(graph.is_edge.shape, generator=torch.Generator().manual_seed(0))
    [found] = leaderboard(example, {"drawn": lambda model, pairs: drawn}, untrained=False).tasks
    expected = auroc(drawn[graph.is_edge].abs(), example.truth.edges[graph.is_edge])
    assert_close(float(found.column("auroc")[0]), expected)


def test_equal_scores_are_undefined_by_name() -> None:
    example = planted.load("induction")
    with pytest.warns(UserWarning, match="same ranks nothing on task induction: all 75 scores are equal") as warned:
        board = leaderboard(
            example, {"same": lambda model, pairs: torch.ones(example.truth.edges.shape)}, untrained=False
        )
    assert len(warned) == 1
    assert "auroc" not in board.to_dataframe()


def test_equal_scores_are_named_without_a_truth(task: CircuitTask) -> None:
    none = torch.zeros(Graph.of(task.model).is_edge.shape)
    with pytest.warns(UserWarning, match="none ranks nothing on task agreement: all 1519 scores are equal"):
        leaderboard(task, {"none": lambda model, pairs: none}, untrained=False, progress=False)


def test_one_held_out_pair_has_no_interval(task: CircuitTask, tmp_path: Path) -> None:
    assert task.held_out is not None
    alone = CircuitTask("one", task.model, task.pairs, task.held_out[:1])
    scores = Graph.of(task.model).is_edge.float().cumsum(1)
    methods = {"exact": lambda model, pairs: scores, "other": lambda model, pairs: -scores}
    board = leaderboard(alone, methods, untrained=False, progress=False)
    with pytest.raises(ValueError, match=r"one held-out pair has no interval \(one\): where methods fail is not known"):
        board.failures()
    assert "one held-out pair has no interval (one)" in repr(board)
    text = board.write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Not known: one held-out pair has no interval" in text
    assert "Nowhere" not in text


@pytest.mark.parametrize("replace_with", ["mean", "zero", "constant", "optimal"])
def test_other_ablations(replace_with: str) -> None:
    example = planted.load("previous-token")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        board = leaderboard(example, ["eap"], replace_with=replace_with, untrained=False, progress=False)
    assert board.tasks[0].about["replace_with"] == replace_with
    assert_close(board.tasks[0].faithfulness[0, -1:], torch.ones(1))


def test_seeds(task: CircuitTask) -> None:
    one, same, other = (leaderboard(task, "random", seed=seed, untrained=False).tasks[0].values for seed in (1, 1, 2))
    assert_equal(one, same)
    assert not torch.equal(one, other)


def test_a_file_and_back(of_planted: Leaderboard, tmp_path: Path) -> None:
    of_planted.save(tmp_path / "board")
    again = Leaderboard.load(tmp_path / "board")
    assert again.to_dataframe(per_task=True).equals(of_planted.to_dataframe(per_task=True))
    assert again.tasks[1].about == of_planted.tasks[1].about


def test_the_page_needs_no_network(of_planted: Leaderboard, tmp_path: Path) -> None:
    text = of_planted.write_html(tmp_path / "page.html", "hooked-lm leaderboard planted").read_text(encoding="utf-8")
    for part in (
        "Where each method fails",
        "or-gate",
        "What they cost",
        "hooked-lm leaderboard planted",
        "needs no network",
    ):
        assert part in text
    assert "<script src" not in text


def test_figures(of_planted: Leaderboard) -> None:
    lines = {trace.name for trace in of_planted.plot().data if trace.name}
    assert lines == set(METHODS)
    [points] = of_planted.plot_cost().data
    assert set(points.text) == set(METHODS) - {"random"}
    assert of_planted.to_text().splitlines()[-1].startswith("random")


def test_what_is_refused(task: CircuitTask) -> None:
    with pytest.raises(ValueError, match="there is no method 'eapp'; did you mean 'eap'"):
        leaderboard(task, ["eapp"])
    with pytest.raises(ValueError, match="method 'acdc' finds one circuit and ranks no edges"):
        leaderboard(task, ["acdc"])
    with pytest.raises(
        ValueError, match="replace_with must be one of 'corrupted', 'mean', 'zero', 'constant', 'optimal'"
    ):
        leaderboard(task, replace_with="means")
    with pytest.raises(ValueError, match="there are no tasks"):
        leaderboard([])
    with pytest.raises(ValueError, match="tasks have different names, got agreement, agreement"):
        leaderboard([task, task])
    with pytest.raises(TypeError, match="method 'one' must be a function of a model and pairs, got"):
        unwrap(methods_of)({"one": 1}, {})
    with pytest.raises(TypeError, match="method 'one' must return measured effects"):
        unwrap(NamedMethod.ranking)(NamedMethod("one", lambda model, pairs: 1), task.model, task.pairs)
    with pytest.raises(ValueError, match=r"method 'one' must return scores \[37, 101\]"):
        leaderboard(task, {"one": lambda model, pairs: torch.zeros(2, 2)})
    graph = Graph.of(task.model)
    with pytest.raises(ValueError, match="method 'one' returned a circuit without scores"):
        leaderboard(task, {"one": lambda model, pairs: circuits.Circuit(graph, graph.is_edge)})


def test_tasks_that_are_refused(task: CircuitTask) -> None:
    with pytest.raises(ValueError, match="the pairs of task 'a' need answers and wrong_answers"):
        CircuitTask("a", task.model, Pairs(["a", "b"], ["b", "a"]))
    with pytest.raises(ValueError, match="task 'a' has one pair: give held_out="):
        CircuitTask("a", task.model, task.pairs[:1])
    with pytest.raises(ValueError, match="this circuit is one of Graph"):
        CircuitTask("a", task.model, task.pairs, truth=planted.load("induction").truth)
    same = Pairs(task.pairs.clean, task.pairs.clean, task.pairs.answers, task.pairs.wrong_answers)
    with pytest.raises(ValueError, match="no scale: the metric is"):
        leaderboard(CircuitTask("a", task.model, same), "random", untrained=False)


def test_searched_prompts_are_not_held_out(task: CircuitTask) -> None:
    """By the clean prompt: another corrupted prompt beside it is no other prompt."""
    pairs, other = task.pairs, task.held_out
    assert other is not None
    again = replace(pairs, corrupted=other.corrupted)
    with pytest.raises(ValueError, match="all 4 held-out clean prompts of task 'a' are among those that are searched"):
        CircuitTask("a", task.model, pairs, again)
    mixed = replace(other, clean=[*pairs.clean[:1], *other.clean[1:]])
    with pytest.warns(UserWarning, match="1 of 4 held-out clean prompts of task 'a' are among") as warned:
        CircuitTask("a", task.model, pairs, mixed)
    assert len(warned) == 1


def test_prompts_are_held_out(task: CircuitTask) -> None:
    seen = []

    def method(model: HookedTransformer, pairs: Pairs) -> torch.Tensor:
        seen.extend(pairs.clean)
        return Graph.of(model).is_edge.float().cumsum(1)

    leaderboard(task, {"one": method}, untrained=False)  # type: ignore[dict-item]
    assert task.held_out is not None
    assert seen == task.pairs.clean
    assert not {*seen} & {*task.held_out.clean}
    assert len(SHARES) == 10
