"""The circuit of a number of edges, by a ranking of all edges."""

from heapq import heapify, heappop, heappush

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.graph import LOGITS, Graph
from hooked_lm.analysis.circuits.paths import feeds, on_paths
from hooked_lm.analysis.circuits.top import largest

SELECTIONS = ("top", "paths", "greedy")
"""How the circuit of a number of edges is chosen from a ranking."""
Edges = Bool[Tensor, "writer reader"]
EdgeScores = Float[Tensor, "writer reader"]


def selected(graph: Graph, scores: EdgeScores, n_edges: int, selection: str = "top", absolute: bool = True) -> Edges:
    """The circuit of the `n_edges` best edges, without those that are then on no path from input to logits.

    Args:
        scores: of all edges; those with NaN are never chosen. Scores with a sign are effects of ablating an edge.
        selection: "top" takes the edges with the best scores, of which few are on a path if there are few edges (the default of
            MIB's circuit track); "paths" more of them, while at most `n_edges` are on paths (as `circuits.evaluate`); "greedy"
            the best edge into what is connected with the logits so far, again and again (MIB's other choice).
        absolute: whether the best scores are those of the largest size; otherwise those of the edges without which the metric
            falls most.

    Raises ValueError for another selection and a number out of range.

    >>> from hooked_lm import HookedTransformer
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> scores = torch.randn(graph.is_edge.shape, generator=torch.Generator().manual_seed(0))
    >>> [
    ...     int(selected(graph, scores, 100, which).sum())
    ...     for which in ("top", "paths", "greedy")
    ... ]
    [1, 92, 50]
    """
    check_selection(selection)
    if not 0 <= n_edges <= graph.n_edges:
        raise ValueError(f"a circuit has from 0 to {graph.n_edges} edges, got {n_edges}")
    order = ranked_edges(graph, scores, absolute)
    if selection == "greedy":
        return on_paths(graph, _greedy(graph, order, n_edges))
    if selection == "paths":
        places = torch.full(graph.is_edge.shape, torch.nan)
        places.view(-1)[order] = torch.arange(len(order), 0, -1).float()
        return largest(graph, places, n_edges)
    edges = torch.zeros_like(graph.is_edge)
    edges.view(-1)[order[:n_edges]] = True
    return on_paths(graph, edges)


def check_selection(selection: str) -> None:
    """Raises ValueError for an unknown way to select edges."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(map(repr, SELECTIONS))}, got {selection!r}")


def ranked_edges(graph: Graph, scores: EdgeScores, absolute: bool = True) -> Tensor:
    """The flat indices of all edges with a score, the best first; equal ones in the order of the graph."""
    if scores.shape != graph.is_edge.shape:
        raise ValueError(f"scores {list(scores.shape)} are not those of {graph!r}: {list(graph.is_edge.shape)}")
    best = (scores.abs() if absolute else -scores).masked_fill(~graph.is_edge, torch.nan).flatten()
    order = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argsort(descending=True, stable=True)
    return order[: int((~best.isnan()).sum())]


def _greedy(graph: Graph, order: Tensor, n_edges: int) -> Edges:
    """The best edge into the logits or into what was reached from them, again and again."""
    n_readers = len(graph.readers)
    rank = {place: i for i, place in enumerate(order.tolist())}
    into: dict[int, list[int]] = {}
    for place, i in rank.items():
        into.setdefault(place % n_readers, []).append(i)
    inputs = [feeds(graph)[:, writer].nonzero()[:, 0].tolist() for writer in range(len(graph.writers))]
    waiting = list(into.get(graph.reader(LOGITS), ()))
    heapify(waiting)
    reached: set[int] = set()
    edges, places = torch.zeros_like(graph.is_edge), order.tolist()
    while waiting and n_edges:
        place, n_edges = places[heappop(waiting)], n_edges - 1
        edges.view(-1)[place] = True
        if (writer := place // n_readers) not in reached:
            reached.add(writer)
            for reader in inputs[writer]:
                for i in into.pop(reader, ()):
                    heappush(waiting, i)
    return edges
