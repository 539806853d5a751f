"""How much nodes and edges of a graph matter for its targets, which of them a pruned graph keeps, and the two scores of a graph.

The definitions are those of Ameisen et al. 2025, "Circuit tracing",
as the package circuit-tracer computes them. Matrices are [target, source]: a row holds the edges into a node.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Matrix = Float[Tensor, "target source"]
Nodes = Float[Tensor, " node"]
SMALLEST = 1e-10  # a row with a smaller sum has no edges


def normalized(adjacency: Matrix) -> Matrix:
    """The absolute edges, divided by the sum of those into the same node.

    >>> normalized(torch.tensor([[0.0, 0.0], [-3.0, 1.0]]))
    tensor([[0.0000, 0.0000],
            [0.7500, 0.2500]])
    """
    sizes = adjacency.abs()
    return sizes / sizes.sum(1, keepdim=True).clamp(min=SMALLEST)


def influence(shares: Matrix, weights: Nodes) -> Nodes:
    """The influence of each node on the targets, over paths of every length: `weights @ ((I - A)^-1 - I)` for shares A.

    `weights` are those of the targets, 0 for other nodes. Raises ValueError for edges that form a cycle.

    >>> influence(
    ...     torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.2, 0.8, 0.0]]),
    ...     torch.tensor([0.0, 0.0, 1.0]),
    ... )
    tensor([0.6000, 0.8000, 0.0000])
    """
    step = weights @ shares
    total = step.clone()
    for _ in range(len(shares)):
        if not bool(step.any()):
            return total
        step = step @ shares
        total += step
    raise ValueError("the edges of the graph form a cycle: influences have no limit")


def cumulative(of: Nodes) -> Nodes:
    """For each node the share of the sum that the nodes from the largest to this one have together.

    >>> cumulative(torch.tensor([1.0, 3.0]))
    tensor([1.0000, 0.7500])
    """
    largest, order = of.sort(descending=True)
    return torch.zeros_like(of).index_copy(0, order, largest.cumsum(0) / largest.sum())


def threshold(scores: Float[Tensor, " score"], share: float) -> Float[Tensor, ""]:
    """The smallest of the largest scores that together are this share of the sum."""
    largest = scores.sort(descending=True).values
    shares = largest.cumsum(0) / largest.sum()
    return largest[min(int(torch.searchsorted(shares, share)), len(largest) - 1)]


def pruned(
    adjacency: Matrix, weights: Nodes, n_features: int, n_ends: int, nodes: float, edges: float
) -> tuple[Bool[Tensor, " node"], Bool[Tensor, "target source"]]:
    """Which nodes and which edges a pruned graph keeps.

    Nodes with the largest influence are kept that together have the share `nodes` of it; then edges with the largest influence
    between these that together have the share `edges`. The last `n_ends` nodes, tokens and targets, are always kept. Then nodes
    without an edge out of them are left out, and features without an edge into them, until none is left.
    """
    found = influence(normalized(adjacency), weights)
    kept = found >= threshold(found, nodes)
    kept[len(kept) - n_ends :] = True
    inside = adjacency * kept[:, None] * kept[None]
    shares = normalized(inside)
    sizes = shares * (influence(shares, weights) + weights)[:, None]
    links = sizes >= threshold(sizes.flatten(), edges)
    inner = len(kept) - n_ends
    while True:
        before = int(kept.sum())
        kept[:inner] &= links[:, :inner].any(0)
        kept[:n_features] &= links[:n_features].any(1)
        if int(kept.sum()) == before:
            return kept, links
        links = links & kept[:, None] & kept[None]


def scores(adjacency: Matrix, weights: Nodes, n_features: int, n_errors: int, n_tokens: int) -> dict[str, float]:
    """The two scores of a graph: `replacement`, the share of the influence of inputs that tokens have and not errors; and
    `completeness`, the mean share of edges into a node that do not come from errors, weighted by the node's influence."""
    shares = normalized(adjacency)
    found = influence(shares, weights)
    errors = slice(n_features, n_features + n_errors)
    of_tokens = found[errors.stop : errors.stop + n_tokens].sum()
    explained = 1 - shares[:, errors].sum(1)
    reach = found + weights
    return {
        "replacement": float(of_tokens / (of_tokens + found[errors].sum())),
        "completeness": float((explained * reach).sum() / reach.sum()),
    }
