"""`leaderboard`: methods that rank the edges of models, compared on tasks."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import agreement
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.constants import mean_constants, optimal_constants
from hooked_lm.analysis.circuits.run import REPLACEMENTS, Runner
from hooked_lm.analysis.rankings.areas import SHARES, check_shares
from hooked_lm.analysis.rankings.board import Leaderboard
from hooked_lm.analysis.rankings.methods import EXACT, RANDOM, Method, NamedMethod, Ranking, methods_of
from hooked_lm.analysis.rankings.selection import check_selection, selected
from hooked_lm.analysis.rankings.task_rankings import AGREEMENT, OF_TRUTH, UNTRAINED, TaskRankings
from hooked_lm.analysis.rankings.tasks import CircuitTask, HasCircuitTask
from hooked_lm.analysis.rankings.truth import auroc, average_precision
from hooked_lm.callers import warn_caller
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.study import SwapWarning
from hooked_lm.models.twins import twin_of
from hooked_lm.progress import progress_bar
from hooked_lm.results.scores import provenance

CONSTANTS = ("constant", "optimal")  # what replaces values, besides the words of `Runner`


@keeps_torch_state
def leaderboard(
    tasks: HasCircuitTask | Iterable[HasCircuitTask],
    methods: Sequence[str] | Mapping[str, Method] | None = None,
    *,
    untrained: bool = True,
    replace_with: str = "corrupted",
    selection: str = "top",
    shares: Sequence[float] = SHARES,
    steps: int = 5,
    seed: int = 0,
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Leaderboard:
    """Compare methods that rank the edges of a model: by the circuits of the best edges, by exact patching, by a known truth.

    Each method sees the pairs of a task. Circuits of several sizes are built from its ranking, and run on the held-out pairs.
    CPR and CMD are those of MIB's circuit track (Mueller et al. 2025, arXiv:2504.13151), over the share of edges. CMD is the area
    between 1 and the curve of faithfulness, the largest scores first: how far circuits are from the model. CPR is the area under
    the curve with the edges first without which the metric falls most: what the best circuits reach. That may be more than 1, as
    edges that lower the metric come last.

    Args:
        tasks: a `CircuitTask`, or several: those of the bundled model are `demo.tasks.tasks()`.
        methods: names: "exact" (`patch_edges`), the methods of `attribute_edges`, "random", and of the searches of `discover`
            those whose scores rank all edges; None: all but the searches, which take long. Or functions by name, of a model and
            pairs: they return measured effects, a Circuit with scores, or a tensor [writer, reader] of effects of ablation.
        untrained: whether each method also ranks the edges of the model's untrained twin. Such a ranking, used for the model
            itself, is the floor of its method: it knows which edges carry what differs between the prompts, and no more.
        replace_with: what edges outside a circuit carry, and what the effects of edges are measured by: "corrupted", "mean" or
            "zero", as for `Runner`. Or constants, from the pairs that methods see (methods measure effects by "mean" then):
            "constant", means over the corrupted prompts and positions (`circuits.mean_constants`; MIB's are of clean texts);
            "optimal", learnt ones (`circuits.optimal_constants`, with as many steps as its default).
        selection: how the circuit of a number of edges is chosen; "top" as in MIB (see `selected`).
        shares: the shares of all edges, rounded down to numbers of edges, up to 1.
        steps: those of the methods that integrate gradients.
        seed: seed of the random ranking, and of the untrained weights.
        max_memory, progress: as for `patching.sweep`; the bar counts rankings.

    Returns a Leaderboard. Agreement with exact patching is known if "exact" is among the methods, areas under the ROC curve for
    tasks with a truth. Warns of methods whose scores are all equal, and as `evaluate`. Raises ValueError for no tasks, two of one
    name, unknown methods and selections, and a metric that is the same in the full model and without edges.

    >>> from hooked_lm.demo.tasks import tasks
    >>> board = leaderboard(
    ...     tasks(names=["agreement"], n=8), ["eap", "random"], untrained=False
    ... )
    >>> board.to_dataframe()["method"].tolist()
    ['eap', 'random']
    """
    given = [tasks] if not isinstance(tasks, Iterable) else list(tasks)
    named = [task if isinstance(task, CircuitTask) else CircuitTask.of(task) for task in given]
    if not named:
        raise ValueError("there are no tasks: give CircuitTask(name, model, pairs), or demo.tasks.tasks()")
    if len({task.name for task in named}) < len(named):
        raise ValueError(f"tasks have different names, got {', '.join(task.name for task in named)}")
    measured_by = "mean" if replace_with in CONSTANTS else replace_with
    if replace_with not in (*REPLACEMENTS, *CONSTANTS):
        words = ", ".join(map(repr, (*REPLACEMENTS, *CONSTANTS)))
        raise ValueError(f"replace_with must be one of {words}, got {replace_with!r}")
    check_selection(selection)
    check_shares(shares)
    settings = {"replace_with": measured_by, "steps": steps, "seed": seed, "max_memory": max_memory}
    chosen = methods_of(methods, settings)
    twins = [method for method in chosen if method.name != RANDOM] if untrained else []
    how = _How(replace_with, selection, shares, seed, max_memory)
    found = []
    with progress_bar("rankings", len(named) * (len(chosen) + len(twins)), progress, unit="rankings") as bar:
        for task in named:
            rankings = how.rankings(task, chosen, twins, bar.update)
            found.append(how.judged(task, rankings))
    return Leaderboard(tuple(found))


class _How:
    """How rankings are made and judged."""

    def __init__(
        self,
        replace_with: str,
        selection: str,
        shares: Sequence[float],
        seed: int,
        max_memory: int | str,
    ) -> None:
        self.replace_with, self.selection = replace_with, selection
        self.shares, self.seed, self.max_memory = list(shares), seed, max_memory

    def rankings(
        self,
        task: CircuitTask,
        methods: Sequence[NamedMethod],
        twins: Sequence[NamedMethod],
        done: Callable[[], object],
    ) -> dict[str, Ranking]:
        """The ranking of each method by the pairs that are searched, of the model and of its untrained twin."""
        found = {}
        for method in methods:
            found[method.name] = method.ranking(task.model, task.pairs)
            done()
        if not twins:
            return found
        twin = decoder(twin_of(task.model, self.seed), "edges are those of")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* hardly differ")  # as an untrained model does no task
            warnings.simplefilter("ignore", SwapWarning)
            for method in twins:
                found[f"{method.name}{UNTRAINED}"] = method.ranking(twin, task.pairs)
                done()
        return found

    def _runner(self, task: CircuitTask) -> Runner:
        """Runs circuits on the held-out pairs."""
        assert task.held_out is not None, "every CircuitTask has some"
        if self.replace_with not in CONSTANTS:
            return Runner(task.model, task.held_out, replace_with=self.replace_with, max_memory=self.max_memory)
        found = (
            mean_constants(task.model, task.pairs, max_memory=self.max_memory)
            if self.replace_with == CONSTANTS[0]
            else optimal_constants(task.model, task.pairs, max_memory=self.max_memory, seed=self.seed, progress=False)
        )
        return Runner(task.model, task.held_out, max_memory=self.max_memory).ablating(found)

    def judged(self, task: CircuitTask, rankings: Mapping[str, Ranking]) -> TaskRankings:
        """The circuits of all rankings on the held-out pairs, and the other numbers."""
        runner = self._runner(task)
        graph = runner.graph
        sizes = [int(share * graph.n_edges) for share in self.shares]
        circuits = torch.stack(
            [
                selected(graph, ranking.scores, n, self.selection, absolute or not ranking.has_sign)
                for absolute in (True, False)
                for ranking in rankings.values()
                for n in sizes
            ]
        )
        nothing = torch.zeros_like(circuits[:1])
        different, which = torch.cat([circuits, nothing]).flatten(1).unique(dim=0, return_inverse=True)
        values = runner.values(different.view(-1, *graph.is_edge.shape), progress=False)[which]
        values, empty = values[:-1], values[-1]
        runner.check_scale(empty)
        shape = (2, len(rankings), len(sizes))
        by_size, by_sign = values.unflatten(0, shape)
        settings = {"replace_with": self.replace_with, "selection": self.selection, "seed": self.seed}
        settings |= {"n_pairs": len(task.pairs), "metric": runner.metric_name}
        return TaskRankings(
            task.name,
            list(rankings),
            self.shares,
            by_size,
            by_sign,
            runner.full,
            empty,
            circuits.flatten(1).sum(1).view(shape)[0].tolist(),
            _numbers(task, graph, rankings),
            about=provenance(task.model, **settings),
        )


def _numbers(task: CircuitTask, graph: Graph, rankings: Mapping[str, Ranking]) -> dict[str, list[float]]:
    """The agreement with exact patching, the areas for the truth, and the cost of each method."""
    exact = rankings[EXACT].scores[graph.is_edge] if EXACT in rankings else None
    truth = None if task.truth is None else task.truth.edges[graph.is_edge]
    found: dict[str, list[float]] = {name: [] for name in (*AGREEMENT, *OF_TRUTH, "passes", "seconds")}
    for name, ranking in rankings.items():
        scores = ranking.scores[graph.is_edge]
        are_equal = len(scores.nan_to_num(nan=math.inf).unique()) < 2
        if are_equal:
            warn_caller(
                f"{name} ranks nothing on task {task.name}: all {len(scores)} scores are equal, and its circuits are of edges in "
                "the order of the graph"
            )
        agrees = agreement(scores, exact) if exact is not None and ranking.is_effect else {}
        of_truth = _of_truth(name, task.name, scores.abs(), None if are_equal else truth)
        for column in AGREEMENT:
            found[column].append(float(agrees.get(column, math.nan)))
        for column, value in zip(OF_TRUTH, of_truth, strict=True):
            found[column].append(value)
        found["passes"].append(ranking.passes)
        found["seconds"].append(ranking.seconds)
    return found


def _of_truth(
    method: str, task: str, scores: Float[Tensor, " edge"], truth: Bool[Tensor, " edge"] | None
) -> tuple[float, float]:
    """AUROC and average precision; NaN without a truth, and with a warning where they are undefined."""
    if truth is None:
        return math.nan, math.nan
    try:
        return auroc(scores, truth), average_precision(scores, truth)
    except ValueError as error:
        warn_caller(f"{method} on task {task}: {error}")
        return math.nan, math.nan
