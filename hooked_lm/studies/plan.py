"""The plan of a study: everything that determines its table."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hooked_lm import shards


@dataclass(frozen=True, repr=False)
class StudyPlan(shards.Plan):
    """What a study computes. The items are pairs, in their order."""

    experiment: dict[str, Any]
    metric: list[str]
    KIND: ClassVar[str] = "study"
    FORMAT: ClassVar[str] = "hooked_lm.studies"

    @property
    def n_items(self) -> int:
        return self.data["pairs"]
