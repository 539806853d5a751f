"""Paths through a model: which readers are inputs of which writers, and which edges connect the input with the logits."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
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


def strongest_paths(
    graph: Graph, edges: Bool[Tensor, "writer reader"], scores: Float[Tensor, "writer reader"], n_edges: int
) -> Bool[Tensor, "writer reader"]:
    """The strongest of some edges, in whole paths from the input to the logits of at most `n_edges` edges together.

    Edges are taken by descending absolute score, each with the widest path through it, until one does not fit. The width of a
    path is the score of its weakest edge. So each edge is on a path of the result, and the others are no stronger than the last
    edge that was taken for its own score. The first path is never cut, also if it is longer than `n_edges`.
    """
    sizes = scores.abs().masked_fill(~on_paths(graph, edges), -1.0)
    paths, kept = _WidestPaths(graph, sizes), torch.zeros_like(graph.is_edge)
    order = sizes.flatten().argsort(descending=True, stable=True)[: int((sizes >= 0).sum())]
    for place in order.tolist():
        writer, reader = divmod(place, len(graph.readers))
        if bool(kept[writer, reader]):
            continue
        after = kept.clone()
        after[tuple(torch.tensor([*paths.through(writer, reader)]).T)] = True
        if bool(kept.any()) and int(after.sum()) > n_edges:
            break
        kept = after
    return kept


class _WidestPaths:
    """The widest paths from the input to each writer and from each reader to the logits; edges of negative size do not exist.

    `sources[reader]` and `targets[writer]` are the other ends of the edge on that path, `fed_by[writer]` and `feeds[reader]` the
    links inside nodes.
    """

    def __init__(self, graph: Graph, sizes: Float[Tensor, "writer reader"]) -> None:
        self.starts = [node.is_input or INPUT in node.fed_by for node in graph.writers]
        self.end = graph.reader(LOGITS)
        inside = feeds(graph)
        down, up = torch.full((len(graph.writers),), -1.0), torch.full((len(graph.readers),), -1.0)
        read, written = up.clone(), down.clone()
        self.sources, self.feeds = ([0] * len(graph.readers) for _ in range(2))
        self.targets, self.fed_by = ([0] * len(graph.writers) for _ in range(2))
        ends = [(node.rank, 0, i) for i, node in enumerate(graph.readers)]
        ends += [(node.rank, 1, i) for i, node in enumerate(graph.writers)]
        for _, is_writer, i in sorted(ends):
            if not is_writer:
                read[i], self.sources[i] = _widest(down.minimum(sizes[:, i]), sizes[:, i])
            elif self.starts[i]:
                down[i] = torch.inf
            else:
                down[i], self.fed_by[i] = _widest(read.where(inside[:, i], -1.0), read)
        for _, is_writer, i in sorted(ends, reverse=True):
            if is_writer:
                written[i], self.targets[i] = _widest(up.minimum(sizes[i]), sizes[i])
            elif i == self.end:
                up[i] = torch.inf
            else:
                up[i], self.feeds[i] = _widest(written.where(inside[i], -1.0), written)

    def through(self, writer: int, reader: int) -> Iterator[tuple[int, int]]:
        """The edges of the widest path through an edge."""
        yield writer, reader
        while not self.starts[writer]:
            below = self.fed_by[writer]
            writer = self.sources[below]
            yield writer, below
        while reader != self.end:
            writer = self.feeds[reader]
            reader = self.targets[writer]
            yield writer, reader


def _widest(widths: Float[Tensor, " end"], sizes: Float[Tensor, " end"]) -> tuple[float, int]:
    """The largest width and its place; of equal ones that of the largest size."""
    width = widths.max()
    return float(width), int(sizes.masked_fill(widths < width, -2.0).argmax())


def nodes_of(graph: Graph, edges: Bool[Tensor, "writer reader"]) -> list[str]:
    """The writers of these edges in order of computation, followed by "logits"; empty if there are no edges."""
    found = [graph.writers[i].name for i in edges.any(1).nonzero()[:, 0].tolist()]
    return [*found, LOGITS] if found else []
