"""Work that is cut into shards: planned, computed by one process or many, resumed by the same call, and read."""

from hooked_lm.shards.job import Job, with_threads
from hooked_lm.shards.plan import Plan, facts_of_model, versions
from hooked_lm.shards.run import Part, carry_out, check_workers, part_of
from hooked_lm.shards.stored import Shards

__all__ = [
    "Job",
    "Part",
    "Plan",
    "Shards",
    "carry_out",
    "check_workers",
    "facts_of_model",
    "part_of",
    "versions",
    "with_threads",
]
