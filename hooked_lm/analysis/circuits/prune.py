"""Iterative pruning: the edges that the current circuit depends on least are dropped, a share at a time."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric, check_grad_mode
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.undisturbed import undisturbed
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import origin


@undisturbed
def prune(
    model: Decoder,
    corrupted: Prompts,
    clean: Prompts,
    *,
    n_edges: int,
    metric: Metric | None = None,
    share: float = 0.15,
    steps: int = 5,
    ablation: str = "resample",
    max_memory: int | str = "auto",
) -> Circuit:
    """Edges are dropped in rounds until no more than `n_edges` are left.

    In each round the gates of the edges that are left are opened together from nothing in `steps` steps, and the gradients of the
    metric with respect to each on the way are averaged (integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365): their
    sum is what the circuit has over nothing. The edges with the smallest are dropped, and those that thereby lie on no path from
    input to logits. As the gradients are taken anew, an edge that matters only now that another is gone is found.

    Args:
        n_edges: how many are left, at most.
        share: how many of the edges are dropped in a round.
        steps: gradients in a round; with 1 it is the gradient in the current circuit.

    Returns a Circuit; its scores are how many of all edges had gone before an edge went, as a share (1 for those that are left),
    so the circuits of the rounds before are those of its largest scores. See `Runner` for the other arguments. Raises ValueError
    for numbers out of range, for a metric without a gradient, and for gradients that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = prune(model, "Mary and John left, Mary", "Mary and John left, John", n_edges=60, share=0.5, steps=2)
    >>> 0 < circuit.n_edges <= 60
    True
    """
    check_size(n_edges)
    if not 0 < share < 1:
        raise ValueError(f"the share of edges that a round drops must be between 0 and 1, got {share}")
    if steps < 1:
        raise ValueError(f"there must be one step at least, got {steps}")
    if metric is None and steps == 1:
        raise ValueError(
            "KL(model || circuit) is at its least in the full model, and has no gradient there: take more steps"
        )
    check_grad_mode("pruning")
    runner = Runner(model, corrupted, clean, metric, ablation, max_memory)
    left = runner.graph.is_edge.clone()
    scores = torch.where(left, 1.0, torch.nan)
    while (n := int(left.sum())) > n_edges:
        effects = mean_gradient(runner, left, steps).abs().masked_fill(~left, torch.inf)
        weakest = effects.flatten().argsort(stable=True)[: max(1, min(int(n * share), n - n_edges))]
        after = left.clone()
        after.view(-1)[weakest] = False
        after = on_paths(runner.graph, after)
        scores[left & ~after] = 1 - n / runner.n_edges
        left = after
    settings = {"n_edges": n_edges, "share": share, "steps": steps, "metric": runner.metric_name}
    about = origin(model, method="pruning", ablation=ablation, **settings)
    return Circuit(runner.graph, left, scores, about=about)


def mean_gradient(runner: Runner, left: Bool[Tensor, "writer reader"], steps: int) -> Float[Tensor, "writer reader"]:
    """The gradients of the mean metric with respect to the gates of these edges, averaged on the way from closed to open."""
    gates = left.float()
    found = sum((runner.gradient(gates * (step / steps)) for step in range(1, steps)), runner.gradient(gates))
    return found / steps


def check_size(n_edges: int) -> None:
    """Raises unless it is a number of edges."""
    if not isinstance(n_edges, int) or isinstance(n_edges, bool) or n_edges < 0:
        raise ValueError(f"n_edges must be a whole number, not negative; got {n_edges!r}")
