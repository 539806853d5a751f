"""Evaluation of circuits: faithfulness, completeness and minimality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.discover import scores_of
from hooked_lm.analysis.circuits.held_out import JUDGED, MeasuredPairs, seen_by
from hooked_lm.analysis.circuits.random_edges import random_edges
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.analysis.circuits.top import largest
from hooked_lm.callers import warn_caller
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import lazy_import
from hooked_lm.models.decoder import Decoder
from hooked_lm.renamed import renamed
from hooked_lm.results.bootstrap import bootstrap, warn_if_one_sided
from hooked_lm.results.control import RANDOM_EDGES, Control
from hooked_lm.results.groups import by_group
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular, with_values

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of all edges at which `evaluate` measures a ranking of edges, unless it is given `sizes`."""
CIRCUIT, COMPLEMENT, RANDOM = "circuit", "complement", "random"
RANGE = "random edges (range of {} draws)"
LEVELS = {"full model": 1.0, "no edges": 0.0}  # marked in figures
UPWARDS = {"no edges": 0.0, "full model": 1.0}  # for bars, which start from the first
WITHOUT = "completeness (without the circuit)"
TITLE = "Faithfulness of circuits"
Given = Circuit | Sequence[Circuit] | Mapping[str, Circuit] | SweepResult


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Tabular, Scores):
    """The metric of circuits and their complements for each prompt, with the full model, the empty circuit and random circuits
    as baselines.

    Args:
        values: the metric, [2, circuit, prompt]: of each circuit, and of its complement, the model without the circuit's edges.
        axes: "of" ("circuit", "complement") and "circuit" (numbers of edges, or names).
        full, empty: the metric of the model, and of the circuit without edges, [prompt].
        n_edges: the number of edges of each circuit; `n_all` that of the model.
        random: the metric of random circuits with as many edges, [draw, circuit, prompt], or None. NaN where none was found.

    With m the mean of the metric over prompts, as in Marks et al. 2024 (arXiv:2403.19647):
    *faithfulness* is (m(circuit) - m(empty)) / (m(full) - m(empty)), 1 if the circuit recovers the full metric;
    *completeness* is the same for the complement, 0 if the complement recovers nothing.

    `plot` draws faithfulness with its interval, completeness, and the faithfulness of random edges, from the lowest to the
    highest draw, against the number of edges on a logarithmic axis. The full model is at 1, the empty circuit at 0. Circuits
    with names have bars of their faithfulness, and a single circuit a bar for each of these numbers.
    """

    full: Float[Tensor, "..."]
    empty: Float[Tensor, "..."]
    n_edges: Sequence[int]
    n_all: int
    random: Float[Tensor, "..."] | None = None
    GRID: ClassVar[tuple[str, ...]] = ("values", "random")

    def _check(self) -> None:
        if list(self.axes) != ["of", CIRCUIT] or len(self.n_edges) != len(self.axes[CIRCUIT]):
            raise ValueError("an evaluation has the axes of and circuit, and a number of edges for each circuit")
        for name, part in (("full", self.full), ("empty", self.empty)):
            if list(part.shape) != [self.n_prompts]:
                raise ValueError(f"the {name} baseline must be [{self.n_prompts}], got {list(part.shape)}")
        if self.random is not None and self.random.shape[1:] != self.values.shape[1:]:
            raise ValueError(f"random must be [draw, {list(self.values.shape[1:])}], got {list(self.random.shape)}")
        object.__setattr__(self, "n_edges", list(self.n_edges))

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any]:
        if name != CIRCUIT or isinstance(index, int):
            raise ValueError(
                f"parts of an evaluation keep their axes: select(circuit=[...]), or use .values; got {name!r}"
            )
        return {"n_edges": [self.n_edges[place] for place in index]}

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def normalized(self) -> "Evaluation":
        """The values, rescaled so that the mean of the empty circuit is 0 and that of the full model 1. The scale is treated as
        exact, so intervals show only the spread of the values."""
        low, high = self.empty.double().mean(), self.full.double().mean()

        def scaled(values: Tensor) -> Tensor:
            return ((values.double() - low) / (high - low)).float()

        return replace(self, **self._of_cells(scaled), full=scaled(self.full), empty=scaled(self.empty))

    @property
    def faithfulness(self) -> Float[Tensor, " circuit"]:
        """The faithfulness of each circuit; 1 is best."""
        return self._recovered()[0].float()

    @property
    def completeness(self) -> Float[Tensor, " circuit"]:
        """The faithfulness of each circuit's complement; 0 is best."""
        return self._recovered()[1].float()

    def _recovered(self) -> Float[Tensor, "2 circuit"]:
        """Faithfulness and completeness, in fp64: ratios of means."""
        empty, full = self.empty.double(), self.full.double()
        return (self.values.double() - empty).mean(-1) / (full - empty).mean()

    @property
    def random_faithfulness(self) -> Float[Tensor, "draw circuit"] | None:
        """The faithfulness of each draw of random edges, as many as the circuit has; None if none were drawn."""
        random = self.normalized().random
        return None if random is None else random.mean(-1)

    @property
    def control(self) -> Control | None:
        """The mean faithfulness of the circuits beside that of as many random edges, in the mean of the draws; None without any
        random circuit that is not all edges or none."""
        random = self.random_faithfulness
        if random is None:
            return None
        by_chance, own = random.nanmean(0), self.faithfulness
        some = ~by_chance.isnan() & (self.shares > 0) & (self.shares < 1)
        if not bool(some.any()):
            return None
        means = own[some].mean().item(), by_chance[some].mean().item()
        return Control.compared(RANDOM_EDGES, "faithfulness", *means, "which edges these are")

    @property
    def shares(self) -> Float[Tensor, " circuit"]:
        """The number of edges of each circuit as a fraction of all edges."""
        return torch.tensor(self.n_edges) / self.n_all

    @property
    def area(self) -> float:
        """The mean of faithfulness over the fraction of edges: the area under the curve by the trapezoidal rule, divided by its
        width. NaN if all circuits have the same size."""
        order = self.shares.argsort(stable=True)
        x, y = self.shares[order].double(), self.faithfulness[order].double()
        width = float(x[-1] - x[0])
        return float(torch.trapezoid(y, x)) / width if width > 0 else float("nan")

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """A row for each circuit: `circuit`, `edges`, `share`, `value` (the mean of the metric), `faithfulness` with the
        interval of this ratio of means (`low`, `high`), `completeness`, and the faithfulness of random edges: `random`, the
        mean of the draws, and the lowest and highest draw, `random_low` and `random_high`.

        With `per_prompt`, a row for each circuit, complement and prompt: `of`, `circuit`, `prompt`, `value`.
        """
        if per_prompt:
            return self._by_prompt()
        low, high = self._interval_of_ratio(level)
        table = pd.DataFrame({"circuit": list(self.axes[CIRCUIT]), "edges": self.n_edges, "share": self.shares.numpy()})
        columns = {"value": self.mean[0], "faithfulness": self.faithfulness, **with_values(low=low, high=high)}
        columns["completeness"] = self.completeness
        if (random := self.random_faithfulness) is not None:
            columns |= {RANDOM: random.mean(0), f"{RANDOM}_low": random.amin(0), f"{RANDOM}_high": random.amax(0)}
        return table.assign(**{name: column.numpy() for name, column in columns.items()})

    def _own_figure(self, title: str, show_values: bool) -> "go.Figure":
        """What the class says."""
        from hooked_lm import viz

        if len(self.n_edges) == 1:
            return self._bars_of_one(title)
        if any(isinstance(label, str) for label in self.axes[CIRCUIT]):
            return self._bars(title)
        table = self.to_dataframe()
        table = table.iloc[table["edges"].argsort(kind="stable")]
        columns = {name: torch.tensor(table[name].to_numpy(), dtype=torch.float32) for name in table.columns[1:]}
        names = {"faithfulness": "faithfulness", "completeness": WITHOUT}
        intervals = {"faithfulness": (columns["low"], columns["high"])} if "low" in columns else {}
        if self.random is not None:
            names[RANDOM] = RANGE.format(len(self.random))
            intervals[names[RANDOM]] = columns[f"{RANDOM}_low"], columns[f"{RANDOM}_high"]
        return viz.lines(
            table["edges"].tolist(),
            {shown: columns[name] for name, shown in names.items()},
            intervals,
            title or self._title,
            f"edges of {self.n_all:,}, logarithmic",
            self._y_title,
            show_values,
            LEVELS,
            self._of_each,
            logarithmic=True,
            references=[shown for name, shown in names.items() if name == RANDOM],
        )

    def _bars(self, title: str) -> "go.Figure":
        """The faithfulness of each circuit, by name."""
        from hooked_lm import viz
        from hooked_lm.viz.numbers import rounded

        low, high = self._interval_of_ratio()
        labels = [f"{name} ({n} edges)" for name, n in zip(self.axes[CIRCUIT], self.n_edges, strict=True)]
        random = self.random_faithfulness
        known = torch.empty(0) if random is None else random[~random.isnan()]
        ends = (rounded(known.min()), rounded(known.max())) if len(known) else ()
        by_chance = f"as many random edges: {' to '.join(ends)}" if ends else ""
        interval = (low, high) if self.n_prompts > 1 else None
        said = "; ".join(filter(None, [by_chance, self._of_each]))
        return viz.bars(
            self.faithfulness, labels, interval, title or self._title, "", self._y_title, UPWARDS, subtitle=said
        )

    def _bars_of_one(self, title: str) -> "go.Figure":
        """The faithfulness of one circuit, its completeness, and the faithfulness of random edges."""
        from hooked_lm import viz

        bars = {
            "faithfulness": (self.faithfulness, *self._interval_of_ratio()),
            "completeness": (self.completeness, *self._interval_of_ratio(of=1)),
        }
        if (random := self.random_faithfulness) is not None:
            bars[RANGE.format(len(random))] = random.nanmean(0), random.amin(0), random.amax(0)
        values, low, high = torch.stack([torch.stack(bar) for bar in bars.values()], 1)[..., 0]
        [name], [n] = self.axes[CIRCUIT], self.n_edges
        of = f"{name}, " if isinstance(name, str) else ""
        title = title or f"Faithfulness of one circuit: {of}{n:,} of {self.n_all:,} edges{self._judged_on}"
        interval, shown = (low, high) if self.n_prompts > 1 else None, list(bars)
        return viz.bars(values, shown, interval, title, "", self._y_title, UPWARDS, self._of_each, references=shown[2:])

    def _interval_of_ratio(
        self, level: float = 0.95, of: int = 0
    ) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """The confidence intervals of faithfulness, or of completeness (`of` 1), which are ratios of means: those of the
        linearised ratio (Cochran 1977, 6.3). The full model and the empty circuit have none: they are 1 and 0 for any
        prompts."""
        values, empty, full = (part.double() for part in (self.values[of], self.empty, self.full))
        difference = (full - empty).mean()
        share = self._recovered()[of]
        residuals = (values - empty - share[:, None] * (full - empty)) / difference
        measure = str(self.about.get("metric", "")).replace("_", " ")
        warn_if_one_sided(by_group(self.values[of], self.groups), measure)
        low, high = bootstrap(by_group(residuals.float(), self.groups), level, measure=measure)
        return (share + low.clamp(max=0.0)).float(), (share + high.clamp(min=0.0)).float()  # around 0, up to rounding

    @property
    def _title(self) -> str:
        return f"{TITLE}{self._judged_on}"

    @property
    def _judged_on(self) -> str:
        return f", on {self.about[JUDGED]}" if JUDGED in self.about else ""

    @property
    def _y_title(self) -> str:
        metric = self.about.get("metric")
        return f"share of {metric} recovered" if metric else "share recovered"

    def _summary(self) -> list[str]:
        if len(self.n_edges) > 8:
            return [f"area {self.area:.3f}{self._judged_on}", *self._as_well()]
        random, (low, high) = self.random_faithfulness, self._interval_of_ratio()
        ends = [f" ({a:.2f} to {b:.2f})" for a, b in zip(_rounded(low), _rounded(high), strict=True)]
        ends = ends if self.n_prompts > 1 else [""] * len(ends)
        shown = [
            f"{value:.2f}{interval} with {n} edges"
            for value, interval, n in zip(_rounded(self.faithfulness), ends, self.n_edges, strict=True)
        ]
        if random is not None:
            shown = [
                f"{one} (random {by_chance:.2f})"
                for one, by_chance in zip(shown, _rounded(random.mean(0)), strict=True)
            ]
        return [f"faithfulness {', '.join(shown)}{self._judged_on}", *self._as_well()]

    def _as_well(self) -> list[str]:
        """That the control does as well, if it does."""
        return [repr(self.control)] if self.control is not None and self.control.does_as_well else []


