"""Random circuits of given sizes, with which found ones are compared."""

from collections.abc import Collection

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.paths import ends_on_paths, on_paths

SHARE = 0.15  # of the edges, dropped in a round
TRIES = 200  # draws of a circuit
Edges = Bool[Tensor, "writer reader"]


def random_edges(graph: Graph, sizes: Collection[int], generator: torch.Generator) -> dict[int, Edges]:
    """Random circuits by number of edges, all of them on paths from input to logits.

    Random edges are dropped in rounds, with those that are then on no path, as pruning does with the weakest. What a round
    drops too many is replaced by random edges between the nodes that are left. Where these do not suffice, the circuit is drawn
    again from all edges. A circuit has fewer edges only if none of `TRIES` draws is of its size, as where none exists.

    >>> from hooked_lm import HookedTransformer
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> drawn = random_edges(graph, [2, 10, 200], torch.Generator().manual_seed(0))
    >>> [int(edges.sum()) for edges in drawn.values()]
    [2, 10, 200]
    """
    left, found = graph.is_edge, {}
    for size in sorted(set(sizes), reverse=True):
        for _ in range(TRIES):
            left = _dropped(graph, left, size, generator)
            found[size] = _completed(graph, left, size, generator)
            if int(found[size].sum()) == size:
                break
            left = graph.is_edge
    return {size: found[size] for size in sizes}


def _dropped(graph: Graph, left: Edges, size: int, generator: torch.Generator) -> Edges:
    """The edges without random ones, dropped in rounds until at most `size` are left."""
    while (n := int(left.sum())) > size:
        places = left.flatten().nonzero()[:, 0]
        dropped = places[torch.randperm(n, generator=generator)[: max(1, min(int(n * SHARE), n - size))]]
        left = left.clone()
        left.view(-1)[dropped] = False
        left = on_paths(graph, left)
    return left


def _completed(graph: Graph, edges: Edges, size: int, generator: torch.Generator) -> Edges:
    """The edges with random ones between nodes on paths, up to `size`."""
    reached, useful = ends_on_paths(graph, edges)
    places = (graph.is_edge & ~edges & reached[:, None] & useful).flatten().nonzero()[:, 0]
    more = places[torch.randperm(len(places), generator=generator)[: size - int(edges.sum())]]
    found = edges.clone()
    found.view(-1)[more] = True
    return found
