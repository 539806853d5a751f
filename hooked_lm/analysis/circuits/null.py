"""Null models of a circuit: what the same search finds for a task that the model does not do."""

import warnings
from typing import Any

import torch

from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.discover import discover
from hooked_lm.analysis.circuits.held_out import MeasuredPairs
from hooked_lm.engine.controls import cycle
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.metric_rows import RearrangedMetric
from hooked_lm.engine.pairs import NO_METRIC, Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.study import SwapWarning
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows


@keeps_torch_state
def null_circuits(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    n: int = 5,
    seed: int = 0,
    **search: Any,
) -> dict[str, Circuit]:
    """Circuits that the same search finds if the answers are exchanged among the pairs.

    Nearly any circuit beats random edges. These circuits are of the same model and prompts, and were fitted as hard, but to
    answers that the prompts do not ask for. What they recover of the metric is due to the search; only what a circuit recovers
    beyond them is due to the task. Compare them with `evaluate(model, {"found": circuit, **null_circuits(...)}, ...)`.

    Args:
        metric: has a number for each prompt, and another answer for some of them. Its answers are exchanged by having each
            prompt read by the numbers of another one, in a random cycle of all.
        answers: in place of a metric, as for `discover`.
        n: the number of circuits; each costs a search.
        seed: seed of the exchanges; and of the search, as in `discover`.
        search: the other arguments of `discover`: `method`, `n_edges` or `threshold`, `replace_with`, `held_out`, ...

    Returns the circuits by name, "null 0" and so on. Raises the errors of `discover`, ValueError for fewer than one circuit, two
    prompts, for effects that were measured (their answers cannot be exchanged), for a metric with one number for all prompts, and
    if all prompts have the same answers.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean = ["Mary and John left, John", "Tom and Alice left, Alice"]
    >>> corrupted = ["Mary and John left, Mary"] * 2
    >>> answers = metrics.logit_difference(
    ...     [" Mary", " Tom"], [" John", " Alice"], model=model
    ... )
    >>> list(
    ...     null_circuits(
    ...         model,
    ...         corrupted,
    ...         clean,
    ...         metric=answers,
    ...         n=2,
    ...         method="eap",
    ...         n_edges=40,
    ...         check=False,
    ...     )
    ... )
    ['null 0', 'null 1']
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not isinstance(search.get("method", ""), str):
        raise ValueError("effects that were measured have their answers: name the method that measures them")
    pairs = MeasuredPairs.of(model, corrupted, clean, metric, answers)
    metric, n_prompts = pairs.metric, len(pairs.clean)
    if metric is None:
        raise TypeError(NO_METRIC)
    if n_prompts < 2:
        raise ValueError("answers are exchanged among pairs, and there is one pair")
    generator, found = torch.Generator().manual_seed(seed), {}
    exchanged = [RearrangedMetric.permuted(metric, cycle(n_prompts, generator)) for _ in range(n)]
    _check_differ(model, pairs.clean, metric, exchanged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwapWarning)
        warnings.filterwarnings("ignore", ".* hardly differ")  # which is the point
        for i, one in enumerate(exchanged):
            found[f"null {i}"] = discover(model, pairs.corrupted, pairs.clean, metric=one, seed=seed, **search)
    return found


def _check_differ(model: Decoder, clean: Rows, metric: Metric, exchanged: list[RearrangedMetric]) -> None:
    """Raises ValueError if the metric has one number for all prompts, or if exchanging its answers changes nothing."""
    scores = Experiment(model, clean, [metric]).scores[0]
    if len(scores) == 1:
        raise ValueError("the metric has one number for all prompts: its answers cannot be exchanged among pairs")
    others = Experiment(model, clean, exchanged).scores
    if bool(((others - scores).abs() <= 1e-6 * scores.abs().max()).all()):
        raise ValueError("the metric has the same answers for all pairs: to exchange them changes nothing")
