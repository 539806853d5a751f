"""The page of a leaderboard."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hooked_lm import viz
from hooked_lm.analysis.circuits.page import made_section
from hooked_lm.analysis.rankings.task_rankings import TaskRankings

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["cost_section", "failures_section", "made_section", "methods_section", "task_section", "write"]

LEAD = (
    "Each method ranks the edges of a model for a task. Circuits of the best edges run on prompts that no method saw; other "
    "edges carry what replaces them. How much of the task is left?"
)
COLUMNS = (
    "CMD is the area between 1 and the curve of faithfulness over the share of edges, the largest scores first. CPR is the area "
    "under the curve with the edges first without which the metric falls most, and may exceed 1: both as in the circuit track of "
    "MIB. `spearman` (rank correlation), `sign` (share of right signs) and `slope` (1 if sizes are right) "
    "compare the scores with exact patching of each edge. `auroc` and `average_precision` compare them with the circuit that a "
    "model has, where it is known. `passes` are forward and backward passes of the model over the prompts that a method sees. "
    "Columns that end in `untrained` are of the ranking that a method gives for the untrained twin, used for the model: what it "
    "finds, a method finds without training."
)
FAILS = (
    "Where the CMD of a method is above that of exact patching on the same prompts, with an interval that excludes 0 (all of "
    "these intervals hold at once). A method that is missing here may be worse, too, by less than these prompts can tell."
)


def methods_section(over: str, table: "pd.DataFrame", figure: "go.Figure") -> viz.Section:
    """The table of all methods, and their curves."""
    return viz.Section(f"The methods, on {over}", COLUMNS, table, figure)


def cost_section(figure: "go.Figure") -> viz.Section:
    """What the methods cost."""
    return viz.Section("What they cost", figure)


def failures_section(found: "pd.DataFrame | str") -> viz.Section:
    """The tasks on which methods fail, or why these are not known."""
    if isinstance(found, str):
        return viz.Section("Where each method fails", f"Not known: {found}.")
    return viz.Section("Where each method fails", FAILS, found if len(found) else "No interval excludes 0.")


def task_section(task: TaskRankings) -> viz.Section:
    """The methods on one task."""
    gap = f"The metric is {float(task.full.mean()):.3g} in the model, and {float(task.empty.mean()):.3g} without edges."
    return viz.Section(task.name, gap, task.plot(), task.to_dataframe())


def write(sections: Iterable[viz.Section], path: str | os.PathLike[str]) -> Path:
    """Writes a leaderboard as one self-contained HTML page and returns its path."""
    return viz.report("A leaderboard of methods that find circuits", sections, path, lead=LEAD)
