"""The search by exchanges: never worse than its start, as good as the best of all circuits where they can be counted, and of
nothing where there is nothing."""

from itertools import combinations
from random import Random

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, planted
from hooked_lm.analysis import metrics
from hooked_lm.analysis.circuits import Runner, discover, evaluate, exchange
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.top import largest
from hooked_lm.demo.corpus import NOUNS, TASKS
from tests.close import GRADIENT, MODEL, assert_close
from tests.unchecked import unchecked

pytestmark = pytest.mark.filterwarnings("ignore:the (full model|clean and the corrupted).* hardly differ:UserWarning")

CLEAN = torch.tensor([[0, 1, 2, 0], [1, 1, 3, 0], [3, 0, 1, 0], [2, 0, 0, 0]])
CORRUPTED = torch.tensor([[2, 3, 3, 1], [0, 2, 2, 2], [2, 2, 2, 3], [1, 3, 1, 1]])
METRIC = metrics.logit_difference(0, 3)


def small(seed: int, n_layers: int = 1, n_heads: int = 1) -> HookedTransformer:
    """A model with large random weights, whose circuits differ much."""
    sizes = {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "d_model": 12,
        "d_head": 4,
        "d_mlp": 16,
        "n_ctx": 8,
        "d_vocab": 4,
    }
    model = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 3)
    return model


def error(runner: Runner, edges: Tensor) -> Tensor:
    """The error of each circuit, as the search says it."""
    missed = runner.values(edges).double() - runner.full
    span = (runner.full.double() - runner.empty()).abs().mean()
    return (missed.square().mean(1) + missed.mean(1).square()) / span**2


# ---- gradients of each prompt ----------------------------------------------------------------------------------------


def test_gradients_of_prompts_are_those_of_each_alone() -> None:
    model = small(0, n_layers=2, n_heads=2)
    runner = Runner(model, CORRUPTED, CLEAN, METRIC)
    gates = torch.rand(runner.graph.is_edge.shape, generator=torch.Generator().manual_seed(1))
    found = runner.gradients(gates)
    for i in range(len(CLEAN)):
        alone = Runner(model, CORRUPTED[i : i + 1], CLEAN[i : i + 1], METRIC)
        assert_close(found[i], alone.gradient(gates), depth=GRADIENT)
    assert_close(found.mean(0), runner.gradient(gates), depth=GRADIENT)
    assert not bool(found[:, ~runner.graph.is_edge].any())


def test_a_metric_with_one_number_has_one_gradient() -> None:
    runner = Runner(small(0), CORRUPTED, CLEAN, lambda logits: METRIC(logits).mean())
    gates = runner.graph.is_edge.float() / 2
    assert_close(runner.gradients(gates), runner.gradient(gates)[None], depth=GRADIENT)
    assert exchange(small(0), CORRUPTED, CLEAN, metric=runner.metric, n_edges=4).n_edges <= 4


