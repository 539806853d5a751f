"""Every way of finding a circuit finds one that was planted, and batched ACDC finds what trying one by one does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.edges import attribute_edges
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits import Circuit, Runner, acdc, discover, evaluate, masks, prune, train_masks
from hooked_lm.analysis.circuits.masks import HardConcrete
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.top import largest
from hooked_lm.demo.experiment import prompt_pairs
from tests.close import assert_close
from tests.core import thinned
from tests.unchecked import unchecked

# of models with random weights, which do no task
pytestmark = pytest.mark.filterwarnings("ignore:the (full model|clean and the corrupted).* hardly differ:UserWarning")

PLANTED = [
    ("input", "L0H1<v>"),
    ("input", "L2H0<q>"),
    ("input", "L2H0<k>"),
    ("L0H1", "m1"),
    ("m1", "L2H0<v>"),
    ("L2H0", "logits"),
]
A, B, C, D, NOISE = (slice(4 * i, 4 * i + 4) for i in range(5))  # what the dimensions of the stream are for
N_TOKENS = 4


def planted() -> HookedTransformer:
    """A model whose logits are what head 2.0 reads of what MLP 1 makes of what head 0.1 copies of the tokens; where head 2.0
    looks depends on the tokens. All other parts are busy with each other."""
    config = {"n_layers": 3, "d_model": 20, "n_heads": 2, "d_head": 4, "d_mlp": 8, "n_ctx": 8, "act_fn": "relu"}
    cfg = HookedTransformerConfig(**config, d_vocab=N_TOKENS, normalization_type=None, seed=0)
    model = HookedTransformer(cfg)
    generator, eye = torch.Generator().manual_seed(0), torch.eye(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.embed.W_E[:, A] = eye
        for block in model.blocks:  # busy: they read tokens and noise, and write noise
            for weight in (block.attn.W_Q, block.attn.W_K, block.attn.W_V):
                for part in (A, NOISE):
                    weight[:, part] = torch.randn(2, 4, 4, generator=generator)
            block.attn.W_O[:, :, NOISE] = torch.randn(2, 4, 4, generator=generator)
            for part in (A, NOISE):
                block.mlp.W_in[part] = torch.randn(4, 8, generator=generator)
            block.mlp.W_out[:, NOISE] = torch.randn(8, 4, generator=generator) / 4
        copies, mixes, reads = model.blocks[0].attn, model.blocks[1].mlp, model.blocks[2].attn
        for weight in (copies.W_Q[1], copies.W_K[1], copies.W_V[1], copies.W_O[1], reads.W_Q[0], reads.W_K[0]):
            weight.zero_()
        for weight in (reads.W_V[0], reads.W_O[0], mixes.W_in, mixes.W_out):
            weight.zero_()
        copies.W_V[1, A], copies.W_O[1, :, B] = eye, eye  # the mean of the tokens so far
        mixes.W_in[B, :4], mixes.W_out[:4, C] = eye, 3 * eye + torch.rand(4, 4, generator=generator)
        reads.W_Q[0, A], reads.W_K[0, A] = 3 * torch.randn(2, 4, 4, generator=generator)
        reads.W_V[0, C], reads.W_O[0, :, D] = eye, eye
        model.unembed.W_U[D] = eye
    return model


CLEAN = torch.tensor([[0, 1, 2, 0], [1, 1, 3, 0], [3, 0, 1, 0], [2, 0, 0, 0]])
CORRUPTED = torch.tensor([[2, 3, 3, 1], [0, 2, 2, 2], [2, 2, 2, 3], [1, 3, 1, 1]])
METRIC = metrics.logit_difference(0, 3)


def edges_of(circuit: Circuit) -> set[tuple[str, str]]:
    return set(circuit.graph.named(circuit.edges))


def score(graph: Graph) -> Tensor:
    """Random scores for edges, of both signs."""
    drawn = torch.rand(graph.is_edge.shape, generator=torch.Generator().manual_seed(5)) - 0.5
    return drawn.masked_fill(~graph.is_edge, torch.nan)


# ---- what was planted is found ---------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "eap": {"n_edges": 6},
    "eap-ig-inputs": {"threshold": 0.01},
    "eap-ig-activations": {"n_edges": 6, "steps": 2},
    "exact": {"threshold": 0.01},
    "acdc": {"threshold": 0.01},
    "pruning": {"n_edges": 6},
    "exchange": {"n_edges": 6},
    "masks": {"n_edges": 6, "steps": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", thinned(WAYS, keep=["pruning"]))
def test_what_was_planted_is_found(method: str) -> None:
    model = planted()
    with unchecked():
        circuit = discover(model, CORRUPTED, CLEAN, metric=METRIC, method=method, **WAYS[method])
    assert edges_of(circuit) == set(PLANTED)
    assert circuit.about["method"] == method
    found = evaluate(model, [circuit], CORRUPTED, CLEAN, metric=METRIC)
    assert_close(found.faithfulness.item(), 1)


@pytest.mark.parametrize("method", ["acdc", "pruning", "exchange"])
def test_what_was_planted_is_found_by_divergence_too(method: str) -> None:
    with unchecked():
        circuit = discover(planted(), CORRUPTED, CLEAN, method=method, **WAYS[method])
    assert edges_of(circuit) == set(PLANTED)
    assert circuit.about["metric"] == "KL(model || circuit)"


def test_other_circuits_of_that_size_are_not_faithful() -> None:
    model = planted()
    graph = Graph.of(model)
    generator, places = torch.Generator().manual_seed(0), graph.is_edge.nonzero()
    circuits = {"planted": Circuit.of(graph, PLANTED)}
    for i in range(5):
        some = torch.zeros_like(graph.is_edge)
        some[tuple(places[torch.randperm(len(places), generator=generator)[:6]].T)] = True
        circuits[f"random {i}"] = Circuit(graph, some)
    for left_out in PLANTED:
        circuits[f"without {left_out}"] = Circuit.of(graph, [edge for edge in PLANTED if edge != left_out])
    found = evaluate(model, circuits, CORRUPTED, CLEAN, metric=METRIC)
    assert_close(found.faithfulness[0], 1)
    assert_close(found.completeness[0], 0, scale=1)
    assert found.faithfulness[1:6].abs().max() < 0.1
    assert (found.faithfulness[6:] - 1).abs().min() > 0.1
    assert (found.faithfulness[6:] - 1).abs().max() > 0.9


# ---- ACDC ------------------------------------------------------------------------------------------------------------


def one_by_one(model: HookedTransformer, threshold: float, metric: Any) -> Tensor:
    """The edges that are left when each is tried in its turn."""
    runner = Runner(model, CORRUPTED, CLEAN, metric)
    kept = runner.graph.is_edge.clone()
    for reader in reversed(range(kept.shape[1])):
        for writer in reversed(range(kept.shape[0])):
            if kept[writer, reader]:
                without = kept.clone()
                without[writer, reader] = False
                before, after = (runner.values(edges[None]).double().mean() for edges in (kept, without))
                change = after - before
                if (change if metric is None else change.abs()) < threshold:
                    kept = without
    return kept


SEARCHES = [(None, 0.005), (None, 0.02), (METRIC, 0.05), (METRIC, 0.1)]


@pytest.mark.parametrize(("metric", "threshold"), thinned(SEARCHES, keep=[(METRIC, 0.1)]))
def test_acdc_is_trying_one_by_one(metric: Any, threshold: float) -> None:
    config = {"n_layers": 2, "d_model": 12, "n_heads": 4, "n_key_value_heads": 2, "d_mlp": 16, "n_ctx": 8}
    cfg = HookedTransformerConfig(**config, d_vocab=N_TOKENS, act_fn="gelu", initializer_range=0.5, seed=1)
    model = HookedTransformer(cfg)
    with unchecked():
        found = acdc(model, CORRUPTED, CLEAN, threshold=threshold, metric=metric)
        expected = one_by_one(model, threshold, metric)
    assert torch.equal(found.edges, expected)
    assert 3 < found.n_edges < found.graph.n_edges - 10
    assert not found.scores[found.graph.is_edge].isnan().any()  # each was tried


def test_acdc_refuses_what_it_cannot_tell_apart() -> None:
    with pytest.raises(ValueError, match=r"threshold must be positive, got 0\.0"):
        acdc(planted(), CORRUPTED, CLEAN, threshold=0.0)

    def strange(logits: Tensor) -> Tensor:
        """NaN away from the full model."""
        read = logits[:, -1, 0]
        return torch.where((read - whole).abs() < 1e-3, read, torch.nan)

    whole = planted()(CLEAN)[:, -1, 0].detach()
    with pytest.raises(ValueError, match="metric of a circuit is NaN"):
        acdc(planted(), CORRUPTED, CLEAN, threshold=0.1, metric=strange)


# ---- pruning and masks -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pruning_leaves_nested_circuits() -> None:
    found = prune(planted(), CORRUPTED, CLEAN, n_edges=20, metric=METRIC, share=0.3, steps=2)
    assert 0 < found.n_edges <= 20
    assert torch.equal(found.scores == 1, found.edges)
    assert (found.scores[found.graph.is_edge & ~found.edges] < 1).all()
    assert torch.equal(on_paths(found.graph, found.edges), found.edges)
    assert prune(planted(), CORRUPTED, CLEAN, n_edges=0, metric=METRIC).n_edges == 0


def test_hard_concrete_gates_are_open_as_often_as_they_say() -> None:
    log_alpha = torch.linspace(-3, 3, 7)
    uniform = torch.rand(5000, 7, generator=torch.Generator().manual_seed(0))
    with unchecked():
        gates = torch.stack([HardConcrete(log_alpha).sample(row) for row in uniform])
    assert ((gates >= 0) & (gates <= 1)).all()
    often = (gates > 0).float().mean(0)
    for i, alpha in enumerate(log_alpha):
        assert abs(float(HardConcrete(alpha[None]).n_open()) - float(often[i])) < 0.03, "four deviations of 5,000 draws"
    assert (gates == 0).any()
    assert (gates == 1).any()
    assert HardConcrete(torch.tensor([-9.0, 9.0])).without_noise().tolist() == [0, 1]


def test_masks_repeat_by_their_seed_and_leave_all_else_alone() -> None:
    model, state = planted(), torch.random.get_rng_state()
    asked = [weight.requires_grad_(i % 2 == 0).requires_grad for i, weight in enumerate(model.parameters())]
    runs = [train_masks(model, CORRUPTED, CLEAN, n_edges=6, metric=METRIC, steps=4, seed=s) for s in (0, 0, 1)]
    assert torch.equal(runs[0].scores.nan_to_num(), runs[1].scores.nan_to_num())
    assert not torch.equal(runs[0].scores.nan_to_num(), runs[2].scores.nan_to_num())
    assert torch.equal(state, torch.random.get_rng_state())
    assert asked == [weight.requires_grad for weight in model.parameters()]
    assert all(weight.grad is None for weight in model.parameters())
    assert (runs[0].about["seed"], runs[2].about["seed"]) == (0, 1)


def test_nothing_half_trained_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def breaks(logits: Tensor) -> Tensor:
        calls.append(0)
        return logits[:, -1, 0] * (torch.nan if len(calls) > 4 else 1)

    with pytest.raises(ValueError, match="loss is nan at step"):
        train_masks(planted(), CORRUPTED, CLEAN, n_edges=6, metric=breaks, steps=10)

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(masks.Training, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_masks(planted(), CORRUPTED, CLEAN, n_edges=6, metric=METRIC, steps=10)


# ---- the largest scores ----------------------------------------------------------------------------------------------


@pytest.mark.every_parameter
@pytest.mark.parametrize("n_edges", [0, 1, 6, 30, 100])
def test_the_largest_scores_fill_the_number_of_edges(n_edges: int) -> None:
    graph = Graph.of(planted())
    scores = score(graph)
    found = largest(graph, scores, n_edges)
    assert int(found.sum()) <= n_edges
    assert torch.equal(on_paths(graph, found), found)
    order = scores.abs().nan_to_num(nan=-1).flatten().argsort(descending=True)[: graph.n_edges]
    sizes = []
    for n in range(graph.n_edges + 1):  # every number that might be taken
        taken = torch.zeros_like(graph.is_edge)
        taken.view(-1)[order[:n]] = True
        sizes.append(int(on_paths(graph, taken).sum()))
    assert int(found.sum()) == max(size for size in sizes if size <= n_edges)


def test_effects_that_were_measured_make_circuits() -> None:
    model = planted()
    found = attribute_edges(model, CORRUPTED, CLEAN, metric=METRIC, direction="noise", check=True)
    circuit = discover(model, CORRUPTED, CLEAN, method=found, n_edges=6)
    assert edges_of(circuit) == set(PLANTED)
    assert_close(circuit.about["agreement"]["pearson"], found.agreement["pearson"].item())
    part = found.select(writer=["L2H0", "m1"], reader=["logits", "L2H0<v>"])
    scores, edge = (
        discover(model, CORRUPTED, CLEAN, method=part, threshold=0.01).scores,
        circuit.graph.edge("m1", "L2H0<v>"),
    )
    assert_close(scores[edge], circuit.scores[edge])
    assert int((~scores.isnan()).sum()) == 3
    with pytest.raises(ValueError, match=r"of another model: there is no writer 'L0H2'"):
        discover(model, CORRUPTED, CLEAN, method=_renamed(found), n_edges=6)
    with pytest.raises(ValueError, match="axes writer and reader"):
        discover(model, CORRUPTED, CLEAN, method=found.select(writer="m1"), n_edges=6)
    with pytest.raises(TypeError, match="take no options, got steps"):
        discover(model, CORRUPTED, CLEAN, method=found, n_edges=6, steps=3)


def _renamed(found: Any) -> Any:
    writers = [name.replace("L0H1", "L0H2") for name in found.axes["writer"]]
    return type(found)(
        found.values, {**found.axes, "writer": writers}, found.corrupted, found.clean, base="clean", method="eap"
    )


def test_a_threshold_that_keeps_nothing_says_so() -> None:
    for method in ("eap", "acdc"):
        circuit = discover(planted(), CORRUPTED, CLEAN, metric=METRIC, method=method, threshold=1e6)
        assert (circuit.n_edges, circuit.nodes) == (0, [])
        assert "empty: none of 100 edges is left" in repr(circuit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic", "n_edges": 3}, "method must be one of 'eap'"),
        ({"method": "eap"}, "give n_edges or threshold"),
        ({"method": "eap", "n_edges": 3, "threshold": 0.1}, "give n_edges or threshold"),
        ({"method": "acdc", "n_edges": 3}, "'acdc' needs threshold, not n_edges"),
        ({"method": "masks", "threshold": 0.1}, "'masks' needs n_edges, not threshold"),
        ({"method": "eap", "n_edges": -1}, "n_edges must be a whole number, not negative"),
        ({"method": "eap", "n_edges": 3, "replace_with": "no"}, "replace_with must be one of"),
        ({"method": "pruning", "n_edges": 3, "share": 1.0}, "must be between 0 and 1"),
        ({"method": "pruning", "n_edges": 3, "steps": 0}, "one step at least"),
        ({"method": "masks", "n_edges": 3, "steps": 0}, "one step at least"),
        ({"method": "pruning", "n_edges": 3, "metric": metrics.rank(0)}, "has no gradient"),
        ({"method": "pruning", "n_edges": 3, "metric": None, "steps": 1}, "no gradient there: take more steps"),
        ({"method": "eap", "n_edges": 3, "metric": None}, "such as 'eap-ig-inputs'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        discover(planted(), CORRUPTED, CLEAN, **{"metric": METRIC, **options})


# ---- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_few_edges_of_the_bundled_model_do_its_task() -> None:
    model = HookedTransformer.from_pretrained("demo")
    pairs = prompt_pairs(8)
    clean, corrupted = ([getattr(pair, which) for pair in pairs] for which in ("clean", "corrupted"))
    circuit = discover(model, corrupted, clean, method="pruning", n_edges=75)
    found = evaluate(model, circuit, corrupted, clean)
    assert found.n_edges[0] <= 75
    assert found.n_prompts == 4, "those that the search did not see"
    assert found.faithfulness[0] >= 0.8
    places = circuit.graph.is_edge.nonzero()
    drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[: circuit.n_edges]
    some = torch.zeros_like(circuit.edges)
    some[tuple(places[drawn].T)] = True
    assert evaluate(model, Circuit(circuit.graph, some), corrupted, clean).faithfulness[0] < 0.1


def test_a_metric_without_a_gradient_trains_no_masks() -> None:
    def rounded(logits: Tensor) -> Tensor:
        return METRIC(logits).detach()

    with pytest.raises(ValueError, match="no gradient"):
        train_masks(planted(), CORRUPTED, CLEAN, metric=rounded, n_edges=6, steps=2)


@pytest.mark.slow
def test_edges_without_any_effect_are_none_to_keep() -> None:
    model = planted()
    for method in ("eap", "exact"):
        assert discover(model, CLEAN, CLEAN, metric=METRIC, method=method, n_edges=6).n_edges == 0
        assert discover(model, CORRUPTED, CLEAN, metric=METRIC, method=method, n_edges=6).n_edges > 0


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_a_threshold_is_a_size(threshold: float) -> None:
    with pytest.raises(ValueError, match="finite number and not negative"):
        discover(planted(), CORRUPTED, CLEAN, metric=METRIC, method="eap", threshold=threshold)


def test_the_direction_of_a_circuit_is_not_an_option() -> None:
    with pytest.raises(TypeError, match="has no argument 'direction'"):
        discover(planted(), CORRUPTED, CLEAN, metric=METRIC, method="eap", n_edges=6, direction="denoise")


@pytest.mark.parametrize("search", [train_masks, prune])
def test_searches_by_gradients_refuse_inference_mode(search: Any) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        search(planted(), CORRUPTED, CLEAN, metric=METRIC, n_edges=6)
