"""Building an attribution graph: rows of edges by backward passes, targets first, then the most influential features."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FIRST, Jacobian, Values
from hooked_lm.analysis.graphs.influence import SMALLEST
from hooked_lm.analysis.graphs.sources import Rows, Sources
from hooked_lm.analysis.graphs.targets import TargetReads
from hooked_lm.models.budget import memory_of
from hooked_lm.progress import progress_bar

MOST = 256  # reads in one backward pass; more do not take less time each
ROUND = 256  # features that are added before influences are computed anew


class EdgeRows:
    """The rows of edges of one graph, as they are computed.

    `edges` is [row, column]: rows are the targets, then features in the order in which they are added (`features`); columns are
    the features that may be kept, the error nodes and the tokens. `n_kept` is how many features get a row.
    """

    def __init__(self, sources: Sources, targets: TargetReads, n_kept: int, max_memory: int | str = "auto") -> None:
        self.sources, self.targets, self.n_kept = sources, targets, min(n_kept, len(sources.features))
        self.frozen, self.features = sources.frozen, list[int]()
        self.n_targets = len(targets.targets)
        n_columns = len(sources.features) + len(sources.errors) + self.frozen.n_pos
        self.batch = self._reads_at_once(n_columns, max_memory)
        self.edges = torch.zeros(self.n_targets + self.n_kept, n_columns)
        self.jacobian = Jacobian(self.frozen)
        for some in self._batches(range(self.n_targets)):
            self._add(self.targets.gradients_of(some, self.jacobian), slice(some[0], some[-1] + 1))

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(numbers), self.batch):
            yield list(numbers[start : start + self.batch])

    def add_features(self, features: Sequence[int]) -> None:
        """Adds the rows of features; those of one layer together, as the backward passes of early layers are short."""
        for some in self._batches(sorted(features)):
            start = self.n_targets + len(self.features)
            self._add(self.sources.gradients_of(torch.tensor(some), self.jacobian), slice(start, start + len(some)))
            self.features += some

    def _add(self, of: Values, rows: slice) -> None:
        """Fills rows with the edges into reads that have these gradients at their sites."""
        gradients = self.jacobian.gradients(of)
        if not gradients:
            return
        inner = self.sources.edges(gradients)
        self.edges[rows, : inner.shape[1]] = inner.float().cpu()
        if (first := gradients.get(FIRST)) is not None:
            self.edges[rows, inner.shape[1] :] = (first * self.frozen.values[FIRST][0]).sum(-1).float().cpu()

    def _reads_at_once(self, n_columns: int, max_memory: int | str) -> int:
        """How many reads a backward pass may have, by what their gradients and edges take, beside the edges of the graph.

        Raises ValueError for a memory that the user chose and that is too small for these, or for one read.
        """
        frozen = self.frozen
        sizes = [value[0].numel() for value in (*frozen.given.values(), *frozen.values.values())]
        constants = {site: value[0].numel() for site, value in frozen.constants.items()}
        pattern = max((size for site, size in constants.items() if site.endswith("hook_pattern")), default=0)
        element = frozen.values[FIRST].element_size()
        each = element * (2 * sum(sizes) + 6 * max(sizes) + 2 * pattern) + 8 * n_columns
        held = element * (3 * sum(sizes) + sum(constants.values())) + 4 * n_columns * (self.n_targets + self.n_kept)
        n_nodes = self.n_kept + n_columns - len(self.sources.features) + self.n_targets
        held += self.sources.n_bytes + 12 * n_nodes**2  # and the adjacency, twice more for influences
        left = memory_of(max_memory, frozen.tokens.device) - held
        if left < each and max_memory != "auto":
            raise ValueError(
                f"max_memory={max_memory} is too small: the values of the prompt and the edges into {self.n_kept:,} nodes take "
                f"{held:,} bytes, and a backward pass about {each:,}; a smaller max_nodes needs less"
            )
        return max(1, min(MOST, left // each))

    # ---- which features ----------------------------------------------------------------------------------------------

    def most_influential(self, n: int, visited: Bool[Tensor, " feature"]) -> list[int]:
        """The features without a row that have the largest influence by the rows so far."""
        n_features, own = len(self.sources.features), torch.tensor(self.features, dtype=torch.long)
        filled = self.edges[: self.n_targets + len(own)]
        sums = torch.cat([some.abs().sum(1) for some in filled.split(MOST)]).clamp(min=SMALLEST)
        total = torch.zeros(filled.shape[1])
        weights = torch.cat([self.targets.weights, torch.zeros(len(own))])
        for _ in range(len(own) + 1):
            if not bool(weights.any()):
                break
            shares = (weights / sums).split(MOST)
            step = torch.stack([w @ some.abs() for w, some in zip(shares, filled.split(MOST), strict=True)]).sum(0)
            total += step
            weights = torch.cat([torch.zeros(self.n_targets), step[own]])
        order = total[:n_features].argsort(descending=True, stable=True)
        return order[~visited[order]][:n].tolist()

    def add_most_influential(self, round_size: int, progress: bool | None) -> None:
        """Adds the rows of all features that get one, in rounds: those with the largest influence on the targets so far."""
        n_all = len(self.sources.features)
        with progress_bar("attribution graph", self.n_kept, progress, unit=f"{self.sources.unit}s") as bar:
            if self.n_kept == n_all:
                for some in self._batches(range(n_all)):
                    self.add_features(some)
                    bar.update(len(some))
                return
            visited = torch.zeros(n_all, dtype=torch.bool)
            while len(self.features) < self.n_kept:
                some = self.most_influential(min(round_size, self.n_kept - len(self.features)), visited)
                self.add_features(some)
                visited[some] = True
                bar.update(len(some))

    # ---- the matrix --------------------------------------------------------------------------------------------------

    def matrix(self) -> tuple[Int[Tensor, " feature"], Float[Tensor, "target source"], Float[Tensor, " node"]]:
        """The kept features, the adjacency, and what flows into each node from features that are left out."""
        n_features = len(self.sources.features)
        kept, order = torch.tensor(self.features, dtype=torch.long).sort()
        gone = torch.ones(n_features, dtype=torch.bool)
        gone[kept] = False
        n_outer = self.edges.shape[1] - n_features
        n = len(kept) + n_outer + self.n_targets
        adjacency, others = torch.zeros(n, n), torch.zeros(n)
        ends = torch.cat([torch.arange(n - self.n_targets, n), order.argsort()])  # the node of each row
        places = self._errors_of(gone.nonzero()[:, 0]) if self.sources.errors_hold_the_rest else None
        for nodes, rows in zip(ends.split(MOST), self.edges.split(MOST), strict=True):
            inner, outer = rows[:, :n_features], rows[:, n_features:].clone()
            if places is not None:
                outer.index_add_(1, places, inner[:, gone])
            else:
                others[nodes] = inner[:, gone].sum(1)
            adjacency[nodes, : n - self.n_targets] = torch.cat([inner[:, kept], outer], 1)
        return kept, adjacency, others

    def _errors_of(self, features: Rows) -> Int[Tensor, " feature"]:
        """The error node of the layer and position of each feature."""
        nodes = {tuple(place): node for node, place in enumerate(self.sources.errors.tolist())}
        each = [nodes[tuple(place)] for place in self.sources.features[features, :2].tolist()]
        return torch.tensor(each, dtype=torch.long)
