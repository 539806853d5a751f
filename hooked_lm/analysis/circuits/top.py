"""The edges with the largest scores."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.paths import on_paths


def largest(graph: Graph, scores: Float[Tensor, "writer reader"], n_edges: int) -> Bool[Tensor, "writer reader"]:
    """The edges with the largest absolute scores that are on paths from input to logits, at most `n_edges`.

    Edges are added in order of absolute score while at most `n_edges` of them are on paths. Edges with score NaN are excluded.
    """
    order = _by_size(scores, graph)
    low, high = 0, len(order)  # binary search: with the first `low` edges, at most `n_edges` are on paths
    while low < high:
        middle = (low + high + 1) // 2
        if int(on_paths(graph, _taken(order[:middle], graph)).sum()) <= n_edges:
            low = middle
        else:
            high = middle - 1
    return on_paths(graph, _taken(order[:low], graph))


def at_least(graph: Graph, scores: Float[Tensor, "writer reader"], threshold: float) -> Bool[Tensor, "writer reader"]:
    """The edges with an absolute score of at least `threshold` that are on paths from input to logits."""
    return on_paths(graph, (scores.abs() >= threshold) & graph.is_edge)


def _by_size(scores: Float[Tensor, "writer reader"], graph: Graph) -> Tensor:
    """The flat indices of all edges with a score that is not NaN, by descending absolute score."""
    size = scores.abs().masked_fill(~graph.is_edge, torch.nan).flatten()
    order = size.nan_to_num(nan=-1.0).argsort(descending=True, stable=True)
    return order[: int((~size.isnan()).sum())]


def _taken(places: Tensor, graph: Graph) -> Bool[Tensor, "writer reader"]:
    edges = torch.zeros_like(graph.is_edge)
    edges.view(-1)[places] = True
    return edges
