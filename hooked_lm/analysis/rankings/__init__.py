"""Rankings of edges, and their comparison: by the circuits of the best edges, by exact patching, and by a known truth."""

from hooked_lm.analysis.rankings.areas import SHARES, areas
from hooked_lm.analysis.rankings.board import Leaderboard
from hooked_lm.analysis.rankings.measure import leaderboard
from hooked_lm.analysis.rankings.methods import METHODS
from hooked_lm.analysis.rankings.selection import SELECTIONS, selected
from hooked_lm.analysis.rankings.task_rankings import TaskRankings
from hooked_lm.analysis.rankings.tasks import CircuitTask
from hooked_lm.analysis.rankings.truth import auroc, average_precision
from hooked_lm.keywords import answer_keywords

__all__ = [
    "METHODS",
    "SELECTIONS",
    "SHARES",
    "CircuitTask",
    "Leaderboard",
    "TaskRankings",
    "areas",
    "auroc",
    "average_precision",
    "leaderboard",
    "selected",
]

answer_keywords(__name__)
