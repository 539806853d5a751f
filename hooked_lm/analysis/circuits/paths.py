"""Paths through a model: which readers are inputs of which writers, and which edges connect the input with the logits."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.attribution.graph import INPUT, LOGITS, Graph, Node


@lru_cache(maxsize=8)
def feeds(graph: Graph) -> Bool[Tensor, "reader writer"]:
    """Whether each reader is an input of each writer.

    Queries, keys and values of a head ("L0H1<q>") are inputs of the head ("L0H1"). Keys and values of a key/value head are
    inputs of all heads of its group. If all attention of a layer is one writer, they are inputs of that writer. With
    cross-layer KV sharing, keys and values are also inputs of all later layers that compute none. So are the readers that a
    writer is `fed_by`, such as all those of a layer whose heads share a norm.

    >>> from hooked_lm import HookedTransformer
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> bool(feeds(graph)[graph.reader("L0H1<k>"), graph.writer("L0H1")])
    True
    """
    n_queries, n_keys = _counts(graph, "<q>"), _counts(graph, "<k>")
    table = torch.zeros(len(graph.readers), len(graph.writers), dtype=torch.bool)
    for i, reader in enumerate(graph.readers):
        for j, writer in enumerate(graph.writers):
            table[i, j] = reader.name in writer.fed_by or _is_input(reader, writer, n_queries, n_keys)
    return table


def _counts(graph: Graph, letter: str) -> dict[int, int]:
    """The number of query or key heads by layer, for layers with at least one."""
    layers = [node.layer for node in graph.readers if node.name.endswith(letter)]
    return {layer: layers.count(layer) for layer in set(layers)}


def _is_input(reader: Node, writer: Node, n_queries: Mapping[int, int], n_keys: Mapping[int, int]) -> bool:
    is_attention = writer.head is not None or writer.name == f"a{writer.layer}"
    if reader.head is None or writer.layer not in n_queries or not is_attention:
        return reader.name == writer.name
    if reader.layer != writer.layer:
        shares_kv = writer.layer not in n_keys and writer.layer > reader.layer
        return shares_kv and not reader.name.endswith("<q>")
    if writer.head is None:
        return True
    group = 1 if reader.name.endswith("<q>") else n_queries[reader.layer] // n_keys[reader.layer]
    return writer.head // group == reader.head


def on_paths(graph: Graph, edges: Bool[Tensor, "writer reader"]) -> Bool[Tensor, "writer reader"]:
    """The edges on a path from "input", or from what images add after a layer, to "logits".

    Paths also lead from the inputs of heads and MLPs to their outputs.
    """
    reached, useful = ends_on_paths(graph, edges)
    return edges & graph.is_edge & reached[:, None] & useful


def ends_on_paths(
    graph: Graph, edges: Bool[Tensor, "writer reader"]
) -> tuple[Bool[Tensor, " writer"], Bool[Tensor, " reader"]]:
    """The writers that depend on the input through these edges, and the readers on which the logits depend."""
    edges, inside = (edges & graph.is_edge).float(), feeds(graph).float()
    reached, useful = torch.zeros(len(graph.writers)), torch.zeros(len(graph.readers))
    reached[[node.is_input or INPUT in node.fed_by for node in graph.writers]] = useful[graph.reader(LOGITS)] = 1
    for _ in range(len({node.rank for node in graph.readers})):  # the maximum path length
        reached = reached.maximum(((reached @ edges).clamp(max=1) @ inside).clamp(max=1))
        useful = useful.maximum((inside @ (edges @ useful).clamp(max=1)).clamp(max=1))
    return reached.bool(), useful.bool()


def nodes_of(graph: Graph, edges: Bool[Tensor, "writer reader"]) -> list[str]:
    """The writers of these edges in order of computation, followed by "logits"; empty if there are no edges."""
    found = [graph.writers[i].name for i in edges.any(1).nonzero()[:, 0].tolist()]
    return [*found, LOGITS] if found else []
