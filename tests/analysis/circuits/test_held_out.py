"""Circuits are judged on prompts that their search did not see, and against searches for answers that nobody asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import attribute_edges, metrics
from hooked_lm.analysis.circuits import Circuit, acdc, discover, evaluate, minimality, null_circuits
from hooked_lm.analysis.circuits.circuit import SEEN
from hooked_lm.analysis.circuits.held_out import JUDGED, SAME, UNSEEN, RearrangedMetric, searched
from hooked_lm.analysis.metrics import Metric
from hooked_lm.demo.experiment import PromptPair, prompt_pairs
from hooked_lm.engine.identity import identities
from hooked_lm.engine.metric_trace import EVERYTHING, reads_of
from tests.close import assert_close
from tests.unchecked import unchecked

# of models with random weights, which do no task
pytestmark = pytest.mark.filterwarnings("ignore:the (full model|clean and the corrupted).* hardly differ:UserWarning")

N, N_TOKENS = 8, 11
GENERATOR = torch.Generator().manual_seed(0)
CLEAN, CORRUPTED = torch.randint(N_TOKENS, (2, N, 4), generator=GENERATOR)
RIGHT, WRONG = torch.arange(N), torch.arange(N) + 3
METRIC = metrics.logit_difference(RIGHT.tolist(), WRONG.tolist())  # with answers of each prompt
WAYS: dict[str, dict[str, Any]] = {
    "eap": {"n_edges": 12, "check": False},
    "eap-ig-inputs": {"n_edges": 12, "check": False, "steps": 2},
    "exact": {"n_edges": 12},
    "acdc": {"threshold": 0.02},
    "pruning": {"n_edges": 12, "share": 0.5, "steps": 2},
    "exchange": {"n_edges": 12, "share": 0.5, "rounds": 2},
    "masks": {"n_edges": 12, "steps": 3},
}


def tiny() -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_ctx": 8, "d_vocab": N_TOKENS, "d_mlp": 8}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=0, initializer_range=0.6))


def part(rows: list[int]) -> tuple[Tensor, Tensor, Metric]:
    return CORRUPTED[rows], CLEAN[rows], metrics.logit_difference(RIGHT[rows].tolist(), WRONG[rows].tolist())


def split(circuit: Circuit, model: HookedTransformer) -> tuple[list[int], list[int]]:
    """The places of the prompts that the search saw, and of the others."""
    known = identities(model, CLEAN)
    seen = [known.index(one) for one in circuit.about[SEEN]]
    return seen, [place for place in range(N) if place not in seen]


# ---- what a search sees, and what judges it --------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [METRIC, None])
@pytest.mark.parametrize("method", WAYS)
def test_a_search_and_its_judgement_are_those_of_their_own_prompts(method: str, metric: Metric | None) -> None:
    if metric is None and method == "eap":
        return  # it needs a metric
    model = tiny()
    with unchecked():
        circuit = discover(model, CORRUPTED, CLEAN, metric=metric, method=method, **WAYS[method])
        seen, others = split(circuit, model)
        assert (len(seen), len(others)) == (4, 4)
        corrupted, clean, own = part(seen)
        own = own if metric is not None else None
        alone = discover(model, corrupted, clean, metric=own, method=method, held_out=0, **WAYS[method])
        assert torch.equal(circuit.edges, alone.edges)
        assert_close(circuit.scores, alone.scores)
        judged = evaluate(model, circuit, CORRUPTED, CLEAN, metric=metric, n_random=1)
        corrupted, clean, own = part(others)
        by_hand = evaluate(model, circuit, corrupted, clean, metric=own if metric is not None else None, n_random=1)
    for name in ("values", "full", "empty", "random"):
        assert_close(getattr(judged, name), getattr(by_hand, name))
    assert judged.about[JUDGED] == by_hand.about[JUDGED] == UNSEEN
    assert "on prompts that the search did not see" in repr(judged)
    assert judged.plot().layout.title.text.endswith(UNSEEN)


def test_the_same_prompts_are_said_to_be_the_same(tmp_path: Path) -> None:
    model, options = tiny(), {"metric": METRIC, "n_random": 0}
    circuit = discover(model, CORRUPTED, CLEAN, metric=METRIC, held_out=0, method="eap", **WAYS["eap"])
    circuit.save(tmp_path / "circuit")
    for one in (circuit, Circuit.load(tmp_path / "circuit"), {"a": circuit, "b": circuit.complement()}):
        found = evaluate(model, one, CORRUPTED, CLEAN, **options)
        assert found.n_prompts == N
        assert "on same prompts as the search" in repr(found)
    assert evaluate(model, circuit, CORRUPTED, CLEAN, sizes=[0, 12, 1.0], **options).about[JUDGED] == SAME
    assert minimality(model, circuit, CORRUPTED, CLEAN, metric=METRIC).about[JUDGED] == SAME
    direct = acdc(model, CORRUPTED, CLEAN, threshold=0.02, metric=METRIC)
    assert evaluate(model, direct, CORRUPTED, CLEAN, **options).about[JUDGED] == SAME
    by_hand = Circuit.of(circuit.graph, [("input", "logits")])
    assert JUDGED not in evaluate(model, by_hand, CORRUPTED, CLEAN, **options).about
    assert "prompts" not in repr(evaluate(model, by_hand, CORRUPTED, CLEAN, **options)).split(";")[1]


def test_the_prompts_of_all_searches_are_left_out() -> None:
    model = tiny()
    found = [
        discover(model, CORRUPTED, CLEAN, metric=METRIC, held_out=held, method="eap", **WAYS["eap"])
        for held in ([0, 1, 2], [2, 3])
    ]
    judged = evaluate(model, {"a": found[0], "b": found[1]}, CORRUPTED, CLEAN, metric=METRIC, n_random=0)
    assert judged.n_prompts == 1
    assert minimality(model, found[0], CORRUPTED, CLEAN, metric=METRIC).n_prompts == 3


def test_effects_that_were_measured_know_their_prompts() -> None:
    model = tiny()
    effects = attribute_edges(model, CORRUPTED, CLEAN, metric=METRIC, check=False)
    circuit = discover(model, CORRUPTED, CLEAN, metric=METRIC, method=effects, n_edges=12)
    seen, _ = split(circuit, model)
    corrupted, clean, own = part(seen)
    alone = discover(
        model, corrupted, clean, method=attribute_edges(model, corrupted, clean, metric=own, check=False), n_edges=12
    )
    assert_close(circuit.scores, alone.scores)
    assert evaluate(model, circuit, CORRUPTED, CLEAN, metric=METRIC, n_random=0).n_prompts == 4
    assert evaluate(model, effects, CORRUPTED, CLEAN, metric=METRIC, sizes=[12], n_random=0).about[JUDGED] == SAME


@pytest.mark.parametrize("n", [2, 7])
def test_few_pairs_are_all_searched(n: int) -> None:
    corrupted, clean, metric = part(list(range(n)))
    assert len(discover(tiny(), corrupted, clean, metric=metric, method="eap", **WAYS["eap"]).about[SEEN]) == n


def test_one_number_for_all_prompts_cannot_be_split() -> None:
    def mean(logits: Tensor) -> Tensor:
        return METRIC(logits).mean()

    model = tiny()
    circuit = discover(model, CORRUPTED, CLEAN, metric=mean, method="eap", **WAYS["eap"])
    assert len(circuit.about[SEEN]) == N
    with pytest.raises(ValueError, match="one number for all 8 prompts, so none can be held out"):
        discover(model, CORRUPTED, CLEAN, metric=mean, method="eap", held_out=0.25, **WAYS["eap"])
    half = discover(model, CORRUPTED, CLEAN, metric=METRIC, method="eap", **WAYS["eap"])
    assert "on partly the same prompts" in repr(evaluate(model, half, CORRUPTED, CLEAN, metric=mean, n_random=0))


def test_prompts_that_are_the_same_are_held_out_together() -> None:
    known = ["a", "b", "a", "c", "d", "a"]
    for seed in range(5):
        assert len({place in searched(known, 0.5, seed) for place in (0, 2, 5)}) == 1
    assert searched(known, [0], 0) == [1, 3, 4]
    assert searched(known, None, 0) == searched(known, 0, 0) == list(range(6))
    for held_out in (1.0, -0.1, [0, 1, 3, 4]):
        with pytest.raises(ValueError, match=r"held_out is a share|all 6 pairs are held out"):
            searched(known, held_out, 0)


# ---- metrics of some prompts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "is_traced"),
    [
        (METRIC, True),
        (lambda logits: logits[torch.arange(N), -1, RIGHT] - logits[:, -1, 3], True),
        (lambda logits: logits[2:, -1].new_zeros(N) + logits[:, 1, [3, 4]].sum(1) * torch.arange(N), True),
        (metrics.probability(RIGHT.tolist()), True),
        (lambda logits: logits.softmax(-1)[torch.arange(N), -1, RIGHT], False),
    ],
)
def test_the_metric_of_some_prompts(metric: Callable[[Tensor], Tensor], is_traced: bool) -> None:
    logits, rows = torch.randn(N, 4, N_TOKENS, generator=torch.Generator().manual_seed(1)), [5, 1, 2]
    some = RearrangedMetric.of_rows(metric, rows, N)
    assert_close(some(logits[rows]), metric(logits)[rows])
    reads, [values] = reads_of([some], logits[rows])
    assert_close(values, metric(logits)[rows])
    assert (reads != EVERYTHING) == is_traced
    twice = RearrangedMetric.of_rows(some, [2, 0], 3)
    assert_close(twice(logits[[2, 5]]), metric(logits)[[2, 5]])


def test_answers_are_exchanged() -> None:
    logits, answers = torch.randn(N, 4, N_TOKENS), [1, 2, 3, 4, 5, 6, 7, 0]
    other = metrics.logit_difference(RIGHT[answers].tolist(), WRONG[answers].tolist())
    assert_close(RearrangedMetric.permuted(METRIC, answers)(logits), other(logits))


# ---- null models -----------------------------------------------------------------------------------------------------


def test_null_circuits_are_those_of_other_answers() -> None:
    model, options = tiny(), {"method": "eap", **WAYS["eap"]}
    found = null_circuits(model, CORRUPTED, CLEAN, metric=METRIC, n=2, **options)
    circuit = discover(model, CORRUPTED, CLEAN, metric=METRIC, **options)
    assert list(found) == ["null 0", "null 1"]
    assert all(null.about[SEEN] == circuit.about[SEEN] for null in found.values())
    assert not torch.equal(found["null 0"].scores.nan_to_num(), found["null 1"].scores.nan_to_num())
    again = null_circuits(model, CORRUPTED, CLEAN, metric=METRIC, n=1, **options)
    assert torch.equal(again["null 0"].edges, found["null 0"].edges)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"metric": metrics.logit(3)}, "the same answers for all pairs"),
        ({"metric": lambda logits: METRIC(logits).mean()}, "one number for all prompts"),
        ({"method": Circuit}, "name the method"),
    ],
)
def test_answers_that_cannot_be_exchanged(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        null_circuits(tiny(), CORRUPTED, CLEAN, **{"metric": METRIC, "method": "eap", "n_edges": 12, **options})
    with pytest.raises(ValueError, match="there is one pair"):
        null_circuits(tiny(), CORRUPTED[:1], CLEAN[:1], metric=metrics.logit(3), n_edges=12)


# ---- simulations -----------------------------------------------------------------------------------------------------


def of_pairs(model: HookedTransformer, pairs: list[PromptPair]) -> tuple[Tensor, Tensor, Metric]:
    texts = [[getattr(pair, name) for pair in pairs] for name in ("corrupted", "clean", "answer", "wrong_answer")]
    metric = metrics.logit_difference(*texts[2:], model=model)
    return model.to_tokens(texts[0]), model.to_tokens(texts[1]), metric


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hooked_lm.results.SkewWarning")
def test_the_interval_of_held_out_prompts_contains_the_value_on_others() -> None:
    """That of the prompts of the search does in half of the draws, as faithfulness is too high there."""
    model, pool, n_draws = HookedTransformer.from_pretrained("demo"), prompt_pairs(60), 20
    generator, inside, bias = torch.Generator().manual_seed(0), {0.0: 0, 0.5: 0}, {0.0: 0.0, 0.5: 0.0}
    options = {"method": "eap", "n_edges": 75, "check": False, "progress": False}
    with unchecked():
        for _ in range(n_draws):
            order = torch.randperm(60, generator=generator).tolist()
            (*own, metric), (*rest, others) = (
                of_pairs(model, [pool[i] for i in some]) for some in (order[:8], order[8:32])
            )
            for held_out in inside:
                circuit = discover(model, *own, metric=metric, held_out=held_out, **options)
                table = evaluate(model, circuit, *own, metric=metric, n_random=0, progress=False).to_dataframe().iloc[0]
                there = evaluate(model, circuit, *rest, metric=others, n_random=0, progress=False).faithfulness.item()
                inside[held_out] += bool(table["low"] <= there <= table["high"])
                bias[held_out] += (table["faithfulness"] - there) / n_draws
    assert inside[0.0] / n_draws < 0.75, "0.55"
    assert inside[0.5] / n_draws >= 0.85, "0.90"
    assert bias[0.0] > 0.03, "0.055"
    assert abs(bias[0.5]) < 0.03, "0.005"


@pytest.mark.slow
def test_a_circuit_of_the_task_beats_those_of_exchanged_answers() -> None:
    model = HookedTransformer.from_pretrained("demo")
    (*own, metric), options = of_pairs(model, prompt_pairs(16)), {"method": "eap", "n_edges": 75, "check": False}

    def faithfulness(of: HookedTransformer) -> tuple[float, Tensor, float]:
        circuit = discover(of, *own, metric=metric, **options)
        nulls = null_circuits(of, *own, metric=metric, n=3, **options)
        found = evaluate(of, {"found": circuit, **nulls}, *own, metric=metric, progress=False)
        return found.faithfulness[0].item(), found.faithfulness[1:], found.random_faithfulness.abs().max().item()

    with unchecked():
        found, nulls, by_chance = faithfulness(model)
    assert found > nulls.max() + 0.2, "0.5 against 0.2"
    assert nulls.min() > by_chance + 0.05, "random edges are beaten by anything"
