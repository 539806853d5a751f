"""Circuits against a run written by hand, reader by reader and writer by writer; what a circuit knows of itself."""

import copy
import math
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, HookedVisionLanguage
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.graph import INPUT, LOGITS, Graph
from hooked_lm.analysis.circuits import Circuit, Evaluation, Runner, evaluate, minimality
from hooked_lm.analysis.circuits.paths import feeds, on_paths
from hooked_lm.analysis.circuits.random_edges import random_edges
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.viz.theme import FAINT
from tests.close import assert_apart, assert_close, assert_near
from tests.families import DECODER_CASES
from tests.families._models import hooked
from tests.families._vision import hooked_vlm
from tests.families.vision_languages import CASES as VISION_CASES

# of models with random weights, which do no task
pytestmark = pytest.mark.filterwarnings("ignore:the (full model|clean and the corrupted).* hardly differ:UserWarning")

# one norm for all, heads that share keys, MLPs beside attention, a norm behind attention, states, a stream that is multiplied
KINDS = ["gpt2", "llama", "gptj", "gemma2", "bamba", "gemma4_text"]
# models that read images, alone, as tokens that see each other, and also after layers
IMAGES = ["llava", "gemma3", "qwen3_vl"]


def model_of(family: str) -> HookedTransformer:
    """A tiny model of a family, in fp64."""
    if family in IMAGES:
        return copy.deepcopy(hooked_vlm(next(case for case in VISION_CASES if case.family == family))).double()
    case = next(case for case in DECODER_CASES if case.family == family)
    return copy.deepcopy(hooked(case)).double()


def prompts_of(model: HookedTransformer) -> tuple[Rows, Rows]:
    """Corrupted and clean prompts, with images if the model reads some."""
    if isinstance(model, HookedVisionLanguage):
        return model.drawn_inputs(0), model.drawn_inputs(1)
    corrupted, clean = torch.randint(model.cfg.d_vocab, (2, 3, 6), generator=torch.Generator().manual_seed(3))
    return corrupted, clean


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5].square()


def draw(graph: Graph, n_rows: int, share: float = 0.5) -> Tensor:
    """Random circuits."""
    return torch.rand(n_rows, *graph.is_edge.shape, generator=torch.Generator().manual_seed(0)) < share


@torch.no_grad()
def by_hand(model: HookedTransformer, gates: Tensor, replace_with: str = "corrupted") -> Tensor:
    """The metric of one circuit."""
    corrupted, clean = prompts_of(model)
    graph, live = Graph.of(model), {}
    _, other = model.run_with_cache(corrupted, names_filter=[node.site for node in graph.writers])
    stands = {"corrupted": lambda x: x, "mean": lambda x: x.mean(0), "zero": torch.zeros_like}[replace_with]

    def keep(value: Tensor, hook: Any) -> None:
        live[hook.name] = value.clone()

    def read(value: Tensor, hook: Any) -> Tensor:
        for i, reader in enumerate(graph.readers):
            if reader.site != hook.name:
                continue
            at = value if reader.head is None else value[:, :, reader.head]
            for j, writer in enumerate(graph.writers):
                if graph.is_edge[j, i]:
                    change = stands(writer.of(other[writer.site])) - writer.of(live[writer.site])
                    at += (1 - gates[j, i]) * change / reader.factor
        return value

    hooks = [(site, keep) for site in dict.fromkeys(node.site for node in graph.writers)]
    hooks += [(site, read) for site in dict.fromkeys(node.site for node in graph.readers)]
    return metric(model.run_with_hooks(clean, fwd_hooks=hooks)).float()


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *IMAGES])
def test_readers_read_what_their_gates_say(kind: str) -> None:
    model = model_of(kind)
    runner = Runner(model, *prompts_of(model), metric)
    gates = torch.rand(draw(runner.graph, 2).shape, generator=torch.Generator().manual_seed(1))
    gates[1] = gates[1] < 0.8
    found = runner.values(gates)
    assert_same(found, torch.stack([by_hand(model, row) for row in gates]))
    assert_apart(found[0], found[1])


