"""Supernodes: groups of features that are taken as one, by hand (`AttributionGraph.grouped`) or by what they are linked to."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs import influence
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.extras import lazy_import

if TYPE_CHECKING:
    import pandas as pd
    from sklearn import cluster
else:
    pd = lazy_import("pandas", "viz")
    cluster = lazy_import("sklearn.cluster", "probes")


def clustered(graph: AttributionGraph, n: int) -> AttributionGraph:
    """The graph with its features in `n` supernodes, those that are linked alike together.

    A feature is described by the shares of its edges, out of it and into it, with their signs. The distance of two features is
    1 minus the cosine of their descriptions, and clusters are joined by their mean distance. So features that do the same at the
    same place end up together; what they mean is for the reader to say. Prune the graph first: all features are clustered.

    Raises ValueError for another number of clusters than from 1 to the number of features.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.graphs import attribution_graph
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> graph = attribution_graph(
    ...     model,
    ...     "Mary and John left, so John gave a drink to",
    ...     max_nodes=20,
    ...     check=0,
    ...     control=None,
    ... )
    >>> groups = clustered(graph, 4).supernodes
    >>> len(groups), sum(map(len, groups.values()))
    (4, 20)
    """
    n_features = len(graph.features)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= n_features:
        raise ValueError(f"n must be a number of supernodes from 1 to {n_features}, got {n!r}")
    if n_features == 1:
        return replace(graph, supernodes={graph.names[0]: [0]})
    distances = 1 - _cosines(_links(graph))
    fitted = cluster.AgglomerativeClustering(n, metric="precomputed", linkage="average").fit(
        distances.clamp(min=0).numpy()
    )
    labels = torch.from_numpy(fitted.labels_)
    found: dict[str, list[int]] = {}
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0].tolist()
        strongest = max(members, key=lambda node: float(graph.influence[node]))
        found[graph.names[strongest] + (f" +{len(members) - 1}" if len(members) > 1 else "")] = members
    return replace(graph, supernodes=dict(sorted(found.items(), key=lambda item: list(item[1]))))


def supernode_edges(graph: AttributionGraph) -> "pd.DataFrame":
    """A row for each pair of linked supernodes or other nodes, by descending size: `source`, `target`, `share`.

    The share of a source in a target is that of the edges between them in the absolute edges into the target, with their signs;
    of several nodes the mean, weighted by their influence. Influence of targets counts their weight. Links inside a supernode are
    left out.
    """
    names = [*graph.names]
    for name, nodes in graph.supernodes.items():
        for node in nodes:
            names[node] = name
    labels = list(dict.fromkeys(names))
    member = torch.zeros(graph.n_nodes, len(labels))
    member[torch.arange(graph.n_nodes), [labels.index(name) for name in names]] = 1
    shares = graph.adjacency.sign() * influence.normalized(graph.adjacency)
    reach = (graph.influence + graph.weights)[:, None] * member
    reach = reach / reach.sum(0).clamp(min=influence.SMALLEST)
    between = reach.T @ shares @ member
    between.fill_diagonal_(0.0)
    rows, columns = between.nonzero(as_tuple=True)
    order = between[rows, columns].abs().argsort(descending=True, stable=True)
    rows, columns = rows[order], columns[order]
    ends = {"source": columns, "target": rows}
    return pd.DataFrame(
        {name: [labels[place] for place in places.tolist()] for name, places in ends.items()}
        | {"share": between[rows, columns].numpy()}
    )


def _links(graph: AttributionGraph) -> Float[Tensor, "feature link"]:
    """The shares of the edges out of and into each feature, with their signs."""
    n = len(graph.features)
    into = graph.adjacency[:n]
    out = graph.adjacency.sign() * influence.normalized(graph.adjacency)
    return torch.cat([_unit(into), _unit(out[:, :n].T)], 1)


def _unit(rows: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=influence.SMALLEST)


def _cosines(rows: Float[Tensor, "row column"]) -> Float[Tensor, "row row"]:
    unit = _unit(rows)
    found = unit @ unit.T
    return found.fill_diagonal_(1.0)
