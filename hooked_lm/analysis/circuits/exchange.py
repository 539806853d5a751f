"""Search by exchanges: drop edges so that the errors of the prompts cancel, then exchange edges while this makes circuits better.

Rankings and pruning sort edges by the size of their effects on the mean metric. Here the effects on each prompt are added up,
with their signs: a circuit may lose an edge that raises the metric together with one that lowers it. Effects are estimated by
the gradients of each prompt's metric with respect to the gates, and circuits are measured before they replace others.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric, check_grad_mode
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.analysis.circuits.paths import on_paths
from hooked_lm.analysis.circuits.prune import check_size
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.progress import progress_bar
from hooked_lm.results.scores import provenance

AJAR = 0.15  # the gates of edges outside of a circuit, so that two edges of one new path have a gradient
WIDTHS = (1, 2, 4, 8, 16)  # edges that are exchanged at once
N_SINGLE = 8  # exchanges of one edge that a round measures
N_ENDS = 128  # edges inside and outside of a circuit of which these are chosen
GAIN = 1e-4  # of the error: the least for which edges are exchanged
Edges = Bool[Tensor, "writer reader"]
Chosen = Bool[Tensor, " edge"]


@keeps_torch_state
def exchange(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    n_edges: int,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    share: float = 0.1,
    steps: int = 2,
    rounds: int = 30,
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Circuit:
    """Drop edges in rounds until `n_edges` are left, then exchange edges while the error becomes less.

    The error of a circuit is the mean square of what its metric misses of the full model's, over prompts, plus the square of the
    mean, so that prompts do not make up for each other; both in units of the difference between full model and empty circuit.

    Each round of dropping estimates the effects of all edges on all prompts, and drops one edge after the other: that whose
    effects, added to those of the edges dropped before, leave the least error. Then each round of exchanges measures circuits
    with one to 16 edges exchanged, as the estimates suggest, and takes the best if it is better. The rest is ordered by further
    dropping: of the scores, the largest k are a circuit of k edges.

    Args:
        n_edges: the maximum number of edges of the result.
        share: the fraction of the remaining edges that a round drops.
        steps: gradients per round of dropping, at gates from 1/steps to 1; 1 is the gradient in the current circuit.
        rounds: the maximum number of rounds of exchanges; 0 for none.

    Returns a Circuit. The score of an edge is the share of edges that were dropped before it. `about["errors"]` are the errors
    of the circuit before and after the exchanges, on the prompts of the search. See `Runner` for the other arguments. Raises
    ValueError for numbers out of range, for a metric without a gradient or that is the same in the full model and the empty
    circuit, and for gradients that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = exchange(
    ...     model,
    ...     "Mary and John left, Mary",
    ...     "Mary and John left, John",
    ...     n_edges=60,
    ...     share=0.5,
    ...     rounds=1,
    ... )
    >>> before, after = circuit.about["errors"]
    >>> circuit.n_edges <= 60, after <= before
    (True, True)
    """
    check_size(n_edges)
    if not 0 < share < 1:
        raise ValueError(f"the share of edges that a round drops must be between 0 and 1, got {share}")
    if steps < 1 or rounds < 0:
        raise ValueError(f"there must be one step at least, and no negative rounds; got steps={steps}, rounds={rounds}")
    check_grad_mode("the search by exchanges")
    runner = Runner(model, corrupted, clean, metric, replace_with, max_memory, answers)
    if runner.is_kl and steps == 1:
        raise ValueError("KL(model || circuit) has no gradient in the full model, where it is least: take more steps")
    search = _Search(runner, share, steps)
    with progress_bar("exchange", max(runner.n_edges - n_edges, 0) + rounds, progress, unit="steps") as bar:
        for n_dropped in search.drop_to(n_edges):
            bar.update(n_dropped)
        before = search.error
        for _ in range(rounds):
            if not search.exchange(n_edges):
                break
            bar.update()
        kept, after = search.left, search.error
        for _ in search.drop_to(0):
            pass
    settings = {"n_edges": n_edges, "share": share, "steps": steps, "rounds": rounds, "metric": runner.metric_name}
    about = provenance(model, method="exchange", replace_with=replace_with, **settings)
    return Circuit(
        runner.graph,
        _matrix(runner.graph.is_edge, kept),
        search.scores(),
        about={**about, "errors": [before, after], SEEN: runner.prompts},
    )


def _matrix(is_edge: Edges, numbers: Shaped[Tensor, " edge"]) -> Shaped[Tensor, "writer reader"]:
    """A matrix with one entry for each edge of the graph, and zeros."""
    return numbers.new_zeros(is_edge.shape).masked_scatter(is_edge, numbers)


class _Search:
    """The edges that are `left`, what their circuit misses on each prompt, and the order in which edges were dropped."""

    def __init__(self, runner: Runner, share: float, steps: int) -> None:
        self.runner, self.share, self.steps = runner, share, steps
        empty = runner.empty()
        runner.warn_if_close(empty)
        self.span = float((runner.full.double() - empty.double()).abs().mean())
        if not self.span > 1e-6:
            raise ValueError("the metric does not tell the full model from one without edges: there is nothing to keep")
        self.left: Chosen = torch.ones(runner.n_edges, dtype=torch.bool)
        self.missed = self._missed(self.left[None])[0]
        self.dropped: list[int] = []

    @property
    def error(self) -> float:
        return float(self.missed.square().sum())

    def scores(self) -> Float[Tensor, "writer reader"]:
        """The share of edges that were dropped before each, with NaN for what is no edge; an edge may come back, and counts by
        the last time."""
        last = dict.fromkeys(reversed(self.dropped))
        order = [*reversed(last)]
        scores = torch.ones(self.runner.n_edges)
        scores[order] = torch.arange(len(order)) / self.runner.n_edges
        return torch.full(self.runner.graph.is_edge.shape, torch.nan).masked_scatter(self.runner.graph.is_edge, scores)

    def drop_to(self, n_edges: int) -> Iterator[int]:
        """Drop edges in rounds until at most so many are left; yields how many a round dropped."""
        while (n := int(self.left.sum())) > n_edges:
            effects = self._effects([self.left * ((step + 1) / self.steps) for step in range(self.steps)])
            n_dropped = max(1, min(int(n * self.share), n - n_edges))
            gone = _dropped(self.missed, effects, self.left, n_dropped)
            after = self.left.clone()
            after[gone] = False
            after = self._on_paths(after)
            idle = (self.left & ~after).nonzero()[:, 0].tolist()
            self.dropped += [*gone, *(edge for edge in idle if edge not in set(gone))]
            self.left, self.missed = after, self._missed(after[None])[0]
            yield n - int(after.sum())

    def exchange(self, n_edges: int) -> bool:
        """Exchange the edges that make the error least, as measured; whether it became less."""
        if n_edges == 0:
            return False
        found: list[Chosen] = []
        for ajar in (0.0, AJAR):
            effects = self._effects([torch.where(self.left, 1.0, ajar)])
            found += [self._exchanged(effects, width, n_edges) for width in WIDTHS if width <= n_edges]
            found += self._of_one(effects, n_edges)
        circuits = torch.stack([self._on_paths(each) for each in found]).unique(dim=0)
        missed = self._missed(circuits)
        best = int(missed.square().sum(1).argmin())
        if not float(missed[best].square().sum()) < (1 - GAIN) * self.error:
            return False
        self.dropped += (self.left & ~circuits[best]).nonzero()[:, 0].tolist()
        self.left, self.missed = circuits[best], missed[best]
        return True

    def _on_paths(self, chosen: Chosen) -> Chosen:
        """Those of the edges that are on paths from input to logits."""
        graph = self.runner.graph
        return on_paths(graph, _matrix(graph.is_edge, chosen))[graph.is_edge]

    def _exchanged(self, effects: Float[Tensor, "number edge"], width: int, n_edges: int) -> Chosen:
        """The circuit after adding so many edges, and dropping what is too many."""
        new = _dropped(self.missed, -effects, ~self.left, min(width, int((~self.left).sum())))
        after = self.left.clone()
        after[new] = True
        expected = self.missed + effects[:, new].sum(1)
        after[_dropped(expected, effects, self.left, max(0, int(after.sum()) - n_edges))] = False
        return after

    def _of_one(self, effects: Float[Tensor, "number edge"], n_edges: int) -> list[Chosen]:
        """The circuits after the exchanges of one edge that leave the least error by these effects."""
        inside = _least(_growth(self.missed, -effects).masked_fill(~self.left, torch.inf), N_ENDS)
        outside = _least(_growth(self.missed, effects).masked_fill(self.left, torch.inf), N_ENDS)
        changes = effects[:, None, outside] - effects[:, inside, None]
        errors = _growth(self.missed, changes.flatten(1))
        found = []
        for place in _least(errors, N_SINGLE).tolist():
            after = self.left.clone()
            after[outside[place % len(outside)]] = True
            if int(after.sum()) > n_edges:
                after[inside[place // len(outside)]] = False
            found.append(after)
        return found

    def _effects(self, gates: list[Tensor]) -> Float[Tensor, "number edge"]:
        """What each edge adds to the metric of each prompt, by the mean gradient at these gates; the last row is of the mean."""
        is_edge = self.runner.graph.is_edge
        each = [self.runner.gradients(_matrix(is_edge, gate).float()).cpu()[:, is_edge] for gate in gates]
        return self._weighted(torch.stack(each).mean(0))

    def _missed(self, circuits: Bool[Tensor, "row edge"]) -> Float[Tensor, "row number"]:
        """What each circuit has too much of the metric of each prompt, and of the mean."""
        rows = torch.stack([_matrix(self.runner.graph.is_edge, each) for each in circuits])
        found = self.runner.values(rows, progress=False) - self.runner.full
        if bool(found.isnan().any()):
            raise ValueError("the metric of a circuit is NaN: it cannot be compared")
        return self._weighted(found.T).T

    def _weighted(self, numbers: Float[Tensor, "prompt other"]) -> Float[Tensor, "number other"]:
        """Numbers of each prompt and of their mean, whose squares sum to those of `error`."""
        own = numbers / (self.span * len(numbers) ** 0.5)
        return torch.cat([own, numbers.mean(0, keepdim=True) / self.span])


def _least(numbers: Float[Tensor, " number"], n: int) -> Int[Tensor, " place"]:
    """The places of the least finite numbers, at most `n`."""
    return numbers.argsort()[: min(n, int(numbers.isfinite().sum()))]


def _growth(missed: Float[Tensor, " number"], changes: Float[Tensor, "number edge"]) -> Float[Tensor, " edge"]:
    """How much the error grows by each change; what an estimate may miss counts as its own size."""
    return 2 * changes.square().sum(0) + 2 * (missed @ changes)


def _dropped(
    missed: Float[Tensor, " number"], effects: Float[Tensor, "number edge"], among: Chosen, n: int
) -> list[int]:
    """The edges that leave the least error, one after the other, in their order."""
    found: list[int] = []
    among = among.clone()
    for _ in range(n):
        edge = int(_growth(missed, -effects).masked_fill(~among, torch.inf).argmin())
        found.append(edge)
        among[edge] = False
        missed = missed - effects[:, edge]
    return found
