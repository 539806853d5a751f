"""The leaderboard against the circuit track of MIB, on the same scores: circuits, faithfulness and areas by EAP-IG's code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import Pairs
from hooked_lm.analysis import CircuitTask, TaskRankings, leaderboard
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits import Circuit, from_mib, to_mib
from hooked_lm.analysis.rankings import areas, selected
from tests.clients.circuitkit_run import CLEAN, CORRUPTED, LABELS, MODELS, Batches, circuitkit, difference, made
from tests.clients.mib_run import SHARES
from tests.close import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:transformer-lens 3.9.0 is installed")
WITHOUT_GROUPS = ("gpt2", "parallel")  # of shared keys EAP-IG has an edge for each head


def scores(graph: Graph) -> Tensor:
    drawn = torch.randn(graph.is_edge.shape, generator=torch.Generator().manual_seed(3))
    return drawn.masked_fill(~graph.is_edge, torch.nan)


def theirs(model: Any, path: Path) -> Any:
    """Their graph, read from a file of ours."""
    circuitkit()
    from circuitkit.backends.eap import graph

    own = Graph.of(model)
    return graph.Graph.from_json(str(to_mib(Circuit(own, own.is_edge, scores(own)), path, model)))


def curve(model: Any, ranked: Any, greedy: bool, absolute: bool = True) -> tuple[Tensor, list[float]]:
    """The faithfulness and the number of edges of the circuit of each share, as MIB's evaluation measures them."""
    from circuitkit.backends.eap import evaluate

    def each(*given: Any) -> Tensor:
        return difference(*given, mean=False)

    def metric() -> Tensor:
        return evaluate.evaluate_graph(model, ranked, Batches(), each, intervention="patching", quiet=True).mean()

    values, n_edges = [], []
    for share in (0.0, *SHARES):
        n = int(share * len(ranked.edges))
        choose = ranked.apply_greedy if greedy else ranked.apply_topn
        choose(n, absolute=absolute, prune=True)
        values.append(metric())
        n_edges.append(ranked.weighted_edge_count())
    found = torch.stack(values)
    return ((found - found[0]) / (found[-1] - found[0]))[1:], n_edges[1:]


def area(x: tuple[float, ...], y: Tensor) -> float:
    """The loop of MIB's evaluation."""
    return sum((x[i + 1] - x[i]) * (float(y[i]) + float(y[i + 1])) / 2 for i in range(len(x) - 1))


def judged(model: Any, selection: str) -> TaskRankings:
    pairs = Pairs(list(CLEAN), list(CORRUPTED), LABELS[:, 1], LABELS[:, 0])
    others = Pairs(list(CORRUPTED), list(CLEAN), LABELS[:, 0], LABELS[:, 1])  # which the drawn scores do not read
    task = CircuitTask("words", model, others, pairs)
    with pytest.warns(UserWarning, match="hardly differ"):
        board = leaderboard(
            task, {"drawn": lambda model, _: scores(Graph.of(model))}, untrained=False, selection=selection
        )
    return board["words"]


@pytest.mark.parametrize("selection", ["top", "greedy"])
@pytest.mark.parametrize("name", WITHOUT_GROUPS)
def test_the_same_numbers_on_the_same_scores(name: str, selection: str, tmp_path: Path) -> None:
    model = made(name)
    ranked, greedy = theirs(model, tmp_path / "circuit.json"), selection == "greedy"
    faithful, n_edges = curve(model, ranked, greedy)
    signed, _ = curve(model, ranked, greedy, absolute=False)
    found = judged(model, selection)
    assert found.n_edges[0] == n_edges
    assert_close(found.faithfulness[0], faithful.float(), scale=faithful.abs().max())
    assert_close(found.signed_faithfulness[0], signed.float(), scale=signed.abs().max())
    near = 1e-6 * float(faithful.abs().max())  # 1 or more: curves of random scores overshoot
    assert abs(float(found.column("cpr")[0]) - area(SHARES, signed)) < 1e-6 * float(signed.abs().max())
    assert abs(float(found.column("cmd")[0]) - area(SHARES, (1 - faithful).abs())) < near
    cpr, cmd = areas(faithful)
    assert abs(float(cpr) - area(SHARES, faithful)) < near
    assert abs(float(cmd) - area(SHARES, (1 - faithful).abs())) < near


@pytest.mark.parametrize("name", MODELS)
def test_circuits_there_and_back(name: str, tmp_path: Path) -> None:
    model = made(name)
    ranked, own = theirs(model, tmp_path / "ours.json"), Graph.of(model)
    assert int(ranked.in_graph.sum()) == len(ranked.edges)
    ranked.apply_topn(60, absolute=True, prune=name in WITHOUT_GROUPS)
    if name in WITHOUT_GROUPS:
        ranked.to_json(str(tmp_path / "theirs.json"))
        circuit = from_mib(tmp_path / "theirs.json", model)
        assert torch.equal(circuit.edges, selected(own, scores(own), 60))
        assert circuit.scores is not None
        assert_close(circuit.scores[own.is_edge], scores(own)[own.is_edge], depth=1)
    else:
        assert len(ranked.edges) > own.n_edges
