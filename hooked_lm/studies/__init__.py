"""Experiments on thousands of pairs of prompts: run by `study_pairs`, in shards, into one table that `PairTable` reads."""

from hooked_lm.keywords import answer_keywords
from hooked_lm.studies.pairs import Pair
from hooked_lm.studies.plan import StudyPlan
from hooked_lm.studies.run import study_pairs
from hooked_lm.studies.table import PairTable

__all__ = ["Pair", "PairTable", "StudyPlan", "study_pairs"]

answer_keywords(__name__)