@pytest.mark.parametrize("replace_with", ["mean", "zero"])
def test_means_and_zeros_stand_for_what_is_not_left(replace_with: str) -> None:
    model = model_of("llama")
    runner = Runner(model, *prompts_of(model), metric, replace_with)
    gates = draw(runner.graph, 1, 0.7).float()
    assert_same(runner.values(gates)[0], by_hand(model, gates[0], replace_with))


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_vl"])
def test_all_edges_are_the_model_and_none_is_the_corrupted_run(kind: str) -> None:
    model = model_of(kind)
    corrupted, clean = prompts_of(model)
    runner = Runner(model, corrupted, clean, metric)
    ones = torch.ones(1, *runner.graph.is_edge.shape)
    with torch.no_grad():
        full, empty = metric(model(clean)).float(), metric(model(corrupted)).float()
    assert_same(runner.with_graph(ones)[0].float(), full)  # by all layers, though nothing is closed
    assert_same(runner.values(torch.cat([ones, 1 - ones])), torch.stack([full, empty]))


@pytest.mark.parametrize("kind", ["llama", "qwen3_vl"])
def test_one_closed_gate_is_one_path_patched(kind: str) -> None:
    model = model_of(kind)
    corrupted, clean = prompts_of(model)
    runner = Runner(model, corrupted, clean, metric)
    exact = patch_edges(model, corrupted, clean, metric=metric, direction="noise", progress=False).values
    places = runner.graph.is_edge.nonzero()
    gates = torch.ones(len(places), *runner.graph.is_edge.shape)
    gates[torch.arange(len(places)), places[:, 0], places[:, 1]] = 0
    assert_same(runner.values(gates), exact[places[:, 0], places[:, 1]])


@pytest.mark.parametrize("kind", ["gpt2", "bamba", "gemma3", "qwen3_vl"])
def test_rows_that_start_late_are_whole_rows(kind: str) -> None:
    model = model_of(kind)
    runner = Runner(model, *prompts_of(model), metric)
    last = [node.layer == len(model.blocks) - 1 for node in runner.graph.readers]
    gates = draw(runner.graph, 2) | ~torch.tensor(last)
    late = runner.values(gates)
    with_an_early_one = runner.values(torch.cat([gates, torch.zeros_like(gates[:1])]))
    assert_same(late, with_an_early_one[:2])
    layers = []
    hook = ("blocks.0.hook_resid_pre", lambda value, hook: layers.append(0))
    with model.hooks(fwd_hooks=[hook]):
        runner.values(gates)
        assert not layers
        runner.values(~gates)
        assert layers


def test_gradients_of_gates_are_those_of_finite_differences() -> None:
    model = model_of("llama")
    runner = Runner(model, *prompts_of(model), metric)
    gates = torch.rand(runner.graph.is_edge.shape, generator=torch.Generator().manual_seed(0)).double()
    found, step = runner.gradient(gates), 1e-5
    assert not found[~runner.graph.is_edge].any()
    for name in ("q", "k", "v"):
        writer, reader = runner.graph.edge("L0H1", f"L1H1<{name}>")
        moved = gates.repeat(2, 1, 1)
        moved[0, writer, reader] += step
        moved[1, writer, reader] -= step
        up, down = runner.with_graph(moved).detach().mean(1)
        assert_near(found[writer, reader], (up - down) / (2 * step), 1e-5, because="a difference quotient, not a slope")
        assert found[writer, reader] != 0


