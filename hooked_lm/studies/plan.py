"""The plan of a study: everything that determines its table."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hooked_lm import shards


@dataclass(frozen=True)
class StudyPlan(shards.Plan):
    """What a study computes. The shards are ranges of `pairs_per_shard` pairs, in their order."""

    experiment: dict[str, Any]
    metric: list[str]
    batch_size: int
    threads: int
    pairs_per_shard: int
    versions: dict[str, str]
    KIND: ClassVar[str] = "study"
    FORMAT: ClassVar[str] = "hooked_lm.studies"

    @property
    def n_items(self) -> int:
        return self.data["pairs"]

    @property
    def per_shard(self) -> int:
        return self.pairs_per_shard

    @property
    def n_threads(self) -> int:
        return self.threads
