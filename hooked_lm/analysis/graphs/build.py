"""Building an attribution graph: rows of edges by backward passes, targets first, then the most influential features."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FIRST, FrozenModel, Jacobian
from hooked_lm.analysis.graphs.influence import normalized
from hooked_lm.analysis.graphs.sources import Rows, Sources
from hooked_lm.analysis.graphs.targets import TargetReads
from hooked_lm.models.budget import memory_of
from hooked_lm.progress import progress_bar

MOST = 256  # reads in one backward pass; more do not take less time each
ROUND = 256  # features that are added before influences are computed anew


@dataclass
class EdgeRows:
    """The rows of edges of one graph, as they are computed.

    Columns are the features that may be kept, the error nodes, the tokens. `rows` [row, column]; `features` the feature of each
    row after those of the targets.
    """

    sources: Sources
    targets: TargetReads
    max_memory: int | str = "auto"
    rows: list[Float[Tensor, "row column"]] = field(default_factory=list)
    features: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.frozen: FrozenModel = self.sources.frozen
        self.jacobian = Jacobian(self.frozen)
        self.batch = reads_at_once(self.sources, self.max_memory)

    @property
    def n_columns(self) -> int:
        return len(self.sources.features) + len(self.sources.errors) + self.frozen.n_pos

    def add_targets(self) -> None:
        """Adds the rows of the targets, which come first."""
        places = list(range(len(self.targets.targets)))
        for start in range(0, len(places), self.batch):
            self._add(
                self.targets.gradients_of(places[start : start + self.batch], self.jacobian),
                len(places[start : start + self.batch]),
            )

    def add_features(self, features: Sequence[int]) -> None:
        """Adds the rows of features; those of one layer together, as the backward passes of early layers are short."""
        ordered = sorted(features)
        for start in range(0, len(ordered), self.batch):
            some = ordered[start : start + self.batch]
            self._add(self.sources.gradients_of(torch.tensor(some), self.jacobian), len(some))
            self.features += some

    def _add(self, of: dict[str, Tensor], n: int) -> None:
        gradients = self.jacobian.gradients(of)
        if not gradients:
            self.rows.append(torch.zeros(n, self.n_columns))
            return
        inner = self.sources.edges(gradients)
        first = gradients.get(FIRST)
        stream = self.frozen.values[FIRST][0]
        outer = torch.zeros(n, len(stream)).to(inner) if first is None else (first * stream).sum(-1).to(inner)
        self.rows.append(torch.cat([inner, outer], 1).float().cpu())

    # ---- which features ----------------------------------------------------------------------------------------------

    def most_influential(self, n: int, visited: Bool[Tensor, " feature"]) -> list[int]:
        """The features without a row that have the largest influence by the rows so far."""
        n_features, n_targets = len(self.sources.features), len(self.targets.targets)
        shares, own = normalized(torch.cat(self.rows)), torch.tensor(self.features, dtype=torch.long)
        total = torch.zeros(shares.shape[1])
        step = torch.cat([self.targets.weights, torch.zeros(len(own))]) @ shares
        for _ in range(len(own) + 1):
            total += step
            if not bool(step.any()):
                break
            step = step[own] @ shares[n_targets:]
        order = total[:n_features].argsort(descending=True, stable=True)
        return order[~visited[order]][:n].tolist()

    def add_most_influential(self, n: int, round_size: int, progress: bool | None) -> None:
        """Adds the rows of n features, in rounds: those with the largest influence on the targets by the rows so far."""
        n_all = len(self.sources.features)
        with progress_bar("attribution graph", n, progress, unit=f"{self.sources.unit}s") as bar:
            if n >= n_all:
                for start in range(0, n_all, self.batch):
                    self.add_features(range(start, min(start + self.batch, n_all)))
                    bar.update(min(self.batch, n_all - start))
                return
            visited = torch.zeros(n_all, dtype=torch.bool)
            while len(self.features) < n:
                some = self.most_influential(min(round_size, n - len(self.features)), visited)
                self.add_features(some)
                visited[some] = True
                bar.update(len(some))

    # ---- the matrix --------------------------------------------------------------------------------------------------

    def matrix(self) -> tuple[Int[Tensor, " feature"], Float[Tensor, "target source"], Float[Tensor, " node"]]:
        """The kept features, the adjacency, and what flows into each node from features that are left out."""
        n_features, n_targets = len(self.sources.features), len(self.targets.targets)
        rows = torch.cat(self.rows)
        kept, order = torch.tensor(self.features, dtype=torch.long).sort()
        rows = torch.cat([rows[n_targets:][order], rows[:n_targets]])
        gone = torch.ones(n_features, dtype=torch.bool)
        gone[kept] = False
        inner, outer = rows[:, :n_features], rows[:, n_features:].clone()
        left_out = inner[:, gone]
        others = left_out.sum(1)
        if self.sources.errors_hold_the_rest:
            places = self._errors_of(gone.nonzero()[:, 0])
            outer.index_add_(1, places, left_out)
            others = torch.zeros_like(others)
        n_middle = outer.shape[1]
        n = len(kept) + n_middle + n_targets
        adjacency, of = torch.zeros(n, n), torch.zeros(n)
        ends = torch.cat([torch.arange(len(kept)), torch.arange(n - n_targets, n)])
        adjacency[ends, : n - n_targets] = torch.cat([inner[:, kept], outer], 1)
        of[ends] = others
        return kept, adjacency, of

    def _errors_of(self, features: Rows) -> Int[Tensor, " feature"]:
        """The error node of the layer and position of each feature."""
        nodes = {tuple(place): node for node, place in enumerate(self.sources.errors.tolist())}
        return torch.tensor(
            [nodes[tuple(place)] for place in self.sources.features[features, :2].tolist()], dtype=torch.long
        )


def reads_at_once(sources: Sources, max_memory: int | str) -> int:
    """How many reads a backward pass may have, by what the gradients and the edges of each take.

    Raises ValueError for a memory that the user chose and that is too small for one.
    """
    frozen = sources.frozen
    sizes = [value[0].numel() for value in (*frozen.given.values(), *frozen.values.values())]
    pattern = max(
        (value[0].numel() for site, value in frozen.constants.items() if site.endswith("hook_pattern")), default=0
    )
    columns = len(sources.features) + len(sources.errors) + frozen.n_pos
    element = frozen.values[FIRST].element_size()
    each = element * (2 * sum(sizes) + 6 * max(sizes) + 2 * pattern) + 8 * columns
    n_bytes = memory_of(max_memory, frozen.tokens.device)
    if n_bytes < each and max_memory != "auto":
        raise ValueError(f"max_memory={n_bytes:,} bytes is too small: the edges of one node take about {each:,}")
    return max(1, min(MOST, n_bytes // each))
