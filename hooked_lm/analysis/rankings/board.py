"""The leaderboard: methods that rank edges, compared over tasks; tables, figures, a page and files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.rankings import page
from hooked_lm.analysis.rankings.task_rankings import (
    CMD,
    CONTROLS,
    COST,
    CPR,
    METHOD,
    NUMBERS,
    OF_TRUTH,
    UNTRAINED,
    TaskRankings,
    best_first,
)
from hooked_lm.extras import lazy_import
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import bootstrap, in_words
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.Leaderboard"
OF_TWIN = (CPR, CMD, *OF_TRUTH)  # the numbers of the untrained twin's rankings that tables show
SHOWN = (CPR, CMD, "spearman", "sign", "slope", *OF_TRUTH, *COST)  # in a line of text


@dataclass(frozen=True, eq=False, repr=False)
class Leaderboard(Tabular):
    """Methods that rank the edges of models, compared on tasks; see `analysis.leaderboard`.

    Args:
        tasks: the rankings of each task, with the same methods and shares.

    `board["capitals"]` is one of the tasks. Raises ValueError for no tasks, and for tasks with other methods or shares.
    """

    tasks: Sequence[TaskRankings]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if not self.tasks:
            raise ValueError("a leaderboard has one task at least")
        for task in self.tasks[1:]:
            if (task.methods, task.shares) != (self.tasks[0].methods, self.tasks[0].shares):
                raise ValueError(f"the tasks {self.tasks[0].name!r} and {task.name!r} have other methods or shares")

    def __getitem__(self, name: str) -> TaskRankings:
        found = {task.name: task for task in self.tasks}
        if name not in found:
            raise KeyError(f"there is no task {name!r}: there are {', '.join(found)}")
        return found[name]

    @property
    def methods(self) -> list[str]:
        """The names of the methods, without those of the untrained twin, in the order in which they were given."""
        return [name for name in self.tasks[0].methods if not name.endswith(UNTRAINED)]

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def column(self, name: str, untrained: bool = False) -> Float[Tensor, "task method"]:
        """A number of each task and method: "cpr", "cmd", or one of `TaskRankings.numbers`; with `untrained`, those of the
        untrained twin's rankings, NaN where there is none. Raises KeyError for another name."""
        known, ending = self.tasks[0].methods, UNTRAINED if untrained else ""
        columns = torch.stack([task.column(name) for task in self.tasks])
        found = torch.full((len(self.tasks), len(self.methods)), torch.nan)
        for place, method in enumerate(self.methods):
            if method + ending in known:
                found[:, place] = columns[:, known.index(method + ending)]
        return found

    def failures(self, level: float = 0.95, reference: str = "exact") -> "pd.DataFrame":
        """Where methods fail: the tasks on which the CMD of a method is above that of the `reference` on the same prompts, with
        an interval of the difference that excludes 0. A row for each: `task`, `method`, `cmd`, `reference` (its CMD), `worse`
        (the difference), `low`, `high`; the largest first.

        The intervals hold at once for all tasks and methods, by Bonferroni. Methods whose interval includes 0 may be worse, too.
        Raises ValueError if the reference is not among the methods, and if circuits of a task are judged on one pair, which has
        no interval.
        """
        if reference not in self.methods:
            raise ValueError(f"reference must be one of {', '.join(map(repr, self.methods))}, got {reference!r}")
        if self.no_interval:
            raise ValueError(f"{self.no_interval}: where methods fail is not known; give more held-out pairs")
        compared, rows = [name for name in self.methods if name not in (reference, *CONTROLS)], []
        level = 1 - (1 - level) / max(1, len(compared) * len(self.tasks))
        for task in self.tasks:
            cmd, (low, high) = task.column(CMD), task.interval_of(CMD, level, minus=reference)
            base = float(cmd[task.methods.index(reference)])
            for method in compared:
                place = task.methods.index(method)
                if float(low[place]) > 0:
                    own = float(cmd[place])
                    rows.append((task.name, method, own, base, own - base, float(low[place]), float(high[place])))
        table = pd.DataFrame(rows, columns=["task", METHOD, CMD, "reference", "worse", "low", "high"])
        return table.sort_values("worse", ascending=False, ignore_index=True, kind="stable")

    @property
    def no_interval(self) -> str:
        """Which tasks have no intervals over prompts, in words: those that are judged on one pair. "" if there is none."""
        names = ", ".join(task.name for task in self.tasks if task.n_prompts == 1)
        return f"one held-out pair has no interval ({names})" if names else ""

    # ---- tables ------------------------------------------------------------------------------------------------------

    def to_dataframe(self, by: str = CMD, per_task: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """A row for each method, the best by the column `by` first, with means over the tasks.

        Columns: `method`, `cpr` and `cmd` with their intervals (`cpr_low`, ...) over tasks, or over prompts if there is one task;
        `spearman`, `sign`, `slope`; `auroc`, `average_precision` over the tasks with a truth; `cpr_untrained` and others, the
        same of the untrained twin's rankings; `passes` and `seconds`. Columns without a number are left out.

        With `per_task`, a row for each task and method, whose intervals are over prompts. Raises ValueError for a column of which
        no end is best.
        """
        if per_task:
            parts = [task.to_dataframe(level=level, by=by).assign(task=task.name) for task in self.tasks]
            table = pd.concat(parts, ignore_index=True)
            return table[["task", *(name for name in table.columns if name != "task")]]
        columns: dict[str, Tensor] = {}
        for name in (CPR, CMD):
            columns[name] = self.column(name).mean(0)
            columns[f"{name}_low"], columns[f"{name}_high"] = self._interval_of_mean(name, level)
        columns |= {name: self.column(name).nanmean(0) for name in NUMBERS if name not in COST}
        columns |= {f"{name}_untrained": self.column(name, untrained=True).nanmean(0) for name in OF_TWIN}
        columns |= {name: self.column(name).nanmean(0) for name in COST}
        known = {name: column.numpy() for name, column in columns.items() if not bool(column.isnan().all())}
        table = pd.DataFrame({METHOD: self.methods, **known})
        return table.iloc[best_first(self._means(by), by)].reset_index(drop=True)

    def _means(self, name: str) -> Float[Tensor, " method"]:
        return self.column(name).nanmean(0)

    def _interval_of_mean(self, name: str, level: float) -> tuple[Float[Tensor, " method"], Float[Tensor, " method"]]:
        """The interval of "cpr" or "cmd" over tasks; over prompts, if there is one."""
        if len(self.tasks) == 1:
            places = [self.tasks[0].methods.index(method) for method in self.methods]
            low, high = self.tasks[0].interval_of(name, level)
            return low[places], high[places]
        with in_words():
            low, high = bootstrap(self.column(name).T, level)
        return (low.clamp(min=0.0), high) if name == CMD else (low, high)

    # ---- figures -----------------------------------------------------------------------------------------------------

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """Plot the mean faithfulness of each method over the tasks, the best first, over the share of edges on a logarithmic
        axis. Bands are 95% intervals over tasks, or over prompts if there is one task. Random edges are grey."""
        from hooked_lm import viz

        if len(self.tasks) == 1:
            return self.tasks[0].plot(title, show_values)
        known = self.tasks[0].methods
        curves, bands = {}, {}
        for place in best_first(self._means(CMD), CMD):
            name = self.methods[place]
            of_tasks = torch.stack([task.faithfulness[known.index(name)] for task in self.tasks])
            curves[name] = of_tasks.mean(0)
            with in_words():
                bands[name] = bootstrap(of_tasks.T)
        return viz.lines(
            [100 * share for share in self.tasks[0].shares],
            curves,
            bands,
            title or f"Circuits of the best edges, mean of {len(self.tasks)} tasks",
            "% of the edges, logarithmic",
            "faithfulness",
            show_values,
            {"full model": 1.0, "no edges": 0.0},
            f"95% intervals over {len(self.tasks)} tasks",
            logarithmic=True,
            references=[name for name in curves if name in CONTROLS],
        )

    def plot_cost(self, title: str = "", by: str = CMD) -> "go.Figure":
        """Plot what each method finds against what it costs: the column `by`, with its interval if it is "cpr" or "cmd", over
        passes of the model on a logarithmic axis."""
        from hooked_lm import viz

        means, passes = self._means(by), self._means("passes")
        places = [place for place in best_first(means, by) if float(passes[place]) > 0]
        interval = None
        if by in (CPR, CMD) and (len(self.tasks) > 1 or self.tasks[0].n_prompts > 1):
            low, high = self._interval_of_mean(by, 0.95)
            interval = low[places], high[places]
        over = f"over {len(self.tasks)} tasks" if len(self.tasks) > 1 else f"over {self.tasks[0].n_prompts} prompts"
        names = {CPR: "CPR (more is better)", CMD: "CMD (less is better)"}
        return viz.points(
            passes[places],
            means[places],
            [self.methods[place] for place in places],
            interval,
            title or "What methods find, and what they cost",
            "passes of the model, forward and backward, logarithmic",
            names.get(by, by),
            subtitle=f"95% intervals {over}" if interval else "",
            logarithmic=True,
        )

    def write_html(self, path: str | os.PathLike[str], command: str = "") -> Path:
        """Write the leaderboard to `path` as one HTML page that needs no network; returns the path. `command` is the line of a
        shell that wrote it. Raises OSError if the file cannot be written."""
        several = len(self.tasks) > 1
        over = f"{len(self.tasks)} tasks" if several else f"the task {self.tasks[0].name}"
        sections = [page.methods_section(over, self.to_dataframe(), self.plot())]
        if bool((self._means("passes") > 0).any()):
            sections.append(page.cost_section(self.plot_cost()))
        if "exact" in self.methods:
            sections.append(page.failures_section(self.no_interval or self.failures()))
        sections += [page.task_section(task) for task in self.tasks if several]
        about = {**self.tasks[0].about, "prompts": self.tasks[0].n_prompts}
        return page.write([*sections, page.made_section(about, command)], path)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, atomically; `load` restores it exactly."""
        tensors: dict[str, Tensor] = {}
        headers: list[dict[str, Any]] = []
        for place, task in enumerate(self.tasks):
            of_task, header = task.parts()
            tensors |= {f"{place} {name}": tensor for name, tensor in of_task.items()}
            headers.append(header)
        stored.write(path, FORMAT, tensors, {"tasks": headers})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Leaderboard":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        tasks = []
        for place, of_task in enumerate(header["tasks"]):
            own = {name.partition(" ")[2]: each for name, each in tensors.items() if name.startswith(f"{place} ")}
            parts: dict[str, Any] = {**of_task, **own}
            tasks.append(TaskRankings(**parts))
        return cls(tuple(tasks))

    # ---- at a glance -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = [task.name for task in self.tasks]
        of = ", ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
        best = best_first(self._means(CMD), CMD)
        cmd = self._means(CMD)
        order = ", ".join(f"{self.methods[place]} {float(cmd[place]):.3f}" for place in best)
        without = f"; {self.no_interval}" if self.no_interval else ""
        return f"Leaderboard({len(names)} task{'s' * (len(names) > 1)}: {of}; CMD, the best first: {order}{without})"

    def to_text(self, by: str = CMD) -> str:
        """The leaderboard as lines of text, the best by the column `by` first."""
        order = best_first(self._means(by), by)
        columns = {name: self._means(name)[order] for name in SHOWN}
        columns = {name: column for name, column in columns.items() if not bool(column.isnan().all())}
        rows = [["method", *columns]]
        for i, place in enumerate(order):
            rows.append([self.methods[place], *(_short(name, float(column[i])) for name, column in columns.items())])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join(lines)


def _short(name: str, number: float) -> str:
    if number != number:
        return "-"
    return f"{number:,.0f}" if name == "passes" else f"{number:.2f}" if name == "seconds" else f"{number:.3f}"
