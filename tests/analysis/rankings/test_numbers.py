"""The numbers of a leaderboard: areas, selections of edges, areas under the ROC curve."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import Graph
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.top import largest
from hooked_lm.analysis.rankings import SELECTIONS, SHARES, areas, auroc, average_precision, selected
from hooked_lm.analysis.rankings.areas import by_prompt, check_shares, faithfulness_of
from tests.close import assert_close


def graph() -> Graph:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5, "act_fn": "gelu"}
    return Graph.of(HookedTransformer(HookedTransformerConfig(**sizes, seed=0)))


GRAPH = graph()


def drawn(seed: int) -> torch.Tensor:
    found = torch.randn(GRAPH.is_edge.shape, generator=torch.Generator().manual_seed(seed))
    return found.masked_fill(~GRAPH.is_edge, torch.nan)


# ---- areas ---------------------------------------------------------------------------------------------------------------


def test_a_curve_by_hand() -> None:
    cpr, cmd = areas(torch.tensor([0.0, 0.5, 2.0]), (0.1, 0.5, 1.0))
    assert_close(float(cpr), 0.4 * 0.25 + 0.5 * 1.25)
    assert_close(float(cmd), 0.4 * 0.75 + 0.5 * 0.75)


def test_the_model_is_best() -> None:
    cpr, cmd = areas(torch.ones(len(SHARES)))
    assert_close(float(cpr), 0.999)
    assert float(cmd) == 0


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_numbers_of_prompts_have_the_area_as_their_mean(seed: int, n_prompts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 4, n_prompts, generator=generator)
    full, empty = torch.randn(n_prompts, generator=generator) + 5, torch.randn(n_prompts, generator=generator)
    shares = (0.1, 0.2, 0.5, 1.0)
    found = [part.mean(1) for part in by_prompt(values, full, empty, shares)]
    expected = areas(faithfulness_of(values, full, empty), shares)
    assert_close(torch.stack(found).float(), torch.stack(expected).float())


def test_the_spread_is_that_of_the_ratio() -> None:
    """Of prompts whose circuits make up the same share, the area has no spread, however much their metrics differ."""
    full, empty, shares = torch.tensor([1.0, 4.0, 9.0]), torch.zeros(3), (0.1, 0.5, 1.0)
    values = (torch.tensor([0.3, 0.8, 1.0])[:, None] * full)[None]
    cpr, cmd = by_prompt(values, full, empty, shares)
    for part in (cpr, cmd):
        assert_close(part.std(1), torch.zeros(1, dtype=part.dtype), scale=1.0, dtype=torch.float32)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.1, 1.0), (0.0, 1.0), (0.1, 0.5)])
def test_shares_that_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="share"):
        check_shares(shares)


# ---- selections ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(0, GRAPH.n_edges), st.sampled_from(SELECTIONS), st.booleans())
def test_selected_edges_are_on_paths_and_not_too_many(seed: int, n: int, selection: str, absolute: bool) -> None:
    edges = selected(GRAPH, drawn(seed), n, selection, absolute)
    assert int(edges.sum()) <= n
    assert torch.equal(edges, on_paths(GRAPH, edges))
    if n == GRAPH.n_edges:
        assert torch.equal(edges, GRAPH.is_edge)


@given(st.integers(0, 2**31), st.integers(0, GRAPH.n_edges))
def test_by_paths_as_circuits_are_evaluated(seed: int, n: int) -> None:
    assert torch.equal(selected(GRAPH, drawn(seed), n, "paths"), largest(GRAPH, drawn(seed), n))


@given(st.integers(0, 2**31), st.integers(0, GRAPH.n_edges))
def test_only_the_order_counts(seed: int, n: int) -> None:
    for selection in SELECTIONS:
        found = selected(GRAPH, drawn(seed), n, selection)
        assert torch.equal(found, selected(GRAPH, drawn(seed).abs().exp(), n, selection))
        assert torch.equal(found, selected(GRAPH, -drawn(seed).abs(), n, selection, absolute=False))


def test_with_signs_the_edges_that_the_answer_needs_come_first() -> None:
    scores = torch.zeros(GRAPH.is_edge.shape)
    needed, harmful = GRAPH.edge("input", "logits"), GRAPH.edge("input", "m0")
    scores[needed], scores[harmful], scores[GRAPH.edge("m0", "logits")] = -1.0, 2.0, 2.0
    assert selected(GRAPH, scores, 1, absolute=False).nonzero().tolist() == [list(needed)]
    assert len(selected(GRAPH, scores, 2).nonzero()) == 2


def test_selections_that_are_refused() -> None:
    with pytest.raises(ValueError, match="selection must be one of 'top', 'paths', 'greedy', got 'best'"):
        selected(GRAPH, drawn(0), 1, "best")
    with pytest.raises(ValueError, match="a circuit has from 0 to"):
        selected(GRAPH, drawn(0), -1)
    with pytest.raises(ValueError, match="are not those of Graph"):
        selected(GRAPH, torch.zeros(2, 2), 1)


# ---- truth ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=12))
def test_as_in_scikit_learn(pairs: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([float(score) for score, _ in pairs])
    truth = torch.tensor([is_true for _, is_true in pairs])
    if len(set(scores.tolist())) == 1 or len(set(truth.tolist())) == 1:
        with pytest.raises(ValueError, match="AUROC is undefined"):
            auroc(scores, truth)
        return
    assert_close(auroc(scores, truth), float(roc_auc_score(truth, scores)))
    assert_close(average_precision(scores, truth), float(average_precision_score(truth, scores)))


def test_edges_without_a_score_are_last() -> None:
    scores, truth = torch.tensor([torch.nan, -3.0, -4.0]), torch.tensor([True, False, False])
    assert auroc(scores, truth) == 0.0
