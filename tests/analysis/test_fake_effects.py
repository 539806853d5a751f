"""Where there is nothing to find, nothing is found: on random models and on shuffled answers, intervals that exclude zero are as
rare as their level says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.analysis import attribute, attribute_edges, metrics, patch_edges
from hooked_lm.demo import experiment
from hooked_lm.results import Scores
from tests.core import thinned

N_PROMPTS = 48
Method = Callable[[HookedTransformer, Tensor, Tensor, metrics.Metric], Scores]


def nodes(method: str) -> Method:
    def found(model: HookedTransformer, corrupted: Tensor, clean: Tensor, metric: metrics.Metric) -> Scores:
        common = {"metric": metric, "check": False, "progress": False, "method": method, "steps": 3}
        return attribute(model, corrupted, clean, sites=["z", "q"], heads="each", **common).effects().estimates

    return found


def edges(method: str) -> Method:
    def found(model: HookedTransformer, corrupted: Tensor, clean: Tensor, metric: metrics.Metric) -> Scores:
        common = {"metric": metric, "check": False, "method": method, "steps": 3}
        return attribute_edges(model, corrupted, clean, **common).effects().estimates

    return found


def exact_nodes(model: HookedTransformer, corrupted: Tensor, clean: Tensor, metric: metrics.Metric) -> Scores:
    common = {"metric": metric, "sites": ["z", "q"], "heads": "each", "progress": False}
    return patching.sweep(model, corrupted, clean, **common).effects()


def exact_edges(model: HookedTransformer, corrupted: Tensor, clean: Tensor, metric: metrics.Metric) -> Scores:
    return patch_edges(model, corrupted, clean, metric=metric, progress=False).effects()


METHODS = {
    **{f"nodes, {name}": nodes(name) for name in ("gradient", "ig-inputs", "ig-activations", "atp*")},
    **{f"edges, {name}": edges(name) for name in ("eap", "eap-ig-inputs", "eap-ig-activations")},
    "nodes, exact": exact_nodes,
    "edges, exact": exact_edges,
}


def significant(scores: Scores, level: float = 0.95) -> Tensor:
    """Whether the interval of each cell excludes zero; of cells that are not zero for every prompt."""
    low, high = scores.interval(level)
    return ((low > 0) | (high < 0))[scores.values.abs().sum(-1) > 0]


def excess(shares: list[float]) -> float:
    """How many standard errors the mean of independent shares is above one in twenty."""
    found = torch.tensor(shares, dtype=torch.float64)
    return float((found.mean() - 0.05) / (found.std() / len(shares) ** 0.5))


@pytest.mark.parametrize("method", thinned(METHODS, keep=["nodes, gradient"]))
def test_random_models(method: str) -> None:
    """Random weights, prompts and answers: the share of cells is no larger than one in twenty, up to the error of eight models.

    The cells of one model share its prompts and answers, so the models are what is counted. Intervals that are too narrow, as
    those of level 0.6 would be, are noticed.
    """
    shares, too_narrow = [], []
    for seed in range(8):
        sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "n_ctx": 8, "d_vocab": 50, "d_mlp": 32}
        model = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=seed))
        generator = torch.Generator().manual_seed(seed)
        clean, corrupted = torch.randint(50, (2, N_PROMPTS, 5), generator=generator)
        right, wrong = torch.rand(N_PROMPTS, 50, generator=generator).topk(2).indices.T
        scores = METHODS[method](model, corrupted, clean, metrics.logit_difference(right, wrong))
        assert len(significant(scores)) >= 16
        shares.append(float(significant(scores).float().mean()))
        too_narrow.append(float(significant(scores, 0.6).float().mean()))
    assert excess(shares) < 2.5, shares
    assert excess(too_narrow) > 2.5, too_narrow


@pytest.mark.slow
@pytest.mark.parametrize("method", thinned(["nodes, gradient", "edges, eap"], keep=["nodes, gradient"]))
def test_shuffled_answers(method: str) -> None:
    """Which of both names is called right is tossed for each pair, eight times over; where it is not, there is a lot to find."""
    model = HookedTransformer.from_pretrained("demo")
    pairs = experiment.prompt_pairs(24)
    clean, corrupted = (model.to_tokens([getattr(pair, name) for pair in pairs]) for name in ("clean", "corrupted"))
    answers = torch.tensor(
        [[model.to_single_token(pair.answer), model.to_single_token(pair.wrong_answer)] for pair in pairs]
    )

    def share(labels: Tensor) -> float:
        metric = metrics.logit_difference(labels[:, 0], labels[:, 1])
        return float(significant(METHODS[method](model, corrupted, clean, metric)).float().mean())

    generator = torch.Generator().manual_seed(0)
    tossed = (torch.rand(8, len(pairs), generator=generator) < 0.5)[..., None]
    shuffled = [share(torch.where(some, answers.flip(1), answers)) for some in tossed]
    assert sum(shuffled) / len(shuffled) <= 0.05, shuffled
    assert share(answers) > 0.25
