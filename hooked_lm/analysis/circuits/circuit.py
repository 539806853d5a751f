"""Circuit: a subset of the edges of a model with their scores; plots, graphs, files and comparisons."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.graph import LOGITS, Graph, Node
from hooked_lm.analysis.circuits.compare import Comparison
from hooked_lm.analysis.circuits.paths import feeds, nodes_of, on_paths, strongest_paths
from hooked_lm.engine.metrics import FALLING, RISING
from hooked_lm.engine.pairs import Pairs
from hooked_lm.engine.prompts import kind_of
from hooked_lm.engine.result import RESTORED, SCALE
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import networkx as nx  # type: ignore[import-untyped]
    import pandas as pd

    from hooked_lm.viz.graphs import GraphView
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.Circuit"
KL = "KL(model || circuit)"  # the name of the metric if none is given
EFFECTS = "exact effects"  # what scores are, in `about`
SEEN = "search_prompts"  # in `about`: the identities of the prompts that the search saw
SHOWN = 30  # edges of a figure


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Tabular):
    """A subset of the edges of a model.

    Args:
        graph: the writers and readers of the model; see `Graph.of`.
        edges: [writer, reader], whether the edge is in the circuit.
        scores: [writer, reader], the score of each edge of the model by the method that found the circuit, NaN where it gave
            none; or None.
        about: how it was found: model, versions, method, replace_with, seed, settings.

    Raises ValueError for tensors of another shape than the graph, and for edges that the graph does not have.

    >>> from hooked_lm import HookedTransformer
    >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
    >>> circuit = Circuit.of(graph, [("input", "L1H2<v>"), ("L1H2", "logits"), ("m0", "m1")])
    >>> circuit, circuit.pruned().n_edges, circuit.nodes
    (Circuit(3 of 1519 edges, 2 of them on paths from input to logits; 3 nodes), 2, ['input', 'L1H2', 'logits'])
    """

    graph: Graph
    edges: Bool[Tensor, "..."]  # __post_init__ checks the shapes, for errors that name the graph
    scores: Float[Tensor, "..."] | None = None
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        shape = self.graph.is_edge.shape
        for name, tensor in (("edges", self.edges), ("scores", self.scores)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} {list(tensor.shape)} are not those of {self.graph!r}")
        if bool((self.edges & ~self.graph.is_edge).any()):
            writer, reader = next(self.graph.named(self.edges & ~self.graph.is_edge))
            raise ValueError(
                f"there is no edge from {writer!r} to {reader!r}: the reader does not come after the writer"
            )
        object.__setattr__(self, "edges", self.edges.detach().cpu().clone())
        if self.scores is not None:
            object.__setattr__(self, "scores", self.scores.detach().to("cpu", torch.float32, copy=True))
        object.__setattr__(self, "about", dict(self.about))

    @classmethod
    def of(cls, graph: Graph, edges: Sequence[tuple[str, str]], **about: Any) -> "Circuit":
        """A circuit of these edges, (writer, reader); raises as `Graph.edge`."""
        left = torch.zeros_like(graph.is_edge)
        for writer, reader in edges:
            left[graph.edge(writer, reader)] = True
        return cls(graph, left, about=about)

    @property
    def n_edges(self) -> int:
        return int(self.edges.sum())

    @cached_property
    def _on_paths(self) -> Bool[Tensor, "writer reader"]:
        return on_paths(self.graph, self.edges)

    @property
    def nodes(self) -> list[str]:
        """The writers on a path from input to logits in order of computation, followed by "logits"; empty if there is no path."""
        return nodes_of(self.graph, self._on_paths)

    def pruned(self) -> "Circuit":
        """The circuit without the edges that are on no path from input to logits (see `feeds` for the links inside nodes).

        Such edges carry nothing that depends on the clean prompt to the logits, so with resample ablation the circuit computes
        the same without them.
        """
        return replace(self, edges=self._on_paths)

    def complement(self) -> "Circuit":
        """The edges that are not in the circuit."""
        return replace(self, edges=self.graph.is_edge & ~self.edges)

    def check(self, graph: Graph) -> None:
        """Raises ValueError unless `graph` is the graph of this circuit."""
        if self.graph != graph:
            of = f" of {self.about['model']}" if "model" in self.about else ""
            raise ValueError(
                f"this circuit{of} is one of {self.graph!r}, and the model is {graph!r}, with other names of nodes"
                if repr(self.graph) == repr(graph)
                else f"this circuit{of} is one of {self.graph!r}, and the model is {graph!r}"
            )

    def compare(self, other: "Circuit") -> "Comparison":
        """Compare the edges and nodes of two circuits; raises ValueError if their graphs differ."""
        other.check(self.graph)
        return Comparison(self.graph, self.edges, other.edges)

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each edge, by descending absolute score: `writer`, `reader`, `score`, `on_path`."""
        places = self.edges.nonzero()
        named = pd.DataFrame(list(self.graph.named(self.edges)), columns=["writer", "reader"])
        scores = self.scores if self.scores is not None else torch.full(self.edges.shape, torch.nan)
        table = named.assign(score=scores[tuple(places.T)].numpy(), on_path=self._on_paths[tuple(places.T)].numpy())
        return table.sort_values("score", key=abs, ascending=False, ignore_index=True, kind="stable")

    def to_networkx(self) -> "nx.DiGraph[str]":
        """A directed graph of the edges on paths: nodes with `layer` and `kind` ("writer", "reader"; an MLP is both), edges with
        `kind` ("edge", or "inside" from the input of a head to its output) and, for "edge", `score`."""
        import networkx as nx

        found: nx.DiGraph[str] = nx.DiGraph()
        table = self.pruned().to_dataframe()
        layers = {node.name: node.layer for node in (*self.graph.readers, *self.graph.writers)}
        for writer, reader, score in zip(table["writer"], table["reader"], table["score"], strict=True):
            for name, kind in ((writer, "writer"), (reader, "reader")):
                found.add_node(name, layer=layers[name], kind=kind)
            found.add_edge(writer, reader, score=float(score), kind="edge")
        inside = feeds(self.graph)
        for reader, writer in inside.nonzero().tolist():
            ends = self.graph.readers[reader].name, self.graph.writers[writer].name
            if ends[0] != ends[1] and all(end in found for end in ends):
                found.add_edge(*ends, kind="inside")
        return found

    def plot(self, title: str = "", n_edges: int = SHOWN) -> "GraphView":
        """Draw the paths of the circuit, layer by layer from the input at the bottom to the logits at the top.

        The strongest edges are drawn, each with the widest path through it (that whose weakest edge is strongest), at most
        `n_edges` (more only if the first path has more). So each node is on a path from the input to the logits. The subtitle
        counts the weaker edges. An edge of a query, key or value ends at the port "q", "k" or "v" of its head, and one that
        several heads share at each of them. Width shows the size of a score, colour and dashes its sign, as the legend says.

        A click or Enter on a node shows what it reads and writes, with all scores. If all edges have the same score, as after
        pruning, all are drawn alike: see `circuits.exact_effects`. Raises ValueError if n_edges is less than 1.

        >>> from hooked_lm import HookedTransformer
        >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
        >>> Circuit.of(graph, [("input", "L1H2<v>"), ("L1H2", "logits")]).plot()
        View('Circuit of 2 of 1,519 edges', 3 nodes, 2 edges; .show() opens it in a browser, .write_html(path) saves it)
        """
        from hooked_lm.viz.graphs import layered_graph

        if n_edges < 1:
            raise ValueError(f"n_edges must be at least 1, got {n_edges}")
        table = self.pruned().to_dataframe()
        is_ranked = len(table) > 0 and table["score"].notna().all() and table["score"].nunique() > 1
        drawn = self._on_paths
        if is_ranked and self.scores is not None:
            drawn = strongest_paths(self.graph, drawn, self.scores, n_edges)
        names = {*nodes_of(self.graph, drawn)} or {node.name for node in self.graph.writers if node.is_input} | {LOGITS}
        levels = {node.name: node.rank for node in self.graph.writers if node.name in names}
        levels[LOGITS] = self.graph.readers[-1].rank
        table["drawn"] = [
            bool(drawn[self.graph.edge(*ends)]) for ends in zip(table["writer"], table["reader"], strict=True)
        ]
        table = table.sort_values("drawn", ascending=False, kind="stable")
        table["target"] = [
            self._fed(reader, levels if is_drawn else self.nodes)
            for reader, is_drawn in zip(table["reader"], table["drawn"], strict=True)
        ]
        weaker = table.loc[~table["drawn"].astype(bool), "score"].abs().tolist()
        table = table.explode("target")
        edges = [
            (writer, target, f"{writer} → {reader}")
            for writer, reader, target in zip(table["writer"], table["reader"], table["target"], strict=True)
        ]
        name, meanings, blue = self._measured
        return layered_graph(
            levels,
            edges,
            torch.tensor(table["score"].to_numpy(), dtype=torch.float32) if is_ranked else None,
            title or self._title,
            name,
            self._of_paths(int(drawn.sum()), weaker, bool(is_ranked)),
            meanings,
            blue=blue,
            ports=[reader[-2] if reader.endswith(">") else "" for reader in table["reader"]],
            n_drawn=int(table["drawn"].sum()),
        )

    def _of_paths(self, n_drawn: int, weaker: Sequence[float], is_ranked: bool) -> str:
        """How many edges a figure draws, and what it leaves out."""
        n_all, way = n_drawn + len(weaker), "from the input (bottom) to the logits (top)"
        if not self.n_edges:
            return "The circuit is empty: no edge leads from the input (bottom) to the logits (top)."
        idle = self.n_edges - n_all
        on_none = f"; {idle:,} other{'s are' if idle > 1 else ' is'} on no path" if idle else ""
        if not n_all:
            return f"There is no path {way}: none of the {self.n_edges:,} edges is on one."
        if not len(weaker):
            return f"All {n_all:,} edges on paths {way}{on_none}" + ("." if is_ranked else ". No scores rank them.")
        return (
            f"{n_drawn:,} of {n_all:,} edges on paths {way}: the strongest, each with the widest path through it. "
            f"+{len(weaker):,} weaker, the largest {max(weaker):.2g}{on_none}."
        )

    @property
    def _title(self) -> str:
        how = f", found by {self.about['method']}" if "method" in self.about else ""
        return f"Circuit of {self.n_edges:,} of {self.graph.n_edges:,} edges{how}"

    @property
    def _measured(self) -> tuple[str, tuple[str, str], int]:
        """What the scores are, what a positive and a negative one mean, and the sign of edges that the answer needs."""
        method, metric = str(self.about.get("method", "")), str(self.about.get("metric", "the metric"))
        if self.about.get("scores") != EFFECTS and method in ("", "pruning", "exchange", "masks"):
            return "score", ("positive score", "negative score"), 1
        of_search = self.about.get("scores") != EFFECTS  # otherwise those of `exact_effects`, in units of the metric
        is_restored = of_search and RESTORED in str(self.about.get(SCALE, ""))
        falls, rises = ("without it {} falls", "without it {} rises")
        if of_search and self.about.get("direction") == "denoise":
            falls, rises = "it raises {}", "it lowers {}"
        the = metric if metric in (KL, "the metric") else f"the {metric}"
        the = f"the share of {the} restored" if is_restored else the
        positive, negative = rises.format(the), falls.format(the)
        is_rising = is_restored or metric.replace(" ", "_") in RISING
        if not is_rising and metric != KL and metric.replace(" ", "_") not in FALLING:
            return f"effect on {the}", (positive, negative), 1
        needed, against = "needed for the answer", "works against the answer"
        if is_rising:
            return f"effect on {the}", (f"{against}: {positive}", f"{needed}: {negative}"), -1
        return f"effect on {the}", (f"{needed}: {positive}", f"{against}: {negative}"), 1

    def _fed(self, reader: str, nodes: Container[str]) -> list[str]:
        """Those of the nodes that a reader is an input of, such as the heads that share a key; or "logits"."""
        fed = [
            self.graph.writers[i].name for i in feeds(self.graph)[self.graph.reader(reader)].nonzero()[:, 0].tolist()
        ]
        return [name for name in fed if name in nodes] or [reader]

    def targets(self, readers: Iterable[str]) -> list[str]:
        """The component of each reader: the head of a query, key or value. Of heads that share keys and values, the first on a
        path."""
        return [self._fed(reader, self.nodes)[0] for reader in readers]

    def report(
        self,
        path: str | Path,
        evaluation: Scores | None = None,
        pairs: Pairs | None = None,
        *,
        command: str = "",
    ) -> Path:
        """Write the circuit to `path` as one HTML page that needs no network; returns the path.

        The page has the figure, the strongest edges and the arguments of the search.

        Args:
            evaluation: a result of `circuits.evaluate`: the page then has faithfulness and completeness, with their intervals.
            pairs: the prompts and answers, which the page lists.
            command: what wrote the page, such as a line of a shell.

        Raises ValueError for an evaluation of another kind or model, TypeError for other pairs, OSError if the file cannot be
        written. `hooked_lm.reports.circuit` searches, evaluates and reports at once.

        >>> import tempfile
        >>> from hooked_lm import HookedTransformer
        >>> graph = Graph.of(HookedTransformer.from_pretrained("demo"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Circuit.of(graph, [("input", "m0"), ("m0", "logits")]).report(
        ...         f"{folder}/page.html"
        ...     ).name
        'page.html'
        """
        from hooked_lm import viz
        from hooked_lm.analysis.circuits import page

        if evaluation is not None and getattr(evaluation, "n_all", None) != self.graph.n_edges:
            raise ValueError(f"evaluation must be a result of circuits.evaluate for this model, got {evaluation!r}")
        if pairs is not None and not isinstance(pairs, Pairs):
            raise TypeError(f"pairs must be Pairs, got {kind_of(pairs)}")
        edges = self.pruned().to_dataframe().drop(columns="on_path")
        missing = "Not evaluated: give `evaluation=circuits.evaluate(...)`." if evaluation is None else ""
        sections = [
            page.circuit_section(self.plot(), missing, edges),
            *([] if evaluation is None else [page.faithfulness_section(evaluation)]),
            *([] if pairs is None else [page.pairs_section(pairs)]),
            page.made_section({**self.about, SEEN: None}, command),
        ]
        return viz.report(self._title, sections, path)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, atomically; `load` restores it exactly."""
        tensors = {"edges": self.edges} | ({} if self.scores is None else {"scores": self.scores})
        ends = {"writers": self.graph.writers, "readers": self.graph.readers}
        header = {name: [asdict(node) for node in nodes] for name, nodes in ends.items()}
        stored.write(path, FORMAT, tensors, {"about": self.about, **header})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Circuit":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        writers, readers = (tuple(map(Node.of_fields, header[name])) for name in ("writers", "readers"))
        return cls(Graph(writers, readers), tensors["edges"], tensors.get("scores"), about=header["about"])

    def __repr__(self) -> str:
        share = f"{self.n_edges} of {self.graph.n_edges} edges"
        if not self.n_edges:
            return f"Circuit(empty: none of {self.graph.n_edges} edges is left)"
        on_path = int(self._on_paths.sum())
        on_paths = "" if on_path == self.n_edges else f", {on_path or 'none'} of them on paths from input to logits"
        found = f"; {self.about['method']}" if "method" in self.about else ""
        if "agreement" in self.about:
            agreement = self.about["agreement"]
            found += (
                f", rank correlation with exact patching of {agreement['cells']:.0f} edges {agreement['spearman']:.2f}"
            )
        return f"Circuit({share}{on_paths}; {len(self.nodes)} nodes{found})"
