"""`discover`: find the edges that a task depends on, with any of the methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution import edges
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.estimate import Attribution
from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.acdc import acdc
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.masks import train_masks
from hooked_lm.analysis.circuits.prune import check_size, prune
from hooked_lm.analysis.circuits.run import ABLATIONS, Runner
from hooked_lm.analysis.circuits.top import at_least, largest
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.result import METRIC_NAME, SweepResult, metric_name
from hooked_lm.engine.undisturbed import undisturbed
from hooked_lm.hooks.keywords import check_keywords
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import origin

SOURCES = {
    "resample": "clean",
    "mean": "mean",
    "zero": "zero",
}  # the names that patching uses, where the other run is always called "clean"
SEARCHES: Mapping[str, tuple[Callable[..., Circuit], str]] = {
    "acdc": (acdc, "threshold"),
    "pruning": (prune, "n_edges"),
    "masks": (train_masks, "n_edges"),
}
CHECKED = 100  # default number of edges whose estimates are compared with exact patching
OPTIONS: Mapping[str, Sequence[str]] = {
    "acdc": (),
    "pruning": ("share", "steps"),
    "masks": ("steps", "learning_rate", "seed"),
    **dict.fromkeys(edges.METHODS, ("steps", "freeze_norms", "check", "seed")),
    "exact": ("edges",),
}
METHODS = (*edges.METHODS, "exact", *SEARCHES)


@undisturbed
def discover(
    model: Decoder,
    corrupted: Prompts,
    clean: Prompts,
    *,
    metric: Metric | None = None,
    method: str | SweepResult = "eap-ig-inputs",
    n_edges: int | None = None,
    threshold: float | None = None,
    ablation: str = "resample",
    max_memory: int | str = "auto",
    progress: bool | None = None,
    **options: Any,
) -> Circuit:
    """Find a circuit: the edges that the behaviour of a model on the clean prompts depends on.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape. The circuit runs on the clean prompts; with resample
            ablation edges outside the circuit carry their values from the corrupted prompts.
        metric: maps logits to one number per prompt, or one for all; None: KL(model || circuit) at the last position.
        method: the search method.
            "eap", "eap-ig-inputs", "eap-ig-activations": the edges with the largest estimated effects (`attribute_edges`) on the
            clean run, that is with `direction="noise"`;
            `about["agreement"]` compares the estimates with exact patching of `check` random edges, by default 100.
            "exact": the edges with the largest effects when patched one at a time (`patch_edges`).
            An Attribution or SweepResult with the axes writer and reader: the edges with the largest effects in it, in its own
            direction.
            "acdc" (needs threshold), "pruning" (`prune`) and "masks" (`train_masks`), which both need n_edges.
        n_edges: the maximum number of edges of the circuit, all on paths from input to logits.
        threshold: alternatively, the smallest absolute effect of an edge, in units of the metric. Edges that are then on no path
            are left out.
        ablation: the ablation of edges outside the circuit: "resample", "mean" or "zero"; see `Runner`.
        max_memory, progress: as for `patching.sweep`.
        options: further arguments of the method, such as `steps`, `seed` or `check`.

    Returns a Circuit, which is empty if no edge reaches the threshold. Raises ValueError for an unknown method or ablation, for
    "eap" without a metric, and unless exactly one of n_edges and threshold is given, the one that the method takes; TypeError
    for options that the method does not take.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(model.to_single_token(" Mary"), model.to_single_token(" John"))
    >>> discover(model, corrupted, clean, metric=answers, method="eap", n_edges=40).n_edges <= 40
    True
    """
    if ablation not in ABLATIONS:
        raise ValueError(f"ablation must be one of {', '.join(ABLATIONS)}, got {ablation!r}")
    _check_limits(method, n_edges, threshold)
    limits = {name: limit for name, limit in (("n_edges", n_edges), ("threshold", threshold)) if limit is not None}
    if isinstance(method, str) and method in SEARCHES:
        search, _ = SEARCHES[method]
        common: dict[str, Any] = {
            "metric": metric,
            "ablation": ablation,
            "max_memory": max_memory,
            "progress": progress,
        }
        check_keywords(f"method {method!r}", options, OPTIONS[method])
        return search(model, corrupted, clean, **common, **limits, **options).pruned()
    if not isinstance(method, str):
        if options:
            raise TypeError(f"effects that were measured take no options, got {', '.join(options)}")
        name = f"the largest effects ({method.method})" if isinstance(method, Attribution) else "the largest effects"
        return _best(model, method, name, limits, dict(method.about))
    if metric is None and method == "eap":
        raise ValueError(
            "KL(model || circuit) is at its least in the full model, where 'eap' would take its gradient: give a metric, or "
            "another method, such as 'eap-ig-inputs'"
        )
    named = metric_name(metric) or "the metric"
    if metric is None:
        runner = Runner(model, corrupted, clean, max_memory=max_memory)
        metric, named = runner.metric, runner.metric_name
    check_keywords(f"method {method!r}", options, OPTIONS[method])
    common = {"metric": metric, "source": SOURCES[ablation], "direction": "noise", "max_memory": max_memory}
    found = _effects(model, corrupted, clean, method, {**common, "progress": progress, **options})
    about = {"ablation": ablation, METRIC_NAME: named, "direction": common["direction"], **options}
    return _best(model, found, method, limits, about)


def _check_limits(method: str | SweepResult, n_edges: int | None, threshold: float | None) -> None:
    """Raises ValueError unless exactly one limit is given, and the method takes it."""
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, or an Attribution; got {method!r}")
    if (n_edges is None) == (threshold is None):
        raise ValueError(f"give n_edges or threshold, one of them; got n_edges={n_edges}, threshold={threshold}")
    given = "threshold" if n_edges is None else "n_edges"
    if isinstance(method, str) and method in SEARCHES and given != SEARCHES[method][1]:
        raise ValueError(f"method {method!r} needs {SEARCHES[method][1]}, not {given}")
    if n_edges is not None:
        check_size(n_edges)
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise ValueError(f"the threshold must be a finite number and not negative, got {threshold}")


def _effects(
    model: Decoder,
    corrupted: Prompts,
    clean: Prompts,
    method: str,
    options: Mapping[str, Any],
) -> SweepResult:
    """The measured or estimated effect of ablating each edge of the clean run."""
    if method == "exact":
        return patch_edges(model, corrupted, clean, **options)
    return edges.attribute_edges(model, corrupted, clean, method=method, **{"check": CHECKED, **options})


def _best(model: Decoder, found: SweepResult, method: str, limits: Mapping[str, Any], about: dict[str, Any]) -> Circuit:
    """The circuit of the edges with the largest effects."""
    found.warn_if_close()
    graph = Graph.of(model)
    scores = scores_of(graph, found)
    felt = scores.masked_fill(scores == 0, torch.nan)  # edges without effect are never kept
    by_number = "n_edges" in limits
    best = largest(graph, felt, limits["n_edges"]) if by_number else at_least(graph, felt, limits["threshold"])
    agreement = {}
    if isinstance(found, Attribution) and len(found.agreement):
        agreement = {"agreement": found.agreement.iloc[0].astype(float).to_dict()}
    return Circuit(graph, best, scores, about={**about, **origin(model, method=method, **limits), **agreement})


def scores_of(graph: Graph, found: SweepResult) -> Float[Tensor, "writer reader"]:
    """The mean effects of the edges in a result with the axes writer and reader, in the order of a graph; NaN for others.

    Raises ValueError for other axes, and for nodes that the graph does not have: a result of another model.
    """
    if list(found.axes) != ["writer", "reader"]:
        raise ValueError(f"edges have the axes writer and reader, and this result {', '.join(found.axes) or 'none'}")
    names = ([node.name for node in graph.writers], [node.name for node in graph.readers])
    for axis, known in zip(("writer", "reader"), names, strict=True):
        if unknown := [label for label in found.axes[axis] if label not in known]:
            raise ValueError(f"this result is of another model: there is no {axis} {unknown[0]!r} in {graph!r}")
    effects = found.effects().mean
    scores = torch.full(graph.is_edge.shape, torch.nan)
    rows, columns = (_places(known, found.axes[axis]) for axis, known in zip(("writer", "reader"), names, strict=True))
    scores[rows[:, None], columns] = effects
    return scores.masked_fill(~graph.is_edge, torch.nan)


def _places(known: Sequence[str], labels: Sequence[str | int]) -> Tensor:
    return torch.tensor([known.index(str(label)) for label in labels])