def test_small_budgets_change_nothing_and_neither_does_the_model() -> None:
    model = model_of("gpt2")
    asked = [weight.requires_grad for weight in model.parameters()]
    weights = [weight.clone() for weight in model.parameters()]
    runners = [Runner(model, *prompts_of(model), metric, max_memory=size) for size in ("auto", 1)]
    assert runners[0].n_rows > 1 == runners[1].n_rows
    gates = draw(runners[0].graph, 5)
    assert_same(runners[1].values(gates), runners[0].values(gates))
    runners[0].gradient(gates[0].float())
    assert asked == [weight.requires_grad for weight in model.parameters()]
    assert all(weight.grad is None for weight in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    assert not model.list_hooks()


def test_the_default_metric_is_the_divergence_from_the_model() -> None:
    model = model_of("gpt2")
    corrupted, clean = prompts_of(model)
    runner = Runner(model, corrupted, clean)
    with torch.no_grad():
        expected = metrics.kl_divergence(model(clean))(model(corrupted))
    assert_same(runner.empty(), expected.float())
    assert_close(runner.full, 0.0, scale=1.0)


def test_what_cannot_be_run_is_refused() -> None:
    model = model_of("gpt2")
    corrupted, clean = prompts_of(model)
    with pytest.raises(ValueError, match="replace_with must be one of 'corrupted', 'mean', 'zero', got 'none'"):
        Runner(model, corrupted, clean, metric, "none")
    with pytest.raises(ValueError, match="must have the same shape"):
        Runner(model, corrupted[:2], clean, metric)
    with pytest.raises(ValueError, match="metric of the full model is NaN"):
        Runner(model, corrupted, clean, lambda logits: logits[:, -1, 0] * torch.nan)
    runner = Runner(model, corrupted, clean, metric)
    with pytest.raises(ValueError, match=r"gates must be \[row, 11 writers, .* got \[1, 2, 3\]"):
        runner.values(torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="no gradient"):
        Runner(model, corrupted, clean, metrics.rank(3)).gradient(torch.ones(runner.graph.is_edge.shape))
    strange = model_of("doge")
    with pytest.raises(ValueError, match="multiplies the numbers of the stream by different weights"):
        Runner(strange, *prompts_of(strange), metric)


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_inputs_of_heads_lead_to_their_outputs() -> None:
    grouped, whole = Graph.of(model_of("llama")), Graph.of(model_of("gemma2"))

    def fed(graph: Graph, reader: str) -> list[str]:
        return [graph.writers[i].name for i in feeds(graph)[graph.reader(reader)].nonzero()[:, 0].tolist()]

    assert fed(grouped, "L1H3<q>") == ["L1H3"]
    assert fed(grouped, "L1H1<k>") == fed(grouped, "L1H1<v>") == ["L1H2", "L1H3"]
    assert fed(grouped, "m0") == ["m0"]
    assert fed(grouped, LOGITS) == []
    assert fed(whole, "L1H1<k>") == ["a1"]


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_vl"])
def test_edges_on_paths_are_those_that_lie_between_input_and_logits(kind: str) -> None:
    graph = Graph.of(model_of(kind))
    for edges in draw(graph, 3, 0.12) & graph.is_edge:
        whole = nx.DiGraph(((w, "out"), (r, "in")) for w, r in graph.named(edges))
        inside = feeds(graph).nonzero().tolist()
        whole.add_edges_from(((graph.readers[r].name, "in"), (graph.writers[w].name, "out")) for r, w in inside)
        # features of images have a start each, as has what reads the embeddings besides
        starts = [(node.name, "out") for node in graph.writers if node.is_input or INPUT in node.fed_by]
        whole.add_nodes_from([*starts, (LOGITS, "in")])
        behind = set().union(*(nx.descendants(whole, start) | {start} for start in starts))
        before = nx.ancestors(whole, (LOGITS, "in")) | {(LOGITS, "in")}
        expected = {(w, r) for w, r in graph.named(edges) if (w, "out") in behind and (r, "in") in before}
        assert set(graph.named(on_paths(graph, edges))) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3_vl"])
def test_pruned_edges_were_of_no_effect(kind: str) -> None:
    model = model_of(kind)
    runner = Runner(model, *prompts_of(model), metric)
    circuits = [Circuit(runner.graph, edges & runner.graph.is_edge) for edges in draw(runner.graph, 6, 0.15)]
    pruned = [circuit.pruned() for circuit in circuits]
    found = [runner.values(torch.stack([circuit.edges for circuit in some])) for some in (circuits, pruned)]
    assert_same(found[0], found[1])
    assert any(0 < one.n_edges < other.n_edges for one, other in zip(pruned, circuits, strict=True))


# ---- what a circuit knows of itself ----------------------------------------------------------------------------------


def small(graph: Graph | None = None) -> Circuit:
    graph = Graph.of(model_of("llama")) if graph is None else graph
    names = [(INPUT, "L0H0<v>"), ("L0H1", "m1"), (INPUT, "m1"), ("m1", LOGITS), ("m0", LOGITS)]
    circuit = Circuit.of(graph, names, model="tiny", method="by hand")
    scores = torch.where(graph.is_edge, torch.arange(graph.is_edge.numel()).view_as(graph.is_edge).float(), torch.nan)
    return Circuit(graph, circuit.edges, scores, about=circuit.about)


def test_a_circuit_says_what_it_is() -> None:
    circuit = small()
    assert circuit.n_edges == 5
    assert circuit.pruned().n_edges == 4
    assert circuit.nodes == [INPUT, "L0H1", "m1", LOGITS]
    assert "5 of " in repr(circuit)
    assert "4 of them on paths" in repr(circuit)
    table = circuit.to_dataframe()
    assert table["on_path"].sum() == 4
    assert table["score"].is_monotonic_decreasing
    found = circuit.to_networkx()
    assert found.edges["L0H0<v>", "L0H1"]["kind"] == "inside"
    assert found.edges["m1", LOGITS]["score"] == circuit.scores[circuit.graph.edge("m1", LOGITS)]
    assert nx.has_path(found, INPUT, LOGITS)
    assert "m0" not in found
    empty = Circuit.of(circuit.graph, [])
    assert (empty.nodes, empty.n_edges) == ([], 0)
    assert "empty" in repr(empty)
    assert not empty.to_networkx()


def test_files_give_everything_back(tmp_path: Path) -> None:
    circuit, path = small(), tmp_path / "circuit.safetensors"
    circuit.save(path)
    found = Circuit.load(path)
    assert (found.graph, found.about) == (circuit.graph, circuit.about)
    assert torch.equal(found.edges, circuit.edges)
    assert torch.equal(found.scores.nan_to_num(-1), circuit.scores.nan_to_num(-1))
    with pytest.raises(TypeError):
        Circuit(circuit.graph, circuit.edges, about={"no": object()}).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["circuit.safetensors"]
    assert Circuit.load(path).n_edges == 5
    evaluate_one(model_of("llama"), circuit).save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds type Evaluation, not Circuit"):
        Circuit.load(tmp_path / "other")
    path.write_text("nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Circuit.load(path)


def evaluate_one(model: HookedTransformer, circuit: Circuit, **options: Any) -> Any:
    return evaluate(model, circuit, *prompts_of(model), metric=metric, **options)


def test_circuits_of_other_models_are_refused() -> None:
    circuit, other = small(), model_of("gpt2")
    for use in (evaluate_one, lambda model, it: minimality(model, it, *prompts_of(model), metric=metric)):
        with pytest.raises(ValueError, match="this circuit of tiny is one of Graph"):
            use(other, circuit)
    with pytest.raises(ValueError, match="is one of Graph"):
        circuit.compare(Circuit.of(Graph.of(other), []))
    with pytest.raises(ValueError, match="does not come after"):
        Circuit(circuit.graph, ~circuit.graph.is_edge)
    with pytest.raises(ValueError, match=r"scores \[2, 2\]"):
        Circuit(circuit.graph, circuit.edges, torch.ones(2, 2))


def test_circuits_are_compared() -> None:
    one = small()
    other = Circuit.of(one.graph, [(INPUT, "m1"), ("m1", LOGITS), ("L1H0", LOGITS)])
    found = one.compare(other)
    assert found.edges["both"] == [(INPUT, "m1"), ("m1", LOGITS)]
    assert (len(found.edges["one"]), found.edges["other"]) == (3, [("L1H0", LOGITS)])
    assert_close(found.jaccard, 2 / 6)
    assert found.nodes == {"both": [INPUT, "m1", LOGITS], "one": ["L0H1"], "other": []}
    table = found.to_dataframe()
    assert table.groupby(["kind", "where"]).size().to_dict() == {
        ("edge", "both"): 2,
        ("edge", "one"): 3,
        ("edge", "other"): 1,
        ("node", "both"): 3,
        ("node", "one"): 1,
    }
    assert "2 in both, 3 and 1" in repr(found)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_faithfulness_and_completeness_are_the_shares_that_they_say() -> None:
    model = model_of("gpt2")
    runner = Runner(model, *prompts_of(model), metric)
    circuits = [Circuit(runner.graph, edges & runner.graph.is_edge) for edges in draw(runner.graph, 2, 0.9)]
    circuits += [Circuit.of(runner.graph, []), Circuit(runner.graph, runner.graph.is_edge)]
    found = evaluate(model, dict(zip("abcd", circuits, strict=True)), *prompts_of(model), metric=metric)
    full, empty = runner.full.mean(), runner.empty().mean()
    for i, circuit in enumerate(circuits):
        rest = by_hand(model, (~circuit.edges).float())
        both = by_hand(model, circuit.edges.float()), rest
        shares = torch.stack([(part.mean() - empty) / (full - empty) for part in both])
        assert_same(torch.stack([found.faithfulness[i], found.completeness[i]]), shares.float())
    assert_same(found.faithfulness[2:], torch.tensor([0.0, 1.0]))
    assert_same(found.completeness[2:], torch.tensor([1.0, 0.0]))
    assert list(found.axes["circuit"]) == list("abcd")
    table = found.to_dataframe()
    assert table["edges"].tolist() == [circuit.n_edges for circuit in circuits]
    assert ((table["low"] <= table["faithfulness"]) & (table["faithfulness"] <= table["high"])).all()
    assert len(found.to_dataframe(per_prompt=True)) == 2 * 4 * 3
    figure = found.plot()
    names = [f"{name} ({n} edges)" for name, n in zip("abcd", table["edges"], strict=True)]
    assert list(figure.layout.xaxis.ticktext) == names
    [bars] = [trace for trace in figure.data if trace.type == "bar"]
    assert_same(torch.as_tensor(bars.y), found.faithfulness)
    part = found.select(circuit=["b", "d"])
    assert part.n_edges == [circuits[1].n_edges, circuits[3].n_edges]
    assert torch.equal(part.values, found.values[:, [1, 3]])


def test_curves_run_from_nothing_to_all(tmp_path: Path) -> None:
    model = model_of("gpt2")
    effects = patch_edges(model, *prompts_of(model), metric=metric, direction="noise", progress=False)
    found = evaluate(model, effects, *prompts_of(model), metric=metric, sizes=[0, 10, 0.5, 1.0])
    n_all = Graph.of(model).n_edges
    assert list(found.axes["circuit"]) == [0, 10, round(n_all / 2), n_all]
    assert found.n_edges[1] <= 10
    assert_same(found.faithfulness[[0, 3]], torch.tensor([0.0, 1.0]))
    x, y = found.shares, found.faithfulness
    assert_close(found.area, float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum()))
    [_, curve, complement, _, by_chance] = found.plot().data
    assert (curve.name, complement.name) == ("faithfulness", "completeness (without the circuit)")
    assert by_chance.name == "random edges (range of 5 draws)"
    assert curve.customdata == (0, None, *found.n_edges[1:])  # the axis is broken after the empty circuit
    assert_close(list(curve.x[2:]), [math.log(n) for n in found.n_edges[1:]])
    assert (by_chance.line.color, by_chance.line.dash) == (FAINT, "dot")
    assert found.plot().layout.title.subtitle.text.endswith(f"95% intervals over {found.n_prompts} prompts")
    table = found.to_dataframe()
    assert table["low"].iloc[[0, 3]].tolist() == table["high"].iloc[[0, 3]].tolist() == [0.0, 1.0]  # by definition
    assert (table["low"] < table["high"])[1:3].all()
    found.save(tmp_path / "curve")
    again = type(found).load(tmp_path / "curve")
    assert torch.equal(again.values, found.values)
    assert again.faithfulness.equal(found.faithfulness)
    assert again.about == found.about


def test_one_circuit_is_drawn_as_bars() -> None:
    model = model_of("gpt2")
    found = evaluate_one(model, Circuit(Graph.of(model), Graph.of(model).is_edge), n_random=2)
    figure = found.plot()
    [bars] = figure.data
    assert bars.type == "bar"
    assert figure.layout.xaxis.ticktext == ("faithfulness", "completeness", "random edges (range of 2 draws)")
    assert_close(torch.as_tensor(bars.y), torch.tensor([1.0, 0.0, 1.0]))
    assert_close(torch.as_tensor(bars.error_y.array[:2]), torch.zeros(2), scale=1.0)


def test_intervals_are_those_of_a_ratio() -> None:
    full, empty = torch.tensor([2.0, 3.0, 7.0, 5.0]), torch.tensor([0.0, 1.0, -1.0, 2.0])
    values = torch.stack(
        [empty + 0.25 * (full - empty), empty + 1.0]
    )  # a share of each prompt; an amount for all alike
    found = Evaluation(
        values[None].expand(2, 2, 4), {"of": ["circuit", "complement"], "circuit": [1, 2]}, full, empty, [1, 2], 9
    )
    table = found.to_dataframe()
    assert_close(table["low"][0], 0.25)
    assert_close(table["high"][0], 0.25)
    assert table["high"][1] - table["low"][1] > 0.1


def test_random_circuits_have_as_many_edges_however_few() -> None:
    graph, generator = Graph.of(model_of("gpt2")), torch.Generator().manual_seed(0)
    for _ in range(20):
        for size, edges in random_edges(graph, range(12), generator).items():
            assert int(edges.sum()) == size
            assert torch.equal(on_paths(graph, edges), edges)


def test_random_circuits_that_were_not_found_are_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2")
    graph = Graph.of(model)
    pair = Circuit(graph, random_edges(graph, [2], torch.Generator().manual_seed(0))[2])
    monkeypatch.setattr("hooked_lm.analysis.circuits.random_edges.TRIES", 1)
    with pytest.warns(UserWarning, match=r"no random circuits of these numbers of edges were found.*\(2: 1 drawn\)"):
        found = evaluate_one(model, [pair, Circuit(graph, graph.is_edge)], n_random=20)
    by_chance = found.random_faithfulness
    assert by_chance is not None
    assert by_chance[:, 0].isnan().any()
    assert not by_chance[:, 1].isnan().any()
    assert found.plot() is not None


def test_random_circuits_are_a_baseline() -> None:
    model = model_of("gpt2")
    graph = Graph.of(model)
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 7, graph.n_edges // 2, graph.n_edges]
    drawn = [random_edges(graph, sizes, generator) for _ in range(3)]
    for edges in (edges for one in drawn for edges in one.values()):
        assert torch.equal(on_paths(graph, edges), edges)
    assert [int(edges.sum()) for edges in drawn[0].values()] == sizes
    assert not torch.equal(drawn[0][sizes[3]], drawn[1][sizes[3]])

    circuit = Circuit(graph, drawn[0][7])
    found = evaluate_one(model, [circuit, circuit.complement()], n_random=2, seed=3)
    generator.manual_seed(3)
    sizes = [circuit.n_edges, circuit.complement().n_edges]
    again = [random_edges(graph, sizes, generator) for _ in range(2)]
    by_hand = [[evaluate_one(model, Circuit(graph, one[n]), n_random=0) for n in sizes] for one in again]
    expected = torch.tensor([[one.faithfulness.item() for one in row] for row in by_hand])
    assert found.random_faithfulness is not None
    assert_same(found.random_faithfulness, expected)
    table = found.to_dataframe()
    assert_same(torch.tensor(table["random"].to_numpy()), expected.mean(0))
    assert_same(torch.tensor(table["random_high"].to_numpy()), expected.amax(0))
    part = found.select(circuit=[-1])
    assert part.random is not None
    assert_same(part.random_faithfulness, found.random_faithfulness[:, [1]])
    assert evaluate_one(model, circuit, n_random=0).random is None
    assert "(random " in repr(found)
    with pytest.raises(ValueError, match="n_random must not be negative, got -1"):
        evaluate_one(model, circuit, n_random=-1)


def test_what_has_no_scale_or_size_is_refused() -> None:
    model = model_of("llama")
    _, clean = prompts_of(model)
    circuit = small()
    with pytest.raises(ValueError, match="no scale"):
        evaluate(model, circuit, clean, clean, metric=metric)
    for sizes in ([-1], [1.5], [10**6], [True]):
        with pytest.raises(ValueError, match="a size is a share"):
            evaluate_one(model, circuit, sizes=sizes)
    with pytest.raises(ValueError, match=r"1 is one edge, and 1.0 is all edges: beside fractions write 1.0"):
        evaluate_one(model, circuit, sizes=[0.1, 1])
    with pytest.raises(ValueError, match="twice"):
        evaluate_one(model, circuit, sizes=[0, 0.0])
    with pytest.raises(ValueError, match="no scores"):
        evaluate_one(model, Circuit(circuit.graph, circuit.edges), sizes=[3])
    with pytest.raises(ValueError, match="no circuits"):
        evaluate_one(model, [])


@pytest.mark.parametrize("of", ["edges", "nodes"])
def test_minimality_is_what_is_missed(of: str) -> None:
    model = model_of("llama")
    circuit = small()
    found = minimality(model, circuit, *prompts_of(model), metric=metric, of=of)
    whole = by_hand(model, circuit.edges.float())
    assert len(found.values) == (5 if of == "edges" else 4)
    for label, difference in zip(found.axes[of[:-1]], found.values, strict=True):
        left = circuit.edges.clone().float()
        if of == "edges":
            left[circuit.graph.edge(*label.split(" -> "))] = 0
        else:
            left[circuit.graph.writer(label)] = 0
        assert_same(difference, whole - by_hand(model, left))
    assert found.values.abs().max() > 1e-3
    with pytest.raises(ValueError, match="empty"):
        minimality(model, Circuit.of(circuit.graph, []), *prompts_of(model), metric=metric)


def test_models_without_heads_that_add_up_are_told_apart() -> None:
    config = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_ctx": 8, "d_vocab": 9, "attn_only": True, "seed": 0}
    one = HookedTransformer(HookedTransformerConfig(**config))
    other = HookedTransformer(HookedTransformerConfig(**{**config, "n_heads": 4}))
    circuit = Circuit.of(Graph.of(one), [(INPUT, LOGITS)])
    circuit.check(Graph.of(one))
    with pytest.raises(ValueError, match="one of Graph"):
        circuit.check(Graph.of(other))


def test_hooks_are_refused_where_edges_are_exchanged() -> None:
    model = model_of("gpt2")
    halved = [("blocks.1.ln1.hook_normalized", lambda value, hook: 0.5 * value)]
    with model.hooks(fwd_hooks=halved), pytest.raises(ValueError, match=r"a hook is open at 'blocks\.1\.ln1"):
        Runner(model, *prompts_of(model), metric)


def test_files_say_what_is_in_the_way(tmp_path: Path) -> None:
    model = model_of("gpt2")
    circuit = Circuit.of(Graph.of(model), [(INPUT, LOGITS)])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        circuit.save(tmp_path / "no" / "circuit")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        circuit.save(tmp_path)
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        Circuit.load(tmp_path)
    evaluate(model, circuit, *prompts_of(model), metric=metric).save(tmp_path / "evaluation")
    with pytest.raises(ValueError, match=r"holds type Evaluation, not Circuit"):
        Circuit.load(tmp_path / "evaluation")
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation"]
