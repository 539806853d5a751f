"""An attribution graph: features or neurons at positions, errors, tokens and targets, and the exact edges between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs import influence
from hooked_lm.analysis.graphs.agreement import GraphInterventions
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.viz.graphs import GraphView
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.AttributionGraph"
FEATURE, ERROR, TOKEN, TARGET = "feature", "error", "token", "target"  # kinds of nodes, in their order
SHOWN = 60  # edges of a figure
TENSORS = (
    "features", "errors", "token_ids", "target_ids", "adjacency", "activations", "probabilities", "totals", "biases", "others",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph(Tabular):
    """Nodes of one prompt and the edges between them, which are exact while attention patterns and scales of norms are constant.

    Nodes are in this order: features, errors, tokens, targets. An edge is what a source adds to its target: the activation of the
    source, times the inner product of what it writes and what the target reads. So the edges into a node, `biases` and `others`
    sum to `totals`.

    Args:
        features: [feature, 3], the layer, position and index of each feature, or neuron, in this order.
        errors: [error, 2], the layer and position of each error node: the output of an MLP that no feature of the graph explains.
        tokens: the tokens of the prompt as strings, one node for each; with the position embeddings.
        targets: the names of the targets, as "logit ' Mary'".
        adjacency: [target, source], the edges; rows of errors and tokens are 0.
        activations: [feature], the activations of the features.
        probabilities: [target], the weight of each target, such as the probability of its token.
        totals: [node], what edges, biases and others sum to: the pre-activation of a feature, the activation of a neuron, the
            value of a target; 0 for errors and tokens.
        biases: [node], what flows into each node from all biases of the model and of its dictionaries.
        others: [node], what flows into it from sources and along edges that are left out.
        token_ids, target_ids: [pos] and [target], token ids; -1 for a target that is no token.
        unit: "feature", or "neuron" in a graph without dictionaries.
        completeness: the largest error of the sums into a node, relative to the sizes of what is summed, and of finite
            differences, relative to the largest edge out of the feature.
        supernodes: names of groups of nodes, each with its node numbers.
        about: the origin: the model, versions, settings.
        directions: [target, width], what each target reads, 0 beyond the width of its site.
        reads: the site and the position that each target reads; "" for the input of the unembedding.
        agreement: exact ablations of features in the model, beside what this graph predicts.
        control: scores and agreement of a graph of the untrained twin, for the same prompt; of transcoders only with some that
            were trained on the twin.

    Raises ValueError for shapes that do not fit and for supernodes with unknown nodes.
    """

    features: Int[Tensor, "feature 3"]
    errors: Int[Tensor, "error 2"]
    tokens: Sequence[str]
    targets: Sequence[str]
    adjacency: Float[Tensor, "node node"]
    activations: Float[Tensor, " feature"]
    probabilities: Float[Tensor, " target"]
    totals: Float[Tensor, " node"]
    biases: Float[Tensor, " node"]
    others: Float[Tensor, " node"]
    token_ids: Int[Tensor, " pos"]
    target_ids: Int[Tensor, " target"]
    unit: str = "feature"
    completeness: Mapping[str, float] = field(default_factory=dict)
    supernodes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    directions: Float[Tensor, "target width"] | None = None
    reads: Sequence[tuple[str, int]] = ()
    agreement: GraphInterventions | None = None
    control: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, n_features, n_targets = self.n_nodes, len(self.features), len(self.targets)
        shapes = {
            "features": (n_features, 3), "errors": (len(self.errors), 2), "adjacency": (n, n), "totals": (n,), "biases": (n,),
            "others": (n,), "activations": (n_features,), "probabilities": (n_targets,), "token_ids": (len(self.tokens),),
            "target_ids": (n_targets,),
        }  # fmt: skip
        for name, shape in shapes.items():
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} of a graph with {n} nodes must be {list(shape)}, got {list(found)}")
        for name, nodes in self.supernodes.items():
            if wrong := [node for node in nodes if not 0 <= node < n]:
                raise ValueError(f"supernode {name!r} has node {wrong[0]}, and the graph has nodes 0 to {n - 1}")

    # ---- nodes -------------------------------------------------------------------------------------------------------

    @property
    def n_nodes(self) -> int:
        return len(self.features) + len(self.errors) + len(self.tokens) + len(self.targets)

    @property
    def n_edges(self) -> int:
        """The number of edges that are not 0."""
        return int(self.adjacency.count_nonzero())

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each node: "feature", "error", "token" or "target"."""
        sizes = {FEATURE: self.features, ERROR: self.errors, TOKEN: self.tokens, TARGET: self.targets}
        return [kind for kind, nodes in sizes.items() for _ in range(len(nodes))]

    @cached_property
    def names(self) -> list[str]:
        """The name of each node: "L2F17@5" is feature 17 of layer 2 at position 5 ("L2N17@5" a neuron), "L2E@5" an error."""
        letter = self.unit[0].upper()
        features = [f"L{layer}{letter}{index}@{position}" for layer, position, index in self.features.tolist()]
        errors = [f"L{layer}E@{position}" for layer, position in self.errors.tolist()]
        tokens = [f"{token}@{position}" for position, token in enumerate(self.tokens)]
        return [*features, *errors, *tokens, *self.targets]

    def slice_of(self, kind: str) -> slice:
        """The nodes of a kind."""
        start = self.kinds.index(kind) if kind in self.kinds else 0
        return slice(start, start + self.kinds.count(kind))

    @property
    def target_positions(self) -> list[int]:
        """The position that each target reads; the last one if the graph does not say it."""
        n = len(self.tokens)
        return [position % n for _, position in self.reads] if self.reads else [n - 1] * len(self.targets)

    def node(self, name: str | int) -> int:
        """The number of a node, by its name or number. Raises ValueError for an unknown node."""
        if isinstance(name, int) and -self.n_nodes <= name < self.n_nodes:
            return name % self.n_nodes
        if name not in self.names:
            raise ValueError(f"the graph has no node {name!r}; its nodes are in .nodes(), as {self.names[0]!r}")
        return self.names.index(str(name))

    @cached_property
    def weights(self) -> Float[Tensor, " node"]:
        """The weight of each node as a target: the probabilities, and 0 for the others."""
        inner = torch.zeros(self.n_nodes - len(self.targets))
        return torch.cat([inner, self.probabilities.to(inner)])

    @cached_property
    def influence(self) -> Float[Tensor, " node"]:
        """The influence of each node on the targets, over paths of every length."""
        return influence.influence(influence.normalized(self.adjacency), self.weights)

    @cached_property
    def scores(self) -> dict[str, float]:
        """The scores `replacement` and `completeness` (see `influence.scores`), between 0 and 1. Of a pruned graph those of the
        whole: pruning leaves out errors, and not what they explain."""
        if (whole := self.about.get("pruned", {}).get("scores")) is not None:
            return dict(whole)
        sizes = len(self.features), len(self.errors), len(self.tokens)
        return influence.scores(self.adjacency, self.weights, *sizes)

    # ---- parts of the graph ------------------------------------------------------------------------------------------

    def pruned(self, nodes: float = 0.8, edges: float = 0.98) -> "AttributionGraph":
        """The graph of the nodes and edges with the largest influence: that share of the influence of nodes, and of edges.

        Tokens and targets are kept. `others` then includes what flowed along edges that are left out, so sums stay exact, and
        `agreement` has the predictions of the smaller graph. `scores` stay those of the whole graph. Raises ValueError for shares
        outside of 0 to 1.
        """
        for name, share in (("nodes", nodes), ("edges", edges)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share between 0 and 1, got {share}")
        n_ends = len(self.tokens) + len(self.targets)
        kept, links = influence.pruned(self.adjacency, self.weights, len(self.features), n_ends, nodes, edges)
        return self._part(kept, self.adjacency * links, {"nodes": nodes, "edges": edges})

    def grouped(self, supernodes: Mapping[str, Sequence[str | int]]) -> "AttributionGraph":
        """The graph with these supernodes: names of groups, each with its nodes by name or number.

        Raises ValueError for an unknown node, and for one in two groups.
        """
        found = {name: [self.node(node) for node in nodes] for name, nodes in supernodes.items()}
        members = [node for nodes in found.values() for node in nodes]
        if twice := [node for node in members if members.count(node) > 1]:
            raise ValueError(f"{self.names[twice[0]]!r} is in two supernodes: a node belongs to one")
        return replace(self, supernodes=found)

    def _part(self, kept: Tensor, adjacency: Tensor, settings: Mapping[str, float]) -> "AttributionGraph":
        """The graph of some nodes, with these edges."""
        inside = adjacency[kept][:, kept]
        left_out = self.adjacency[kept].sum(1) - inside.sum(1)
        new = {int(node): place for place, node in enumerate(kept.nonzero()[:, 0])}
        groups = {name: [new[node] for node in nodes if node in new] for name, nodes in self.supernodes.items()}
        whole = {**settings, "of_nodes": self.n_nodes, "of_edges": self.n_edges, "scores": self.scores}
        n_features, n_errors = len(self.features), len(self.errors)
        is_feature, is_error = kept[:n_features], kept[n_features : n_features + n_errors]
        found = replace(
            self,
            features=self.features[is_feature],
            errors=self.errors[is_error],
            adjacency=inside,
            activations=self.activations[is_feature],
            totals=self.totals[kept],
            biases=self.biases[kept],
            others=self.others[kept] + left_out,
            supernodes={name: nodes for name, nodes in groups.items() if nodes},
            about={**self.about, "pruned": whole},
        )
        if self.agreement is None:
            return found
        own = self.agreement.predicted_by(found.names, found.adjacency, found.totals, len(found.features))
        return replace(found, agreement=own)

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each edge that is not 0, by descending size: `source`, `target`, `weight`."""
        rows, columns = self.adjacency.nonzero(as_tuple=True)
        weights = self.adjacency[rows, columns]
        order = weights.abs().argsort(descending=True, stable=True)
        ends = {
            name: [self.names[node] for node in nodes[order].tolist()]
            for name, nodes in (("source", columns), ("target", rows))
        }
        return pd.DataFrame({**ends, "weight": weights[order].numpy()})

    def nodes(self) -> "pd.DataFrame":
        """A row for each node, in the order of the graph: `name`, `kind`, `layer`, `position`, `token`, `index`, `activation`,
        `influence`, `total`, `bias`, `others`, `supernode`."""
        nowhere = [None] * len(self.targets)
        places = [*self.features[:, :2].tolist(), *self.errors.tolist()]
        layers = [*(layer for layer, _ in places), *[None] * len(self.tokens), *nowhere]
        positions = [*(position for _, position in places), *range(len(self.tokens)), *nowhere]
        rest = [None] * (self.n_nodes - len(self.features))
        of = {node: name for name, nodes in self.supernodes.items() for node in nodes}
        return pd.DataFrame(
            {
                "name": self.names,
                "kind": self.kinds,
                "layer": pd.array(layers, dtype="Int64"),
                "position": pd.array(positions, dtype="Int64"),
                "token": [None if place is None else self.tokens[place] for place in positions],
                "index": pd.array([*self.features[:, 2].tolist(), *rest], dtype="Int64"),
                "activation": [*self.activations.tolist(), *rest],
                "influence": self.influence.numpy(),
                "total": self.totals.numpy(),
                "bias": self.biases.numpy(),
                "others": self.others.numpy(),
                "supernode": [of.get(node) for node in range(self.n_nodes)],
            }
        )

    def top(self, n: int = 10) -> "pd.DataFrame":
        """The `n` nodes with the largest influence, of features, errors and tokens, as rows of `nodes()`."""
        table = self.nodes()
        return table[table["kind"] != TARGET].nlargest(n, "influence").reset_index(drop=True)

    def plot(self, title: str = "", n_edges: int = SHOWN) -> "GraphView":
        """Draw the edges that carry most influence, tokens at the bottom and targets at the top.

        Width shows the influence of an edge on the targets, colour and dashes the sign of what it adds to its target. Raises
        ValueError if n_edges is less than 1.
        """
        from hooked_lm.viz.graphs import layered_graph

        if n_edges < 1:
            raise ValueError(f"n_edges must be at least 1, got {n_edges}")
        sizes = influence.normalized(self.adjacency) * (self.influence + self.weights)[:, None]
        largest = sizes.flatten().topk(min(n_edges, self.n_edges)).indices
        rows, columns = (largest // self.n_nodes).tolist(), (largest % self.n_nodes).tolist()
        last = int(max([-1, *self.features[:, 0].tolist(), *self.errors[:, 0].tolist()])) + 1
        each = [*self.features[:, 0].tolist(), *self.errors[:, 0].tolist()]
        levels = [*map(float, each), *[-1.0] * len(self.tokens), *[float(last)] * len(self.targets)]
        used = sorted({*rows, *columns}, key=lambda node: (levels[node], node))
        signs = self.adjacency[rows, columns].sign()
        return layered_graph(
            {self.names[node]: levels[node] for node in used},
            [
                (self.names[s], self.names[t], f"{self.names[s]} → {self.names[t]}")
                for s, t in zip(columns, rows, strict=True)
            ],
            signs * sizes[rows, columns],
            title or f"Attribution graph of {len(self.features):,} {self.unit}s",
            "influence on the targets",
            f"{len(rows):,} of {self.n_edges:,} edges, those with the largest influence.{self._measured}",
            ("adds to its target", "takes from its target"),
        )

    @property
    def _measured(self) -> str:
        return "" if self.agreement is None else f" Predictions: {self.agreement.in_words()}."

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, atomically; `load` restores it exactly."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        header: dict[str, Any] = {name: getattr(self, name) for name in ("unit", "about")}
        header |= {name: list(getattr(self, name)) for name in ("tokens", "targets", "reads")}
        header |= {name: dict(getattr(self, name)) for name in ("completeness", "control")}
        header["supernodes"] = {name: list(nodes) for name, nodes in self.supernodes.items()}
        if self.directions is not None:
            tensors["directions"] = self.directions
        if self.agreement is not None:
            tensors |= {f"agreement.{name}": value for name, value in self.agreement.tensors.items()}
            header["agreement"] = self.agreement.header
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "AttributionGraph":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        fields: dict[str, Any] = {**header, **{name: value for name, value in tensors.items() if "." not in name}}
        fields["reads"] = [(site, position) for site, position in header["reads"]]
        if "agreement" in header:
            inner = {name.partition(".")[2]: value for name, value in tensors.items() if "." in name}
            of: dict[str, Any] = {**header["agreement"], **inner}
            fields["agreement"] = GraphInterventions(**of)
        return cls(**fields)

    def __repr__(self) -> str:
        sizes = f"{len(self.features):,} {self.unit}s, {len(self.errors)} errors, {self.n_edges:,} edges"
        exact = f"; exact to {max(self.completeness.values()):.0e}" if self.completeness else ""
        measured = ""
        if (found := self.agreement) is not None:
            own, placebo = found.correlation["correlation"], found.placebo_correlation["correlation"]
            measured = f"; correlation with ablations: model {own:.2f}, placebo {placebo:.2f}"
        return f"AttributionGraph({sizes}{exact}{measured})"

    def __str__(self) -> str:
        lines = [repr(self), ", ".join(f"{name} exact to {value:.0e}" for name, value in self.completeness.items())]
        lines += [_in_words(self.scores), "" if self.agreement is None else self.agreement.in_words()]
        lines += [f"untrained twin: {_in_words(self.control)}"] if self.control else []
        return "\n".join(filter(None, lines))


def _in_words(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())


def checked_labels(graph: AttributionGraph, labels: Mapping[str, str] | None) -> dict[str, str]:
    """Texts of nodes by name; ValueError for a name that no node has."""
    labels = dict(labels or {})
    if unknown := [name for name in labels if name not in graph.names]:
        raise ValueError(
            f"labels has {unknown[0]!r}, which is no node of the graph; its nodes are as {graph.names[0]!r}"
        )
    return labels
