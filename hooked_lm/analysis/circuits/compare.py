"""Comparison: the shared and unshared edges and nodes of two circuits of one model."""

from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.analysis.circuits.paths import nodes_of, on_paths
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.Comparison"
SHARED, ONE, OTHER = "both", "one", "other"


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Tabular):
    """The edges [writer, reader] of two circuits of one model, and their nodes on paths from input to logits.

    `edges` and `nodes` are lists by the keys "both", "one" (only in the first) and "other" (only in the second).

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.circuits import Circuit
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> one, other = (
    ...     Circuit.of(graph, [("input", reader), ("input", "logits")])
    ...     for reader in ("m0", "m1")
    ... )
    >>> one.compare(other)
    Comparison(edges: 1 in both, 1 and 1 in one only, Jaccard 0.33; nodes: 2 in both, 0 and 0 in one only, Jaccard 1.00)
    """

    graph: Graph
    one: Bool[Tensor, "writer reader"]
    other: Bool[Tensor, "writer reader"]

    @cached_property
    def edges(self) -> dict[str, list[tuple[str, str]]]:
        """The edges in both circuits, and in only one of them, as (writer, reader)."""
        parts = {SHARED: self.one & self.other, ONE: self.one & ~self.other, OTHER: self.other & ~self.one}
        return {where: list(self.graph.named(edges)) for where, edges in parts.items()}

    @cached_property
    def nodes(self) -> dict[str, list[str]]:
        """The nodes in both circuits, and in only one of them."""
        one, other = (nodes_of(self.graph, on_paths(self.graph, edges)) for edges in (self.one, self.other))
        return {
            SHARED: [node for node in one if node in other],
            ONE: [node for node in one if node not in other],
            OTHER: [node for node in other if node not in one],
        }

    @property
    def jaccard(self) -> float:
        """The Jaccard index of the edges, |intersection| / |union| (Jaccard 1912); NaN if both circuits are empty."""
        return _jaccard(self.edges)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each edge and node of either circuit: `kind` ("edge", "node"), `name`, `where` ("both", "one", "other")."""
        rows = [("edge", " -> ".join(edge), where) for where, some in self.edges.items() for edge in some]
        rows += [("node", node, where) for where, some in self.nodes.items() for node in some]
        return pd.DataFrame(rows, columns=["kind", "name", "where"])

    def plot(self, title: str = "") -> "go.Figure":
        """Bars of the numbers of edges and nodes that are in both circuits, and in only one of them."""
        from hooked_lm import viz

        parts: dict[str, Mapping[str, Sized]] = {"edges": self.edges, "nodes": self.nodes}
        words = {SHARED: "in both", ONE: "in the first only", OTHER: "in the other only"}
        labels = [f"{what} {word}" for what in parts for word in words.values()]
        numbers = [float(len(of[where])) for of in parts.values() for where in words]
        return viz.bars(torch.tensor(numbers), labels, title=title or "Parts of two circuits", y_title="number")

    def save(self, path: str | Path) -> None:
        """Writes the comparison to one safetensors file; `load` restores it exactly."""
        ends = {"writers": self.graph.writers, "readers": self.graph.readers}
        header = {name: [asdict(node) for node in nodes] for name, nodes in ends.items()}
        stored.write(path, FORMAT, {ONE: self.one, OTHER: self.other}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Comparison":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        writers, readers = (tuple(map(Node.of_fields, header[name])) for name in ("writers", "readers"))
        return cls(Graph(writers, readers), tensors[ONE], tensors[OTHER])

    def __repr__(self) -> str:
        return f"Comparison(edges: {_told(self.edges)}; nodes: {_told(self.nodes)})"


def _jaccard(parts: Mapping[str, list[str] | list[tuple[str, str]]]) -> float:
    n_any = sum(map(len, parts.values()))
    return len(parts[SHARED]) / n_any if n_any else float("nan")


def _told(parts: Mapping[str, list[str] | list[tuple[str, str]]]) -> str:
    both, one, other = (len(parts[where]) for where in (SHARED, ONE, OTHER))
    return f"{both} in both, {one} and {other} in one only, Jaccard {_jaccard(parts):.2f}"
