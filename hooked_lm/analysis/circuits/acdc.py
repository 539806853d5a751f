"""ACDC: edges are tried one after the other, from the output to the input, and dropped if the metric hardly changes (Conmy et
al. 2023, arXiv:2304.14997).

Whether an edge is dropped depends on the edges tried before it, so the runs are sequential. But most edges are dropped. So the
next few are tried together, each with all edges before it dropped too: up to the first edge that is kept, these are the same runs
as in the sequential search. The remaining results are discarded.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.paths import feeds
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.progress import progress_bar
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.undisturbed import undisturbed
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import origin

AT_ONCE = 64  # edges tried together, at most
Place = tuple[int, int]  # writer, reader


@undisturbed
def acdc(
    model: Decoder,
    corrupted: Prompts,
    clean: Prompts,
    *,
    threshold: float,
    metric: Metric | None = None,
    ablation: str = "resample",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Circuit:
    """The edges whose loss changes the metric by the threshold or more, each tried in what is left when its turn comes.

    Readers are visited from the logits to the first layer, and the edges of each from the last writer to the first. An edge is
    dropped if without it the metric, on average over prompts, is up by less than the threshold (KL, which counts from the full
    model), or changes by less than that up or down (a metric that was given). The result is that of trying one by one.

    Args:
        threshold: in the units of the metric.
        metric: None for KL(model || circuit) in nats at the last position; see `Runner` for this and the rest.

    Returns a Circuit; its scores are the changes at each edge's turn (0 for edges into what was cut off already). Raises
    ValueError for a threshold that is not positive, and if the metric of a circuit is NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = acdc(model, "The capital of Italy is", "The capital of France is", threshold=1.0)
    >>> 0 < circuit.n_edges < 30
    True
    """
    if not threshold > 0:
        raise ValueError(f"the threshold must be positive, got {threshold}")
    runner = Runner(model, corrupted, clean, metric, ablation, max_memory)
    search = Search(runner, threshold)
    with progress_bar("acdc", runner.n_edges, progress, unit="edges") as bar:
        for n_left in search.steps():
            bar.update(runner.n_edges - n_left - bar.n)
    about = origin(model, method="acdc", threshold=threshold, ablation=ablation, metric=runner.metric_name)
    return Circuit(runner.graph, search.kept, search.changes, about=about)


class Search:
    """A search on its way: `kept` edges, those of them that were tried yet, and the metric of what is left."""

    def __init__(self, runner: Runner, threshold: float) -> None:
        self.runner, self.threshold = runner, threshold
        self.kept: Bool[Tensor, "writer reader"] = runner.graph.is_edge.clone()
        self.changes: Float[Tensor, "writer reader"] = torch.full(self.kept.shape, torch.nan)
        self.now = self._measured(self.kept[None])[0]
        self.inside = feeds(runner.graph)
        self.left = _in_order(runner)

    def steps(self) -> Iterator[int]:
        """Try all edges; yields how many are left to try."""
        n = 4
        while self.left:
            self._drop_unread()
            if some := self.left[:n]:
                n_dropped = self._try(some)
                n = min(AT_ONCE, 2 * n if n_dropped == len(some) else max(2, 2 * n_dropped))
            yield len(self.left)

    def _drop_unread(self) -> None:
        """Drop the next edges as long as the output of their reader cannot reach the logits."""
        while self.left and not self._is_read(self.left[0][1]):
            place = self.left.pop(0)
            self.kept[place], self.changes[place] = False, 0.0

    def _is_read(self, reader: int) -> bool:
        """Whether an edge that is kept reads the output of this reader; all later edges were tried."""
        fed = self.inside[reader]
        return not bool(fed.any()) or bool(self.kept[fed].any())

    def _try(self, some: list[Place]) -> int:
        """Drop these edges up to the first that is missed, which is kept; returns how many were dropped."""
        rows = self.kept.repeat(len(some), 1, 1)
        for i, place in enumerate(some):
            rows[i:, place[0], place[1]] = False
        found = self._measured(rows)
        changes = found - torch.cat([self.now[None], found[:-1]])
        missed = (changes if self.runner.is_kl else changes.abs()) >= self.threshold
        n_dropped = int(missed.int().argmax()) if bool(missed.any()) else len(some)
        known = some[: n_dropped + 1]  # those that were dropped, and the one that was missed
        for place, change in zip(known, changes[: len(known)], strict=True):
            self.changes[place] = change
        if n_dropped:
            self.kept, self.now = rows[n_dropped - 1], found[n_dropped - 1]
        del self.left[: len(known)]
        return n_dropped

    def _measured(self, rows: Bool[Tensor, "row writer reader"]) -> Float[Tensor, " row"]:
        found = self.runner.values(rows).double().mean(1)
        if bool(found.isnan().any()):
            raise ValueError("the metric of a circuit is NaN: edges cannot be told apart by it")
        return found


def _in_order(runner: Runner) -> list[Place]:
    """All edges: readers from the last to the first, of each the writers from the last to the first."""
    n_writers, n_readers = runner.graph.is_edge.shape
    places = [(writer, reader) for reader in reversed(range(n_readers)) for writer in reversed(range(n_writers))]
    return [place for place in places if bool(runner.graph.is_edge[place])]
