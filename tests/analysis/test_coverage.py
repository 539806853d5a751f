"""Simulations on the bundled model: how often intervals over a few of many pairs of prompts contain the mean of all, and how
often sweeps without an effect show one."""

import warnings
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import circuits, metrics
from hooked_lm.analysis.circuits.evaluate import Evaluation
from hooked_lm.demo import corpus, experiment
from hooked_lm.engine.result import SweepResult
from hooked_lm.results import Scores, SkewWarning

N_PAIRS, N_DRAWS = 512, 100


@cache
def population() -> SweepResult:
    """The effects of all heads on two metrics, over many pairs of names."""
    model = HookedTransformer.from_pretrained("demo")
    names = list(product(corpus.FEMALE_NAMES, corpus.MALE_NAMES))[:N_PAIRS]
    pairs = [experiment._pair(*(couple if i % 2 else couple[::-1])) for i, couple in enumerate(names)]
    clean, corrupted = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
    answers, wrong = ([getattr(pair, name) for pair in pairs] for name in ("answer", "wrong_answer"))
    both = {
        "difference": metrics.logit_difference(answers, wrong, model=model),
        "probability": metrics.probability(answers, model=model),
    }
    common = {"sites": "z", "positions": None, "heads": "each", "progress": False}
    return patching.sweep(model, corrupted, clean, metric=both, **common).effects()


def drawn(whole: SweepResult, n: int, generator: torch.Generator) -> SweepResult:
    some = torch.randperm(N_PAIRS, generator=generator)[:n]
    return replace(
        whole, values=whole.values[..., some], corrupted=whole.corrupted[..., some], clean=whole.clean[..., some]
    )


def covered_or_named(found: Scores, true: Tensor) -> tuple[Tensor, bool]:
    """Whether the interval of each cell contains its mean, and whether a warning says that it may not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        low, high = found.interval(n_resamples=400)
    return ((low <= true) & (true <= high)).float(), any(issubclass(one.category, SkewWarning) for one in caught)


@pytest.mark.slow
@pytest.mark.parametrize("n_prompts", [8, 16, 64])
@pytest.mark.parametrize(("metric", "least"), [("difference", 0.92), ("probability", 0.78)])
def test_coverage_of_sweeps(metric: str, least: float, n_prompts: int) -> None:
    """By logit difference the level is kept, and hardly a warning. By probability, of which a few prompts have most, no interval
    keeps it: what is not contained is named."""
    whole, generator = population().select(metric=metric), torch.Generator().manual_seed(n_prompts)
    live = whole.mean.abs() > whole.mean.abs().max() / 1000
    inside, named = [], []
    for _ in range(N_DRAWS):
        covered, is_named = covered_or_named(drawn(whole, n_prompts, generator), whole.mean)
        inside.append(covered[live])
        named.append(is_named)
    share, n_named = torch.stack(inside), torch.tensor(named)
    assert share.mean() > least
    assert torch.where(n_named[:, None], 1.0, share).mean() > 0.92
    assert n_named.float().mean() < 0.1 if metric == "difference" else n_named.float().mean() > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hooked_lm.results.SkewWarning")
@pytest.mark.parametrize("n_prompts", [8, 16, 64])
def test_nothing_is_real_where_answers_are_tossed(n_prompts: int) -> None:
    """Which of both names is called right is tossed for each pair, so no head has an effect."""
    whole, generator = population().select(metric="difference"), torch.Generator().manual_seed(n_prompts)
    real, by_itself = 0, 0
    for _ in range(N_DRAWS):
        found = drawn(whole, n_prompts, generator)
        tossed = replace(found, values=found.values * (torch.randint(2, (n_prompts,), generator=generator) * 2 - 1))
        table = tossed.top(10)
        low, high = (end.flatten() for end in tossed.interval(n_resamples=200))
        real += bool(((table.low > 0) | (table.high < 0)).any())
        shown = tossed.mean.abs().flatten().topk(10).indices
        by_itself += bool(((low > 0) | (high < 0))[shown].any())
    assert real <= 0.05 * N_DRAWS + 3, real
    assert by_itself >= 0.06 * N_DRAWS, by_itself
    tables = [drawn(whole, n_prompts, generator).top(3) for _ in range(20)]
    shown = [((table.low > 0) | (table.high < 0)).any() for table in tables]
    assert sum(shown) >= 12, "where there is an effect, it is shown"


@pytest.mark.slow
def test_coverage_of_faithfulness_by_divergence() -> None:
    """KL(model || circuit) is skewed, so that intervals miss; where they do, eight pairs mostly lack those of the tail, and their
    L-skewness, or that they vary as much as they measure, still says so."""
    model, pairs = HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(72)
    clean, corrupted = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
    generator, shares = torch.Generator().manual_seed(0), {8: [], 16: []}
    for n_edges in (50, 100, 150):
        circuit = circuits.discover(
            model, corrupted[:8], clean[:8], method="eap-ig-inputs", n_edges=n_edges, progress=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = circuits.evaluate(model, circuit, corrupted, clean, n_random=0, progress=False)
        for n_prompts, share in shares.items():
            good = [is_covered_or_named(whole, n_prompts, generator) for _ in range(N_DRAWS)]
            share.append(sum(good) / N_DRAWS)
    assert min(shares[8]) >= 0.94, shares
    assert sum(shares[16]) / 3 >= 0.94, shares


def is_covered_or_named(whole: Evaluation, n_prompts: int, generator: torch.Generator) -> bool:
    """Whether the interval of some pairs contains the faithfulness of all, or a warning says that it may not."""
    some = torch.randint(whole.n_prompts, (n_prompts,), generator=generator)
    part = replace(whole, values=whole.values[..., some], full=whole.full[some], empty=whole.empty[some])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = part.to_dataframe().iloc[0]
    is_named = any(one.category is SkewWarning for one in caught)
    return is_named or bool(row["low"] <= float(whole.faithfulness) <= row["high"])