# ---- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_it_is_as_good_as_the_best_of_all_circuits(seed: int) -> None:
    runner = Runner(small(seed), CORRUPTED, CLEAN, METRIC)
    places = runner.graph.is_edge.nonzero()
    for n_edges in range(2, len(places)):
        some = torch.tensor(list(combinations(range(len(places)), n_edges)))
        every = torch.zeros(len(some), *runner.graph.is_edge.shape, dtype=torch.bool)
        every[torch.arange(len(some))[:, None], places[some][..., 0], places[some][..., 1]] = True
        with unchecked():
            circuit = exchange(small(seed), CORRUPTED, CLEAN, metric=METRIC, n_edges=n_edges, steps=1, progress=False)
        found, best = error(runner, circuit.edges[None])[0], error(runner, every).min()
        assert_close(found.float(), best.float(), depth=8 * MODEL, scale=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_edges", [0, 3, 8, 20])
def test_it_is_never_worse_than_its_start_and_keeps_to_its_size(seed: int, n_edges: int) -> None:
    model = small(seed, n_layers=2, n_heads=2)
    with unchecked():
        circuit = exchange(model, CORRUPTED, CLEAN, metric=METRIC, n_edges=n_edges, progress=False)
        start = exchange(model, CORRUPTED, CLEAN, metric=METRIC, n_edges=n_edges, rounds=0, progress=False)
    before, after = circuit.about["errors"]
    assert after <= before
    assert start.about["errors"] == [before, before]
    assert circuit.n_edges <= n_edges
    runner = Runner(model, CORRUPTED, CLEAN, METRIC)
    found = error(runner, torch.stack([start.edges, circuit.edges]))
    assert_close(found.float(), torch.tensor([before, after]), scale=1)


def test_other_sizes_come_from_its_order() -> None:
    model = small(1, n_layers=2, n_heads=2)
    with unchecked():
        circuit = exchange(model, CORRUPTED, CLEAN, metric=METRIC, n_edges=10, progress=False)
    graph, scores = circuit.graph, circuit.scores
    assert scores is not None
    assert len(scores[graph.is_edge].unique()) == graph.n_edges, "an order"
    assert float(scores[circuit.edges].min()) > float(scores[graph.is_edge & ~circuit.edges].max())
    assert bool((largest(graph, scores, circuit.n_edges) == on_paths(graph, circuit.edges)).all())


def test_it_finds_nothing_to_keep_where_the_prompts_are_the_same() -> None:
    with pytest.raises(ValueError, match="nothing to keep"):
        exchange(small(0), CLEAN, CLEAN, metric=METRIC, n_edges=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "between 0 and 1"),
        ({"steps": 0}, "steps=0"),
        ({"rounds": -1}, "rounds=-1"),
        ({"n_edges": -1}, "n_edges must be a whole number"),
        ({"metric": metrics.rank(0)}, "has no gradient"),
        ({"metric": None, "steps": 1}, "take more steps"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        discover(small(0), CORRUPTED, CLEAN, **{"method": "exchange", "n_edges": 3, "metric": METRIC, **options})  # type: ignore[arg-type]


# ---- the bundled model -----------------------------------------------------------------------------------------------


def pairs_of_agreement(model: HookedTransformer, n: int) -> tuple[list[str], list[str], list[str], list[str]]:
    """Sentences with a subject of one or of many, by turns, and the same with the other."""
    rng, rows = Random(0), []
    while len(rows) < n:
        item = TASKS["agreement"](rng)
        one, many = str(item.key[0]), NOUNS[str(item.key[0])]
        is_many = item.prompt.split(many, 1)[0] != item.prompt
        other = item.prompt.replace(many, one, 1) if is_many else item.prompt.replace(one, many, 1)
        if [len(model.to_str_tokens(text)) for text in (item.prompt, other)] == [6, 6]:
            rows.append((other, item.prompt, item.answer, item.wrong_answer))
    corrupted, clean, right, wrong = (list(column) for column in zip(*rows, strict=True))
    return corrupted, clean, right, wrong


@pytest.mark.slow
def test_it_is_more_faithful_than_a_ranking_on_other_prompts() -> None:
    model = HookedTransformer.from_pretrained("demo")
    corrupted, clean, *answers = pairs_of_agreement(model, 16)
    search = {"metric": metrics.logit_difference(*answers, model=model), "n_edges": 30}
    with unchecked():
        found = discover(model, corrupted, clean, method="exchange", **search)
        ranked = discover(model, corrupted, clean, method="exact", **search)
        judged = evaluate(model, {"exchange": found, "exact": ranked}, corrupted, clean, metric=search["metric"])
    assert judged.n_prompts == 8, "those that no search saw"
    assert float(judged.faithfulness[0]) > float(judged.faithfulness[1]) > 0.5


@pytest.mark.parametrize("n_edges", [4, 6])
def test_all_edges_are_on_paths(n_edges: int) -> None:
    example = planted.load("or-gate")
    with unchecked():
        found = exchange(example.model, example.pairs, n_edges=n_edges)
    assert found.pruned().n_edges == found.n_edges > 0
