"""Finds the circuit of a task, evaluates it against the full model, and writes a report."""

import os
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm import viz
from hooked_lm.analysis import circuits, metrics
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.edges import METHODS, attribute_edges
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits import page
from hooked_lm.analysis.circuits.circuit import EFFECTS, SEEN
from hooked_lm.analysis.circuits.held_out import JUDGED, SAME, HeldOut
from hooked_lm.analysis.circuits.run import check_replacement
from hooked_lm.callers import warn_caller
from hooked_lm.engine.pairs import Pairs, pair_of, with_chats
from hooked_lm.engine.prompts import Messages
from hooked_lm.engine.result import SweepResult, metric_name
from hooked_lm.engine.study import SwapWarning
from hooked_lm.extras import lazy_import
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import conversations_in
from hooked_lm.models.vision.inputs import PromptRows, VisionInputs
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.pretrained import HookedTransformer
from hooked_lm.renamed import former_names, renamed
from hooked_lm.reports.controls import STEPS, faithfulness, in_search, nulls_of, range_of_nulls
from hooked_lm.reports.prompts import last_text, turns_of, words_of
from hooked_lm.results.gap import one_warning
from hooked_lm.viz.numbers import rounded

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

SHOWN_NODES = 12  # rows of the table
SHARE = 0.05  # the default share of edges to keep
KL, DIFFERENCE = "kl", "logit difference"  # the metrics of circuits
DEFAULT_METRIC = DIFFERENCE  # the one that reads the answers
OF_SEARCH, OF_NULLS = "faithfulness in the search", "faithfulness of null circuits"
RANKS = ("pruning", "exchange", "masks")  # methods whose scores rank all edges


class TaskWarning(UserWarning):
    """The model does not answer as a task says it does, so a circuit of the task may mean little."""


@dataclass(frozen=True, eq=False, repr=False)
class Task(Pairs):
    """Pairs of clean and corrupted prompts of equal lengths, with the right and a wrong next token for each pair.

    Prompts are texts; conversations, as a `Chat` or as messages; or ids with the images among them, for a model that reads
    images.
    """

    clean: Sequence[str] | VisionInputs | Chat | Messages
    corrupted: Sequence[str] | VisionInputs | Chat | Messages
    answers: Sequence[str]
    wrong_answers: Sequence[str]

    def __post_init__(self) -> None:
        every = {name: getattr(self, name) for name in ("clean", "corrupted", "answers", "wrong_answers")}
        sizes = {name: len(conversations_in(given) or given) for name, given in every.items()}
        if len(set(sizes.values())) > 1 or not len(self.clean):
            raise ValueError(
                f"a task has the same number of clean prompts, corrupted prompts, answers and wrong answers; got {sizes}"
            )


