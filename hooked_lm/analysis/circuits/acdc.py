"""ACDC: test edges one after the other, from output to input, and drop those that hardly change the metric (Conmy et al. 2023,
arXiv:2304.14997).

Whether an edge is dropped depends on the edges tested before it, so the search is sequential. Because most edges are dropped,
several are tested in one batch, each with all edges before it dropped. Up to the first edge that is kept, these are the
runs of the sequential search. The remaining results are discarded.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.analysis.circuits.paths import feeds
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.renamed import renamed
from hooked_lm.results.scores import provenance

AT_ONCE = 64  # the maximum number of edges tested together
Place = tuple[int, int]  # writer, reader


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
def acdc(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    threshold: float,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Circuit:
    """The edges whose removal changes the metric by the threshold or more, each tested in the circuit that remains at its turn.

    Readers are visited from the logits to the first layer, and the edges of each reader from the last writer to the first. An
    edge is dropped if its removal increases KL(model || circuit), averaged over prompts, by less than the threshold; for any
    other metric, if the absolute change of the mean is less than that. The result equals that of the sequential search.

    Args:
        threshold: in units of the metric.
        metric: None for KL(model || circuit) in nats at the last position. See `Runner` for this and the other arguments.

    Returns a Circuit whose scores are the changes in the metric at each edge's turn (0 for edges whose reader is already cut off
    from the logits). Raises ValueError for a threshold that is not positive, and if the metric of a circuit is NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = acdc(
    ...     model, "The capital of Italy is", "The capital of France is", threshold=1.0
    ... )
    >>> 0 < circuit.n_edges < 30
    True
    """
    if not threshold > 0:
        raise ValueError(f"the threshold must be positive, got {threshold}")
    runner = Runner(model, corrupted, clean, metric, replace_with, max_memory, answers)
    runner.warn_if_close(runner.empty())
    search = Search(runner, threshold)
    with progress_bar("acdc", runner.n_edges, progress, unit="edges") as bar:
        for n_left in search.steps():
            bar.update(runner.n_edges - n_left - bar.n)
    about = provenance(model, method="acdc", threshold=threshold, replace_with=replace_with, metric=runner.metric_name)
    return Circuit(runner.graph, search.kept, search.changes, about={**about, SEEN: runner.prompts})


class Search:
    """The state of a search: the edges `kept` so far, those `left` to test, and the metric `now` of the kept edges."""

    def __init__(self, runner: Runner, threshold: float) -> None:
        self.runner, self.threshold = runner, threshold
        self.kept: Bool[Tensor, "writer reader"] = runner.graph.is_edge.clone()
        self.changes: Float[Tensor, "writer reader"] = torch.full(self.kept.shape, torch.nan)
        self.now = self._measured(self.kept[None])[0]
        self.inside = feeds(runner.graph)
        self.left = _in_order(runner)

    def steps(self) -> Iterator[int]:
        """Test all edges; yields how many are left."""
        n = 4
        while self.left:
            self._drop_unread()
            if some := self.left[:n]:
                n_dropped = self._try(some)
                n = min(AT_ONCE, 2 * n if n_dropped == len(some) else max(2, 2 * n_dropped))
            yield len(self.left)

    def _drop_unread(self) -> None:
        """Drop the next edges while the output of their reader cannot reach the logits."""
        while self.left and not self._is_read(self.left[0][1]):
            place = self.left.pop(0)
            self.kept[place], self.changes[place] = False, 0.0

    def _is_read(self, reader: int) -> bool:
        """Whether a kept edge reads the output of this reader; all later edges have been tested."""
        fed = self.inside[reader]
        return not bool(fed.any()) or bool(self.kept[fed].any())

    def _try(self, some: list[Place]) -> int:
        """Drop these edges up to the first that reaches the threshold, which is kept; returns how many were dropped."""
        rows = self.kept.repeat(len(some), 1, 1)
        for i, place in enumerate(some):
            rows[i:, place[0], place[1]] = False
        found = self._measured(rows)
        changes = found - torch.cat([self.now[None], found[:-1]])
        missed = (changes if self.runner.is_kl else changes.abs()) >= self.threshold
        n_dropped = int(missed.int().argmax()) if bool(missed.any()) else len(some)
        known = some[: n_dropped + 1]  # the dropped edges, and the one that is kept
        for place, change in zip(known, changes[: len(known)], strict=True):
            self.changes[place] = change
        if n_dropped:
            self.kept, self.now = rows[n_dropped - 1], found[n_dropped - 1]
        del self.left[: len(known)]
        return n_dropped

    def _measured(self, rows: Bool[Tensor, "row writer reader"]) -> Float[Tensor, " row"]:
        found = self.runner.values(rows, progress=False).double().mean(1)
        if bool(found.isnan().any()):
            raise ValueError("the metric of a circuit is NaN: it cannot rank edges")
        return found


def _in_order(runner: Runner) -> list[Place]:
    """All edges: readers from last to first, and for each reader the writers from last to first."""
    n_writers, n_readers = runner.graph.is_edge.shape
    places = [(writer, reader) for reader in reversed(range(n_readers)) for writer in reversed(range(n_writers))]
    return [place for place in places if bool(runner.graph.is_edge[place])]
