"""Iterative pruning: in each round, drop a fraction of the edges, those with the least effect in the current circuit."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric, check_grad_mode
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.renamed import renamed
from hooked_lm.results.scores import provenance


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
def prune(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    n_edges: int,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    share: float = 0.15,
    steps: int = 5,
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Circuit:
    """Drop edges in rounds until at most `n_edges` are left.

    Each round computes integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365): the gates of the remaining edges go
    together from 0 to 1 in `steps` steps, and the gradients of the metric with respect to the gates are averaged. Their sum
    approximates the difference in metric between the circuit and the empty one. The edges with the smallest absolute gradients
    are dropped, as are edges that are then on no path from input to logits. Because each round recomputes the gradients, it
    finds edges that matter only after others are dropped.

    Args:
        n_edges: the maximum number of edges of the result.
        share: the fraction of the remaining edges that each round drops.
        steps: gradients per round; 1 is the gradient in the current circuit.

    Returns a Circuit. The score of an edge is the fraction of all edges that had been dropped before the round that dropped it
    (1 for edges that remain), so the circuit of an earlier round consists of the largest scores. See `Runner` for the other
    arguments. Raises ValueError for numbers out of range, for a metric without a gradient, and for gradients that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = prune(
    ...     model,
    ...     "Mary and John left, Mary",
    ...     "Mary and John left, John",
    ...     n_edges=60,
    ...     share=0.5,
    ...     steps=2,
    ... )
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
    runner = Runner(model, corrupted, clean, metric, replace_with, max_memory, answers)
    runner.warn_if_close(runner.empty())
    left = runner.graph.is_edge.clone()
    scores = torch.where(left, 1.0, torch.nan)
    with progress_bar("pruning", max(runner.n_edges - n_edges, 0), progress, unit="edges") as bar:
        while (n := int(left.sum())) > n_edges:
            effects = mean_gradient(runner, left, steps).abs().masked_fill(~left, torch.inf)
            weakest = effects.flatten().argsort(stable=True)[: max(1, min(int(n * share), n - n_edges))]
            after = left.clone()
            after.view(-1)[weakest] = False
            after = on_paths(runner.graph, after)
            scores[left & ~after] = 1 - n / runner.n_edges
            bar.update(n - max(int(after.sum()), n_edges))
            left = after
    settings = {"n_edges": n_edges, "share": share, "steps": steps, "metric": runner.metric_name}
    about = provenance(model, method="pruning", replace_with=replace_with, **settings)
    return Circuit(runner.graph, left, scores, about={**about, SEEN: runner.prompts})


def mean_gradient(runner: Runner, left: Bool[Tensor, "writer reader"], steps: int) -> Float[Tensor, "writer reader"]:
    """The gradients of the mean metric with respect to the gates of these edges, averaged over `steps` values up to 1."""
    gates = left.float()
    found = sum((runner.gradient(gates * (step / steps)) for step in range(1, steps)), runner.gradient(gates))
    return found / steps


def check_size(n_edges: int) -> None:
    """Raises ValueError unless `n_edges` is a non-negative int."""
    if not isinstance(n_edges, int) or isinstance(n_edges, bool) or n_edges < 0:
        raise ValueError(f"n_edges must be a whole number, not negative; got {n_edges!r}")