def answers_of(pairs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits texts such as " Mary, John" into right and wrong answers; raises ValueError for one without a comma inside.

    >>> answers_of([" Mary, John"])
    ([' Mary'], [' John'])
    """
    split = [pair.split(",") for pair in pairs]
    if bad := next((pair for pair, parts in zip(pairs, split, strict=True) if len(parts) != 2 or not all(parts)), None):
        raise ValueError(
            f"answers are a right and a wrong token with a comma between, such as ' Mary, John'; got {bad!r}"
        )
    return [right for right, _ in split], [wrong for _, wrong in split]


def _check_task(task: object) -> None:
    if not isinstance(task, Task):  # answers of other Pairs may be ids, which a page cannot show
        raise TypeError(
            f"a report is of a Task, whose prompts and answers are lists of texts; got a {type(task).__name__}"
        )


@torch.no_grad()
def check_answers(model: HookedTransformer, task: Task) -> dict[str, float]:
    """The mean logit difference of the answers in nats, on the "clean" and on the "corrupted" prompts.

    Warns with `TaskWarning` if the right answer is not ahead on the clean prompts, or not less so on the corrupted ones: then the
    answers are not those that the prompts ask for. If the model's first choice is the answer in another spelling, such as with a
    leading space, the warning says so. Raises ValueError for answers of several tokens, and for logits that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> text = "When Mary and John went to the store, {} gave a drink to"
    >>> task = Task([text.format("John")], [text.format("Mary")], [" Mary"], [" John"])
    >>> ahead = check_answers(model, task)
    >>> ahead["clean"] > 0 > ahead["corrupted"]
    True
    """
    _check_task(task)
    difference, device = task.metric(model), next(model.parameters()).device
    corrupted, clean = pair_of(model, task.corrupted, task.clean)
    logits = {"clean": model(clean.to(device))[:, -1:], "corrupted": model(corrupted.to(device))[:, -1:]}
    values = {name: difference(found) for name, found in logits.items()}
    ahead = {name: float(found.mean()) for name, found in values.items()}
    if nan := [name for name, value in ahead.items() if value != value]:
        raise ValueError(f"the logit difference of the answers is NaN on the {' and the '.join(nan)} prompts")
    wrong = []
    if not ahead["clean"] > 0:
        n_behind, n = int((values["clean"] <= 0).sum()), len(values["clean"])
        wrong.append(f"is not ahead on the clean prompts ({ahead['clean']:+.2f} nats, behind on {n_behind} of {n})")
    if not ahead["corrupted"] < ahead["clean"]:
        both = f"{ahead['corrupted']:+.2f} nats, against {ahead['clean']:+.2f} on the clean ones"
        wrong.append(f"is not less ahead on the corrupted prompts ({both})")
    if wrong:
        swapped = (
            ". Are the clean and the corrupted prompts swapped?" if len(wrong) == 2 and ahead["corrupted"] > 0 else ""
        )
        says = f"the right answer {' and '.join(wrong)}{_first_choice(model, task, logits['clean'][:, -1])}{swapped}"
        warn_caller(says, TaskWarning)
    return ahead


def _first_choice(model: HookedTransformer, task: Task, logits: Float[Tensor, "prompt d_vocab"]) -> str:
    """What the model says instead, and whether that is an answer in another spelling."""
    first = str(model.to_single_str_token(int(logits[0].argmax())))
    right = task.answers[0]
    if first != right and first.strip() == right.strip():
        return f": the model's first choice is {first!r}, not {right!r}; give {first!r}"
    return f"; after the first prompt the model says {first!r}"


@dataclass(frozen=True)
class CircuitStudy(NotebookRepr):
    """A circuit of a task, with the effects of edges and an evaluation.

    `drawn` is the circuit with the effect of each edge on the logit difference: exact, if the method has none. `effects` are the
    estimated or exact effects of all edges; None if the method has none. `evaluation` has circuits of several sizes, or only
    this one; `chosen` is the evaluation of this one, and `nodes` the effect of taking each of its nodes out. `ahead` is the logit
    difference of the answers in nats, on the clean and on the corrupted prompts. `searched` is the evaluation of the circuit on
    the prompts of its search; None if it is judged on these. `nulls` is that of null circuits, if any were asked for.
    """

    model: HookedTransformer
    task: Task
    circuit: circuits.Circuit
    drawn: circuits.Circuit
    effects: SweepResult | None
    evaluation: circuits.Evaluation
    chosen: circuits.Evaluation
    nodes: "pd.DataFrame"
    ahead: dict[str, float]
    seconds: float
    searched: circuits.Evaluation | None = None
    nulls: circuits.Evaluation | None = None

    def repr_table(self) -> Table:
        """The key figures."""
        return Table(("", "value"), [*self.facts.items()])

    def report(self, path: str | os.PathLike[str], command: str = "") -> Path:
        """As `write_report`."""
        return write_report(self, path, command)

    def __repr__(self) -> str:
        return f"CircuitStudy({self.circuit!r} of {len(self.task)} pairs, in {self.seconds:.1f} s)"

    @property
    def facts(self) -> dict[str, str]:
        """Key figures of the circuit."""
        found = self.chosen.to_dataframe().iloc[0]
        n_edges, n_all = self.circuit.n_edges, self.circuit.graph.n_edges
        empty = "" if n_edges else ": nothing is left; try a lower threshold, or more edges"
        idle = n_edges - self.circuit.pruned().n_edges
        on_no_path = f"; {idle} of them are on no path from input to logits" if idle else ""
        facts = {
            "right answer ahead": ", ".join(
                f"{rounded(nats, sign=True)} nats on {name} prompts" for name, nats in self.ahead.items()
            ),
            "edges": f"{n_edges} of {n_all:,} ({n_edges / n_all:.1%}){empty or on_no_path}",
            "faithfulness": faithfulness(self.chosen),
            **({} if self.searched is None else {OF_SEARCH: f"{faithfulness(self.searched)}, {SAME}"}),
            "faithfulness of random edges": f"{rounded(found['random'])}, as many edges",
            **({} if self.nulls is None else {OF_NULLS: range_of_nulls(self.nulls)}),
            "completeness": rounded(found["completeness"]),
            "measured by": str(self.chosen.about["metric"]),
            "judged on": f"{self.chosen.n_prompts} of {len(self.task)}, {self.chosen.about[JUDGED]}",
        }
        if (agreement := self.agreement) is not None:
            facts["agreement with exact patching"] = (
                f"{rounded(agreement['spearman'])} (rank correlation, {int(agreement['cells'])} edges)"
            )
        return facts

    @property
    def edges(self) -> "pd.DataFrame":
        """The edges on paths from input to logits and their effects, the largest first."""
        return self.drawn.pruned().to_dataframe().drop(columns="on_path").rename(columns={"score": "effect"})

    @property
    def agreement(self) -> dict[str, Any] | None:
        """The agreement of estimated and exact effects; None if there are no estimates or no exact effects."""
        if not isinstance(self.effects, Attribution) or not len(self.effects.agreement):
            return None
        return dict(self.effects.agreement.iloc[0])


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
def find(
    model: HookedTransformer,
    task: Task,
    *,
    method: str = "pruning",
    by: str = DEFAULT_METRIC,
    n_edges: int | None = None,
    threshold: float | None = None,
    replace_with: str = "corrupted",
    check: bool | int | None = None,
    held_out: HeldOut = None,
    nulls: int = 0,
) -> CircuitStudy:
    """Finds and evaluates a circuit; see `analysis.circuits.discover` for the methods and limits.

    The metric of circuits (`by`) is the "logit difference" of the answers, or "kl", the divergence of the next token from the
    full model's, which does not read the answers; effects of edges are always those on the former. With neither `n_edges` nor
    `threshold` 5% of the edges are kept. The search does not see the pairs of `held_out`, on which the circuit is judged, as in
    `discover`. `nulls` circuits are searched for exchanged answers (`null_circuits`), each by a search of its own.
    Warns as `check_answers`, and once if circuits may be shares of nothing, as `evaluate`.
    Raises the errors of `discover`, and ValueError for prompts of different lengths and answers of several tokens.
    """
    started = time.perf_counter()
    _check_task(task)
    task = with_chats(model, task)
    if by not in (KL, DIFFERENCE):
        raise ValueError(f"by must be {KL!r} or {DIFFERENCE!r}, got {by!r}")
    check_replacement(replace_with)
    if check not in (None, False) and method not in METHODS:
        raise ValueError(f"check is for the methods that estimate effects, {', '.join(METHODS)}; got method {method!r}")
    if nulls < 0 or (nulls and by == KL):
        raise ValueError(
            f"nulls must be 0 or a number of circuits, whose answers are exchanged: by={DIFFERENCE!r} reads answers, and {KL!r} "
            f"none; got nulls={nulls} and by={by!r}"
        )
    n_all = Graph.of(model).n_edges
    if n_edges is not None and not 1 <= n_edges <= n_all:
        raise ValueError(f"n_edges must be from 1 to {n_all:,}, the number of edges of this model; got {n_edges:,}")
    difference = task.metric(model)
    corrupted, clean = pair_of(model, task.corrupted, task.clean)
    if n_edges is None and threshold is None:
        if method == "acdc":
            raise ValueError("method 'acdc' needs threshold: what an edge must change at least, in nats, such as 0.05")
        n_edges = max(1, round(SHARE * n_all - 0.5))
    prompts = {"corrupted": corrupted, "clean": clean}
    ahead = check_answers(model, task)
    common: dict[str, Any] = {**prompts, "metric": None if by == KL else difference, "replace_with": replace_with}
    with warnings.catch_warnings(), one_warning():
        warnings.simplefilter("ignore", SwapWarning)  # `check_answers` said it
        effects = _effects(model, prompts, difference, method, replace_with, check)
        how = method if effects is None else effects
        limits: dict[str, Any] = {"n_edges": n_edges, "threshold": threshold, "held_out": held_out}
        circuit = circuits.discover(model, method=how, **limits, **common)
        chosen = circuits.evaluate(model, {"found": circuit}, **common)
        searched = in_search(model, circuit, chosen, common)
        exchanged = nulls_of(model, nulls, method, limits, common)
        by_size = circuit if effects is not None or method in RANKS else None
        evaluation = chosen if by_size is None else circuits.evaluate(model, by_size, sizes=circuits.SHARES, **common)
        nodes = _nodes(model, circuit, common)
        drawn = _drawn(model, circuit, effects, {**prompts, "metric": difference, "replace_with": replace_with})
    spent = time.perf_counter() - started
    of_circuit = circuit, drawn, effects, evaluation, chosen, nodes
    return CircuitStudy(model, task, *of_circuit, ahead, spent, searched, exchanged)


def _drawn(
    model: HookedTransformer, circuit: circuits.Circuit, effects: SweepResult | None, common: dict[str, Any]
) -> circuits.Circuit:
    """The circuit with effects of edges on the logit difference: those of the method, or exact ones."""
    if effects is None and circuit.n_edges:
        return circuits.exact_effects(model, circuit, **common)
    return replace(circuit, about={**circuit.about, "metric": metric_name(common["metric"])})


def _effects(
    model: HookedTransformer,
    prompts: dict[str, PromptRows],
    metric: metrics.Metric,
    method: str,
    replace_with: str,
    check: bool | int | None,
) -> SweepResult | None:
    """The effects of all edges on the clean run, if the method computes them."""
    common: dict[str, Any] = {**prompts, "metric": metric, "replace_with": replace_with, "direction": "noise"}
    if method == "exact":
        return patch_edges(model, **common)
    if method in METHODS:
        return attribute_edges(model, method=method, steps=STEPS, check=check, **common)
    return None


def _nodes(model: HookedTransformer, circuit: circuits.Circuit, common: dict[str, Any]) -> "pd.DataFrame":
    """The effect of taking each node out of the circuit, the largest first; empty for an empty circuit."""
    if not circuit.n_edges:
        return pd.DataFrame(columns=["node", "effect"])
    top = circuits.minimality(model, circuit, of="nodes", **common).top(len(circuit.nodes))
    interval = {"low": -top["high"], "high": -top["low"]} if "low" in top else {}
    return pd.DataFrame({"node": top["node"], "effect": -top["value"], **interval})


# ---- the page --------------------------------------------------------------------------------------------------------


def write_report(study: CircuitStudy, path: str | os.PathLike[str], command: str = "") -> Path:
    """Writes the study as one self-contained HTML page and returns its path; `command` is the line of a shell that did so."""
    clean, (right, wrong) = (
        last_text(study.model, study.task.clean),
        map(page.in_words, (study.task.answers[0], study.task.wrong_answers[0])),
    )
    answer = f"“{right.strip()}” after “{clean}”"
    question = f"Why does the model say {answer}, and not “{wrong.strip()}”?"
    if not study.ahead["clean"] > 0:
        question = f"The model does not prefer {answer}. What it says instead has a circuit too."
    edges = f"{study.circuit.graph.n_edges:,} edges, from each head and MLP to every later one"
    lead = f"{question} What it knows travels along {edges}. Here are those that are needed."
    sections = [_task_section(study), _circuit_section(study), _faithfulness_section(study), _parts_section(study)]
    if not isinstance(study.task.clean, VisionInputs):
        sections.append(page.pairs_section(study.task))
    about = {**study.circuit.about, "measured by": study.chosen.about["metric"], SEEN: None}
    sections.append(page.made_section(about, command))
    return viz.report("A circuit", sections, path, lead=lead)


def _task_section(study: CircuitStudy) -> viz.Section:
    task, n = study.task, len(study.task)
    clean, corrupted = words_of(study.model, task.clean), words_of(study.model, task.corrupted)
    marked = [pos for pos, (one, other) in enumerate(zip(clean, corrupted, strict=True)) if one != other]
    which, known = f"The first of {n} pairs", "Intervals hold 95% of the means that these pairs make plausible."
    if n == 1:
        which, known = "One pair", "One pair says nothing about others."
    return viz.Section(
        "The task",
        viz.TokenRow("clean", clean, marked, turns_of(task.clean)),
        viz.TokenRow("corrupted", corrupted, marked, turns_of(task.corrupted)),
        f"{which} of prompts. The circuit runs on the clean prompts; every edge outside of it "
        + f"carries {REPLACED[str(study.chosen.about['replace_with'])]}. The metric is {study.chosen.about['metric']}. "
        + known
        + _controls(study),
        _key_figures(study),
    )


def _controls(study: CircuitStudy) -> str:
    """What the figures beside faithfulness are."""
    searched = (
        ""
        if study.searched is None
        else " The circuit is judged on pairs that its search did not see; on those of its search "
        "it looks better than it is."
    )
    nulls = (
        ""
        if study.nulls is None
        else " Null circuits were found by the same search for the answers of other pairs: only what "
        "the circuit recovers beyond them is due to the task."
    )
    return searched + nulls


def _key_figures(study: CircuitStudy) -> viz.KeyFigures:
    """The facts of the study, with what is in parentheses or after a comma below the number."""
    facts = {f"right answer ahead, {name}": f"{rounded(nats, sign=True)} nats" for name, nats in study.ahead.items()}
    notes = {}
    for name, text in list(study.facts.items())[1:]:
        match = re.fullmatch(r"(.*?)(?: \((.*?)\)|, )(.*)", text)
        facts[name] = match[1] if match else text
        if match:
            notes[name] = "".join(filter(None, match.groups()[1:]))
    return viz.KeyFigures(facts, notes)


REPLACED = {
    "corrupted": "what it carries in the corrupted run",
    "mean": "its mean over the corrupted prompts",
    "zero": "nothing",
}


def _circuit_section(study: CircuitStudy) -> viz.Section:
    method = str(study.circuit.about.get("method", ""))
    n_edges, exact = study.circuit.n_edges, study.drawn.about.get("scores") == EFFECTS
    how = "measured by patching it alone" if exact or method == "exact" else "estimated from gradients"
    text = f"Found by `{method}`. The effect of an edge on the logit difference, in nats, is {how} in the full model."
    title = f"{n_edges} of {study.circuit.graph.n_edges:,} edges, {len(study.circuit.nodes)} nodes"
    return page.circuit_section(study.drawn.plot(title=title), text, study.edges)


def _faithfulness_section(study: CircuitStudy) -> viz.Section:
    found = study.evaluation
    if found is study.chosen:
        return page.faithfulness_section(study.chosen)
    sizes = (
        f"The curve is of circuits of the strongest edges, from none to all, by {found.about['metric']}. The area under it is "
        f"{rounded(found.area)} of its width."
    )
    return page.faithfulness_section(study.chosen, found, text=sizes)


def _parts_section(study: CircuitStudy) -> viz.Section:
    text = (
        f"How {study.chosen.about['metric']} changes, in nats, when all edges of one node are taken out of the circuit. "
        f"All of this took {study.seconds:.1f} s."
    )
    return viz.Section("What each node adds", text, study.nodes.head(SHOWN_NODES))


if not TYPE_CHECKING:  # type checkers know the present names alone
    __getattr__ = former_names(__name__, Study="CircuitStudy")
