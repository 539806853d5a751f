"""Times as ratios: two things in turn, A B A B ..., and the median of the ratios pair by pair."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One line of the report: what was measured against what, the ratio, and what it should not exceed (inf: no goal)."""

    what: str
    against: str
    ratio: float
    bound: float
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.ratio <= self.bound


def seconds(run: Callable[[], object]) -> float:
    """The wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    what: str, ours: Callable[[], object], against: str, theirs: Callable[[], object], bound: float, pairs: int
) -> Figure:
    """The median over pairs of time(ours) / time(theirs), after one call of each to warm up."""
    ours(), theirs()
    gc.collect()
    times = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
    ratio = statistics.median(a / b for a, b in times)
    mine, other = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return Figure(what, against, ratio, bound, f"{mine:.1f} / {other:.1f} ms, {pairs} pairs")


def show(title: str, figures: list[Figure]) -> None:
    """Print the figures as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("measured", "against", "ratio", "asked", "", "medians"):
        table.add_column(column, justify="right" if column in ("ratio", "asked") else "left")
    for f in figures:
        has_goal = f.bound < math.inf
        verdict = "" if not has_goal else "[green]met[/]" if f.met else "[red]missed[/]"
        digits = 2 if f.bound >= 0.2 else 4
        table.add_row(
            f.what,
            f.against,
            f"{f.ratio:.{digits}f}",
            f"<= {f.bound:.{digits}f}" if has_goal else "",
            verdict,
            f.detail,
        )
    Console(width=150).print(table)