def _rounded(values: Float[Tensor, " circuit"]) -> list[float]:
    """The numbers with two digits, without a negative zero."""
    return [round(value, 2) + 0.0 for value in values.tolist()]


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
@reads_chats
def evaluate(
    model: Decoder,
    circuits: Given,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    sizes: Sequence[int | float] | None = None,
    replace_with: str = "corrupted",
    n_random: int = 5,
    seed: int = 0,
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Evaluation:
    """Faithfulness and completeness of circuits, computed in one batched run.

    A circuit of `discover` knows the prompts of its search. Those are left out, as if only the others were given; if there
    are no others, the evaluation is of the same prompts as the search, and says so (`about["judged_on"]`, the repr and the
    figure). There the intervals are too narrow and too high: a search finds the peculiarities of its prompts, too.

    Args:
        circuits: a Circuit, a list or a mapping of names to circuits; or effects of edges (an Attribution or a SweepResult with
            the axes writer and reader), or one Circuit with scores together with `sizes`: then circuits of several sizes are
            built from the scores.
        sizes: numbers of edges, or floats for fractions of all edges; None: 0, 1, 2, 5, 10, 20, 50 and 100 % of the edges. Each
            circuit has the edges with the largest absolute scores that are on paths, at most that many.
        n_random: how many random circuits are drawn for each circuit, with as many edges, all on paths from input to logits;
            0 for none. Five take 2.5 times as long as the circuits themselves. Warns if no circuit of a size is found, whose
            values are then NaN.
        seed: seed of the random circuits.
        metric, answers, replace_with, max_memory: as for `Runner`.
        progress: whether to show a progress bar; None: if the work takes longer than two seconds.

    Returns an Evaluation. Warns if the random circuits do about as well (`control`), and if the metrics of the full model and
    the empty circuit differ by less than two standard errors over prompts. Raises ValueError for a circuit of another model,
    for sizes out of range, for an empty list, and for a metric with the same mean in the full model and the empty circuit, as
    faithfulness is undefined then.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> from hooked_lm.analysis.circuits import discover
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> circuit = discover(model, corrupted, clean, metric=answers, method="eap", n_edges=40)
    >>> found = evaluate(
    ...     model, circuit, corrupted, clean, metric=answers, sizes=[0, 40, 1.0]
    ... )
    >>> [abs(round(share, 3)) for share in found.faithfulness[[0, 2]].tolist()]
    [0.0, 1.0]
    """
    named = _circuits(Graph.of(model), circuits, sizes)
    pairs, judged_on = MeasuredPairs.of(model, corrupted, clean, metric, answers).judging(named.values(), max_memory)
    runner = Runner(model, pairs.corrupted, pairs.clean, pairs.metric, replace_with, max_memory)
    edges = torch.stack([circuit.edges for circuit in named.values()])
    n_edges = [circuit.n_edges for circuit in named.values()]
    random = _random(runner.graph, n_edges, n_random, seed)
    nothing = torch.zeros_like(edges[:1])
    found = runner.values(torch.cat([edges, runner.graph.is_edge & ~edges, nothing, random.flatten(0, 1)]), progress)
    both, empty, by_chance = found[: 2 * len(edges)], found[2 * len(edges)], found[2 * len(edges) + 1 :]
    runner.check_scale(empty)
    labels = {"of": [CIRCUIT, COMPLEMENT], CIRCUIT: list(named)}
    about = provenance(
        model, replace_with=replace_with, metric=runner.metric_name, **({"seed": seed} if n_random else {})
    )
    about |= {JUDGED: judged_on} if judged_on else {}
    drawn = by_chance.unflatten(0, random.shape[:2]) if n_random else None
    if drawn is not None:
        drawn[_of_other_sizes(random, n_edges)] = torch.nan
    values = both.unflatten(0, (2, -1))
    evaluation = Evaluation(values, labels, runner.full, empty, n_edges, runner.n_edges, drawn, about=about)
    if evaluation.control is not None:
        evaluation.control.warn_if_as_well()
    return evaluation


def _random(graph: Graph, sizes: Sequence[int], n_random: int, seed: int) -> Bool[Tensor, "draw circuit writer reader"]:
    """The edges of random circuits; raises ValueError for a negative number of draws."""
    if n_random < 0:
        raise ValueError(f"n_random must not be negative, got {n_random}")
    generator = torch.Generator().manual_seed(seed)
    drawn = [random_edges(graph, sizes, generator) for _ in range(n_random)]
    found = [one[size] for one in drawn for size in sizes]
    shape = (n_random, len(sizes), *graph.is_edge.shape)
    return torch.stack(found).view(shape) if found else graph.is_edge.new_zeros(shape)


def _of_other_sizes(
    random: Bool[Tensor, "draw circuit writer reader"], sizes: Sequence[int]
) -> Bool[Tensor, "draw circuit"]:
    """Which random circuits could not be drawn with so many edges; warns if there are any."""
    drawn = random.flatten(2).sum(-1)
    is_other = drawn != torch.tensor(sizes)
    if other := sorted(
        {(size, n) for size, column in zip(sizes, drawn.T.tolist(), strict=True) for n in column if n != size}
    ):
        found = "; ".join(f"{size}: {n} drawn" for size, n in other)
        warn_caller(
            f"no random circuits of these numbers of edges were found, all on paths from input to logits ({found}): their "
            "values are NaN, as circuits of other sizes are no baseline"
        )
    return is_other


def _circuits(graph: Graph, given: Given, sizes: Sequence[int | float] | None) -> dict[Any, Circuit]:
    """The circuits by label; raises ValueError if there are none, for another model's circuits, and for sizes out of range."""
    if isinstance(given, SweepResult) or (isinstance(given, Circuit) and sizes is not None):
        scores = given.scores if isinstance(given, Circuit) else scores_of(graph, given)
        if isinstance(given, Circuit):
            given.check(graph)
        if scores is None:
            raise ValueError("this circuit has no scores to build circuits of other sizes from: leave out sizes")
        numbers = _numbers(SHARES if sizes is None else sizes, graph)
        if sizes is not None and tuple(sizes) != SHARES and len(set(numbers)) < len(numbers):
            raise ValueError(f"sizes give the same number of edges twice: {numbers}")
        about = given.about if isinstance(given, Circuit) else seen_by(given)
        return {n: Circuit(graph, _of_size(graph, scores, n), about=about) for n in numbers}
    if sizes is not None:
        raise ValueError("sizes are for effects of edges, or for one circuit with scores")
    if isinstance(given, Circuit):
        given = [given]
    named: dict[Any, Circuit] = dict(given) if isinstance(given, Mapping) else _numbered(given)
    if not named:
        raise ValueError("there are no circuits to evaluate")
    for circuit in named.values():
        circuit.check(graph)
    return named


def _numbered(given: Sequence[Circuit]) -> dict[Any, Circuit]:
    """Circuits by their number of edges, or by their index in the list if two have the same number."""
    sizes = [circuit.n_edges for circuit in given]
    return dict(zip(sizes if len(set(sizes)) == len(sizes) else range(len(sizes)), given, strict=True))


def _of_size(graph: Graph, scores: Float[Tensor, "writer reader"], n: int) -> Bool[Tensor, "writer reader"]:
    return graph.is_edge if n == graph.n_edges else largest(graph, scores, n)


def _numbers(sizes: Sequence[int | float], graph: Graph) -> list[int]:
    """The numbers of edges for numbers and fractions; raises ValueError for the integer 1 beside fractions."""
    if any(0 < size < 1 for size in sizes) and any(isinstance(size, int) and size == 1 for size in sizes):
        raise ValueError(f"1 is one edge, and 1.0 is all edges: beside fractions write 1.0; got sizes={list(sizes)}")
    return [_number(size, graph) for size in sizes]


def _number(size: int | float, graph: Graph) -> int:
    """The number of edges for a number or a fraction; raises ValueError if it is out of range."""
    n = round(size * graph.n_edges) if isinstance(size, float) and 0 <= size <= 1 else size
    if isinstance(n, (float, bool)) or not 0 <= n <= graph.n_edges:
        raise ValueError(f"a size is a share from 0.0 to 1.0, or a number of the {graph.n_edges} edges; got {size!r}")
    return n
