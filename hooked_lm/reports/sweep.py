"""The page of a sweep over pairs of prompts: the prompts, what was found, the figure, and the largest effects."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hooked_lm import viz
from hooked_lm.engine.result import WHAT, SweepResult
from hooked_lm.extras import lazy_import
from hooked_lm.reports.circuit import Task
from hooked_lm.reports.prompts import turns_of
from hooked_lm.results import Label, Scores
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.control import sentence_of
from hooked_lm.results.scores import METRIC
from hooked_lm.viz.labels import POSITION
from hooked_lm.viz.numbers import MINUS, rounded

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

SHOWN, MOST_VALUES = 10, 24  # cells of the table; columns of a heat map that have room for numbers
SMALLEST_GAP = 1e-6  # nats between clean and corrupted run, below which no share is defined


@dataclass(frozen=True)
class Shares:
    """The cells of a sweep with shares of the difference between the runs: 0 is the corrupted run, 1 the clean one.

    A denoising cell restores its share; of a noising cell it is kept. There are no shares if the runs do not differ.
    """

    result: SweepResult

    @property
    def name(self) -> str:
        """What the shares are."""
        return "restored" if self.result.base == "corrupted" else "kept"

    @property
    def gap(self) -> float:
        """The mean difference of clean and corrupted run; NaN if there is none to speak of."""
        if self.result.clean is None:
            return float("nan")
        gap = float(self.result.clean.mean() - self.result.corrupted.mean())
        return gap if abs(gap) > SMALLEST_GAP else float("nan")

    def top(self, n: int = SHOWN) -> "pd.DataFrame":
        """The cells with the largest effects."""
        return self.added(self.result.top(n))

    def added(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """A table of effects, with the shares beside them."""
        start = 0.0 if self.result.base == "corrupted" else 1.0
        gap: Any = self.gap
        if METRIC in table:
            gap = table[METRIC].map({of: Shares(self.result.select(metric=of)).gap for of in self.result.axes[METRIC]})
        table.insert(list(table).index("effect") + 1, self.name, start + table["effect"] / gap)
        return table


def tables(scores: Scores, normalized: bool) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """The largest cells and all cells, with intervals that hold for all cells at once if there are several prompts. Those of a
    sweep have shares, if there are some and they are wanted."""
    ranked = scores.effects() if isinstance(scores, SweepResult) else scores
    cells = (
        ranked.to_dataframe().drop(columns=["low", "high"], errors="ignore").rename(columns={"mean": ranked._column})
    )
    if scores.n_prompts > 1:
        low, high = ranked.interval(simultaneous=True)
        cells = cells.assign(low=low.flatten().numpy(), high=high.flatten().numpy())
    cells = cells.assign(value=scores.mean.flatten().numpy())
    if isinstance(scores, SweepResult) and normalized and scores.clean is not None:
        shares = Shares(scores)
        return shares.top(), shares.added(cells)
    return scores.top(SHOWN), cells


def parts_of_position(label: Label) -> tuple[Label, str]:
    """The number and the token of a position's label; other labels have no token.

    >>> parts_of_position("10  Mary"), parts_of_position(3)
    ((10, ' Mary'), (3, ''))
    """
    match = POSITION.fullmatch(label) if isinstance(label, str) else None
    return (int(match[1]), match[2]) if match else (label, "")


def place_of(label: Label) -> str:
    """A position for people.

    >>> place_of("10  Mary"), place_of(3)
    ('·Mary (10)', '3')
    """
    number, token = parts_of_position(label)
    return f"{viz.visible(token)} ({number})" if token else str(number)


def readable(table: "pd.DataFrame") -> "pd.DataFrame":
    """A table of cells in which positions are shown as their tokens."""
    return table.assign(position=table["position"].map(place_of)) if "position" in table else table


def significant_cells(result: SweepResult) -> str:
    """How many cells have an effect, in a sentence; "" for so few pairs that none could be significant.

    >>> import torch
    >>> effects = torch.tensor([[1.0, 2, 1, 2, 1, 2], [4, -1, 1, -1, 1, -1]])
    >>> significant_cells(SweepResult(effects, {"layer": [0, 1]}, torch.zeros(6)))
    '1 of 2 cells has an effect that is more than chance (p at most 0.05, corrected for all cells).'
    """
    try:
        with in_words() as skewed:
            found = result.significant()
    except ValueError:  # too few pairs
        return ""
    verb, more = "has" if found.n_significant == 1 else "have", "; effects are skewed, so it may be fewer" * len(skewed)
    of = f"{found.n_significant} of {found.n_tested} cells {verb} an effect that is more than chance"
    return f"{of} (p at most {found.level:g}, corrected for all cells{more})."


def finding(result: SweepResult) -> str:
    """The cell with the largest effect, and how many cells have one, in sentences."""
    shares = Shares(result)
    top = shares.top(1)
    if not len(top):
        return "No cell has a value."
    [best] = top.to_dict("records")
    where = ", ".join(
        f"`{place_of(best[axis])}`" if axis == "position" else f"{axis} {best[axis]}" for axis in result.axes
    )
    change = f"{rounded(best['effect'], sign=True)} nats"
    verb = {"restored": "restores", "kept": "keeps"}[shares.name]
    share = (
        "" if shares.gap != shares.gap else f": it {verb} {best[shares.name]:.0%} of the difference".replace("-", MINUS)
    )
    largest = f"The largest effect is that of {where or 'the only cell'} ({change}){share}."
    return " ".join(filter(None, [largest, significant_cells(result), sentence_of(result.control)]))


def figure(result: SweepResult, normalized: bool = True) -> "go.Figure":
    """The figure of the sweep as shares or in nats, with numbers in the cells where there is room.

    Raises ValueError for more axes than a figure has, and for shares of runs that do not differ.
    """
    shown = result.normalized() if normalized else result
    widest = max((len(labels) for name, labels in result.axes.items() if name != "layer"), default=0)
    return shown.plot(show_values=widest <= MOST_VALUES)


def write_report(
    result: SweepResult,
    task: Task,
    tokens: tuple[Sequence[str], Sequence[str]],
    path: str | os.PathLike[str],
    normalized: bool = True,
) -> Path:
    """Writes a sweep of the pairs of a task as one self-contained HTML page; returns its path.

    `tokens` are those of the first clean and corrupted prompt; a task of a `Chat` says whose they are. The figure shows shares of
    the difference between the runs, or nats if not `normalized`.
    """
    clean, corrupted = tokens
    right, wrong, n = task.answers[0].strip(), task.wrong_answers[0].strip(), len(task)
    marked = [pos for pos, (one, other) in enumerate(zip(clean, corrupted, strict=True)) if one != other]
    runs = {"clean": result.clean, "corrupted": result.corrupted}
    facts = {
        f"{name} logit difference": rounded(run.mean(), sign=True) for name, run in runs.items() if run is not None
    }
    other = "corrupted" if result.base == "clean" else "clean"
    scale = (
        "0 is the corrupted run and 1 the clean one."
        if normalized
        else f"Numbers are logit differences of “{right}” and “{wrong}”, in nats."
    )
    prompts = viz.Section(
        "The prompts",
        viz.TokenRow("clean", clean, marked, turns_of(task.clean)),
        viz.TokenRow("corrupted", corrupted, marked, turns_of(task.corrupted)),
        f"The first of {n} pairs." if n > 1 else "One pair, which says nothing about others.",
        viz.KeyFigures({"prompt pairs": str(n), **facts}),
    )
    found = viz.Section(
        "What was found",
        finding(result),
        _drawn(result, normalized, f"One cell at a time takes its value from the {other} run. {scale}"),
        readable(Shares(result).top()),
    )
    lead = f"Which activations make the model say “{right}”, and not “{wrong}”? Values of the {other} run are put into the "
    title = str(result.about.get(WHAT, "patching")).capitalize()
    return viz.report(title, [prompts, found], path, f"{lead}{result.base} run.")


def _drawn(result: SweepResult, normalized: bool, caption: str) -> viz.CaptionedFigure | str:
    """The figure; of too many axes, what to do instead."""
    try:
        return viz.CaptionedFigure(figure(result, normalized), caption)
    except ValueError as error:
        return f"There is no figure: {error}."
