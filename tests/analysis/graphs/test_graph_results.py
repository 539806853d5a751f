"""What is read from a graph: influence, pruning, scores, tables, files; interventions and supernodes."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hooked_lm
from hooked_lm.analysis.graphs import (
    AttributionGraph,
    GraphInterventions,
    attribution_graph,
    clustered,
    influence,
    intervene,
    supernode_edges,
)
from tests.analysis.graphs.models import TOKENS, tiny, transcoders
from tests.close import GRADIENT, assert_apart, assert_close, assert_equal

quick = partial(attribution_graph, control=None, progress=False)
OTHER = torch.tensor([[1, 7, 20, 5, 12, 11, 29]])


@cache
def graph_of(kind: str = "plain", of: str = "skip") -> AttributionGraph:
    model = tiny(kind)
    found = None if of == "neurons" else transcoders(model, of)
    return quick(model, TOKENS, found, targets=[4, 9], max_nodes=60, check=12)


def random_graph(
    seed: int, n_features: int = 8, n_errors: int = 3, n_tokens: int = 3, n_targets: int = 2
) -> AttributionGraph:
    """Edges from earlier nodes to later ones, some of them 0."""
    draw = torch.Generator().manual_seed(seed)
    n = n_features + n_errors + n_tokens + n_targets
    edges = torch.randn(n, n, generator=draw) * (torch.rand(n, n, generator=draw) < 0.6)
    edges[:n_features, :n_features] = edges[:n_features, :n_features].tril(-1)
    edges[n_features : n - n_targets] = 0
    edges[:, n - n_targets :] = 0
    zeros = torch.zeros(n)
    return AttributionGraph(
        features=torch.tensor([(i // 2, 1, i) for i in range(n_features)]),
        errors=torch.tensor([(i, 1) for i in range(n_errors)], dtype=torch.long).view(-1, 2),
        tokens=[f"t{i}" for i in range(n_tokens)],
        targets=[f"logit {i}" for i in range(n_targets)],
        adjacency=edges, activations=torch.ones(n_features), probabilities=torch.tensor([0.6, 0.3][:n_targets]),
        totals=edges.sum(1), biases=zeros, others=zeros, token_ids=torch.arange(n_tokens), target_ids=torch.arange(n_targets),
    )  # fmt: skip


# ---- influence -------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_influence_is_a_sum_over_paths(seed: int) -> None:
    """The published formula: B = (I - A)^-1 - I, with A the normalised absolute edges."""
    graph = random_graph(seed)
    shares = influence.normalized(graph.adjacency).double()
    paths = torch.linalg.inv(torch.eye(graph.n_nodes, dtype=torch.float64) - shares) - torch.eye(graph.n_nodes)
    assert_close(graph.influence, (graph.weights.double() @ paths).float(), depth=GRADIENT)


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="form a cycle"):
        influence.influence(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1.0, 0.0]))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_a_pruned_graph_keeps_its_sums(seed: int, nodes: float, edges: float) -> None:
    """What is left out goes to `others`; a kept feature has an edge in and out, and tokens and targets are kept."""
    whole = random_graph(seed)
    small = whole.pruned(nodes, edges)
    assert_close(
        small.adjacency.sum(1) + small.others, small.totals, depth=GRADIENT, scale=whole.adjacency.abs().sum(1).max()
    )
    assert (small.tokens, small.targets) == (whole.tokens, whole.targets)
    n = len(small.features)
    assert small.adjacency[:n].any(1).all()
    assert small.adjacency[:, : n + len(small.errors)].any(0).all()
    names = {name: node for node, name in enumerate(whole.names)}
    own = [names[name] for name in small.names]
    inside = whole.adjacency[own][:, own]
    assert_equal(torch.where(small.adjacency == 0, inside, small.adjacency), inside)


def test_shares_decide_how_much_is_kept() -> None:
    whole = graph_of()
    sizes = [len(whole.pruned(nodes).features) for nodes in (0.2, 0.5, 0.8, 1.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert whole.pruned(edges=0.5).n_edges < whole.pruned(edges=0.98).n_edges
    with pytest.raises(ValueError, match="nodes must be a share between 0 and 1"):
        whole.pruned(nodes=1.5)


def test_scores_of_a_pruned_graph_are_those_of_the_whole(tmp_path: Path) -> None:
    """Pruning moves errors to `others`: by itself the part has scores that mean nothing."""
    whole = graph_of()
    small = whole.pruned(0.5).pruned(0.9)
    assert_apart(replace(small, about={}).scores["replacement"], whole.scores["replacement"])
    assert small.scores == whole.scores
    small.save(tmp_path / "graph")
    assert hooked_lm.load(tmp_path / "graph").scores == whole.scores
    groups = random_graph(1).grouped({"kept": [6, 7], "gone": [0]})
    assert set(groups.pruned(0.3).supernodes) <= {"kept"}


def test_scores_of_a_graph_without_errors_are_one() -> None:
    assert_close([*random_graph(3, n_errors=0).scores.values()], [1.0, 1.0])
    scores = graph_of().scores
    assert 0 < scores["replacement"] < scores["completeness"] < 1


# ---- tables, figures, files ------------------------------------------------------------------------------------------


def test_tables_say_what_the_tensors_hold() -> None:
    graph = graph_of()
    edges, nodes = graph.to_dataframe(), graph.nodes()
    assert len(edges) == graph.n_edges
    largest = edges.iloc[0]
    assert largest["weight"] == float(graph.adjacency[graph.node(largest["target"]), graph.node(largest["source"])])
    assert abs(largest["weight"]) == float(graph.adjacency.abs().max())
    assert nodes["name"].is_unique
    assert nodes["kind"].tolist() == graph.kinds
    top = graph.top(4)
    assert top["influence"].is_monotonic_decreasing
    assert top["influence"].iloc[0] == nodes[nodes["kind"] != "target"]["influence"].max()
    feature = nodes.iloc[5]
    assert (feature["layer"], feature["position"], feature["index"]) == tuple(graph.features[5].tolist())
    assert graph.node(-1) == graph.n_nodes - 1
    with pytest.raises(ValueError, match="has no node 'L9F9@9'"):
        graph.node("L9F9@9")


def test_files_hold_everything(tmp_path: Path) -> None:
    graph = graph_of("gated").grouped({"first": [0, 1]})
    graph.save(tmp_path / "graph")
    again = hooked_lm.load(tmp_path / "graph")
    assert isinstance(again, AttributionGraph)
    assert repr(again) == repr(graph)
    for name in ("adjacency", "features", "totals", "biases", "others", "directions", "activations", "token_ids"):
        assert torch.equal(getattr(again, name), getattr(graph, name)), name
    assert (again.supernodes, again.completeness, again.reads) == (graph.supernodes, graph.completeness, graph.reads)
    assert torch.equal(again.agreement.measured, graph.agreement.measured)
    graph.agreement.save(tmp_path / "agreement")
    assert repr(hooked_lm.load(tmp_path / "agreement")) == repr(graph.agreement)


def test_a_figure_draws_the_edges_of_most_influence() -> None:
    graph = graph_of()
    assert "12 edges" in repr(graph.plot(n_edges=12))
    assert "60 features" in graph.plot().title
    with pytest.raises(ValueError, match="n_edges must be at least 1"):
        graph.plot(n_edges=0)
    assert len(graph.agreement.plot().data[0].x) == 2 * len(graph.agreement.nodes)


def test_shapes_are_checked() -> None:
    graph = random_graph(0)
    with pytest.raises(ValueError, match=r"supernode 'a' has node 99, and the graph has nodes 0 to 15"):
        replace(graph, supernodes={"a": [99]})
    with pytest.raises(ValueError, match="is in two supernodes"):
        graph.grouped({"a": [0], "b": ["L0F0@1"]})
    with pytest.raises(ValueError, match=r"adjacency of a graph with 15 nodes must be \[15, 15\], got \[16, 16\]"):
        replace(graph, errors=torch.zeros(2, 2, dtype=torch.long))


# ---- interventions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "of"), [("plain", "skip"), ("gated", "neurons"), ("capped", "across")])
def test_measured_changes_are_those_of_hooks(kind: str, of: str) -> None:
    """Ablating, doubling and patching features, by hand with hooks, in the model where everything responds."""
    model, graph = tiny(kind), graph_of(kind, of)
    found = None if of == "neurons" else transcoders(model, of)
    node = int(graph.influence[: len(graph.features)].argmax())
    layer, position, index = graph.features[node].tolist()

    def logits(hooks: list) -> Tensor:
        cap = model.cfg.output_logits_soft_cap
        with torch.no_grad():
            values = model.run_with_hooks(TOKENS, fwd_hooks=hooks)[0, -1]
        values = cap * (values / cap).atanh() if cap > 0 else values
        return (values - values.mean())[[4, 9]]

    def hooks(times: float) -> list:
        def scaled(value: Tensor, hook: object) -> Tensor:
            value[:, position, index] *= times
            return value

        def added(value: Tensor, vector: Tensor) -> Tensor:
            value[:, position] += (times - 1) * graph.activations[node] * vector
            return value

        if of == "neurons":
            return [(f"blocks.{layer}.mlp.hook_post", scaled)]
        vectors = {place: found.decoder(layer, place) for place in range(3)}
        return [
            (f"blocks.{place}.hook_mlp_out", lambda value, hook, one=one: added(value, one[index].detach()))
            for place, one in vectors.items()
            if one is not None
        ]

    base = logits([])
    for times in (0.0, 2.0):
        result = intervene(model, graph, found, nodes=[node], times=times)
        assert_close(result.measured[0], logits(hooks(times)) - base, depth=GRADIENT, scale=base.abs().max())
        assert_apart(result.measured, torch.zeros(1, 2))
    twice, ablated = (intervene(model, graph, found, nodes=[node], times=times).predicted for times in (2.0, 0.0))
    assert_close(twice, -ablated)


def test_a_patch_takes_the_activations_of_another_prompt() -> None:
    model, graph = tiny(), graph_of()
    found = transcoders(model)
    result = intervene(model, graph, found, nodes=[0, 5, [0, 5]], source=OTHER)
    assert graph.features[0, 1] < 2, "the token at position 2 differs: what is before it stays"
    assert_close(result.measured[0], torch.zeros(2), scale=graph.totals.abs().max())
    late = [node for node, (_, position, _) in enumerate(graph.features.tolist()) if position == 6][:3]
    other = intervene(model, graph, found, nodes=late, source=OTHER)
    assert_apart(other.measured, torch.zeros_like(other.measured))
    assert_close(result.predicted[2], result.predicted[0] + result.predicted[1], scale=1.0)
    with pytest.raises(ValueError, match="must be one prompt of 7 tokens"):
        intervene(model, graph, found, source=OTHER[:, :5])
    with pytest.raises(TypeError, match="times and source are both given"):
        intervene(model, graph, found, source=OTHER, times=2.0)


def test_a_supernode_is_changed_at_once() -> None:
    model = tiny()
    graph = graph_of().grouped({"group": [0, 3, 5]})
    one, other = (intervene(model, graph, transcoders(model), nodes=[nodes]) for nodes in ("group", [0, 3, 5]))
    assert one.nodes == ["group"]
    assert_close(one.measured, other.measured)
    assert_close(one.predicted, other.predicted)


def test_one_node_is_a_list_of_one_and_a_group_has_each_once() -> None:
    model, graph = tiny(), graph_of()
    found = transcoders(model)
    name = graph.names[3]
    one, other, third = (intervene(model, graph, found, nodes=nodes) for nodes in (name, 3, [name]))
    assert one.nodes == other.nodes == third.nodes == [name]
    assert_close(one.measured, third.measured)
    with pytest.raises(ValueError, match="is listed twice in"):
        intervene(model, graph, found, nodes=[[3, name]])
    with pytest.raises(ValueError, match="n must be at least 1"):
        intervene(model, graph, found, n=0)


def test_a_placebo_is_the_mean_of_its_draws() -> None:
    agreement = graph_of().agreement
    one = [replace(agreement, placebo=of[None]).placebo_correlation["correlation"] for of in agreement.placebo]
    assert len(one) == 4
    assert max(one) - min(one) > 0.01, "draws differ"
    assert_close(agreement.placebo_correlation["correlation"], sum(one) / 4)


def test_predictions_of_the_last_layer_are_exact_without_norms() -> None:
    """Nothing responds to its features but the logits, which are linear."""
    model = tiny("unnormed")
    for found in (None, transcoders(model)):
        graph = quick(model, TOKENS, found, targets=[4, 9], max_nodes=80, check=0)
        last = [node for node, (layer, _, _) in enumerate(graph.features.tolist()) if layer == 2]
        result = intervene(model, graph, found, nodes=last[:6], times=-1.5)
        assert_close(result.measured, result.predicted, depth=GRADIENT, scale=graph.totals.abs().max())
        assert_apart(result.placebo[0], result.predicted)


def test_predictions_are_nearer_than_those_of_a_placebo() -> None:
    agreement = graph_of("plain", "neurons").agreement
    own, other = agreement.correlation, agreement.placebo_correlation
    assert own["correlation"] > 0.5 > other["correlation"]
    assert own["low"] < own["correlation"] < own["high"]


def test_a_pruned_graph_predicts_by_its_own_edges() -> None:
    graph = graph_of()
    small = graph.pruned(0.6, 0.8)
    assert small.agreement.nodes == [name for name in graph.agreement.nodes if name in small.names]
    rows = [graph.agreement.nodes.index(name) for name in small.agreement.nodes]
    assert torch.equal(small.agreement.measured, graph.agreement.measured[rows])
    assert_apart(small.agreement.predicted, graph.agreement.predicted[rows])


def test_interventions_refuse_what_is_no_feature_of_the_model() -> None:
    model, graph = tiny(), graph_of()
    found = transcoders(model)
    with pytest.raises(ValueError, match="is no feature: interventions change"):
        intervene(model, graph, found, nodes=[graph.n_nodes - 1])
    with pytest.raises(ValueError, match="graph of features: give the transcoders"):
        intervene(model, graph)
    with pytest.raises(ValueError, match=r"is the graph one of this model\?|not those of the graph"):
        intervene(tiny("gated"), graph, found)
    with pytest.raises(ValueError, match="does not say what its targets read"):
        intervene(model, random_graph(0), found)


def test_few_nodes_have_no_interval() -> None:
    one = torch.tensor([[1.0], [2.0], [3.0]])
    found = GraphInterventions(["a", "b", "c"], ["t"], one, 2 * one, -one[None])
    assert_close(found.correlation["correlation"], 1.0)
    assert torch.tensor(found.correlation["low"]).isnan()
    assert_close(found.placebo_correlation["correlation"], -1.0)
    assert_close(found.slope, 2.0)


# ---- supernodes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_features_that_are_linked_alike_are_one_supernode() -> None:
    """Of twins with the same edges, and others."""
    pytest.importorskip("sklearn")
    edges = torch.zeros(8, 8)
    edges[:4, 4] = torch.tensor([2.0, 4.0, 0.1, 0.0])
    edges[:4, 5] = torch.tensor([0.0, 0.0, 1.0, 3.0])
    edges[6, :4] = torch.tensor([1.0, 2.0, 0.0, 0.0])
    edges[7, :4] = torch.tensor([0.0, 0.0, 1.0, 2.0])
    base = random_graph(0, 4, 0, 2, 2)
    graph = replace(base, adjacency=edges)
    found = clustered(graph, 2)
    assert sorted(found.supernodes.values()) == [[0, 1], [2, 3]]
    assert sorted(clustered(graph, 4).supernodes.values()) == [[0], [1], [2], [3]]
    with pytest.raises(ValueError, match="from 1 to 4"):
        clustered(graph, 5)
    table = supernode_edges(found)
    assert set(table["source"]) | set(table["target"]) == {*found.supernodes, "t0@0", "t1@1", "logit 0", "logit 1"}
    [name] = [name for name, nodes in found.supernodes.items() if nodes == [0, 1]]
    row = table[(table["source"] == "t0@0") & (table["target"] == name)]
    assert_close(row["share"].item(), 1.0)
