"""Carries out a job: the shards of this process, or those of several workers."""

import os
from collections.abc import Iterator

from hooked_lm.shards.job import Job
from hooked_lm.shards.records import remove_leftovers
from hooked_lm.shards.workers import ENGINES

Part = tuple[int, int]


def carry_out(job: Job, part: Part | None, n_workers: int, engine: str, progress: bool | None) -> None:
    """Computes the shards of a part (i, n) that have no record; of all, or of the rank of torchrun, if it is None.

    Raises ValueError for an unknown engine, fewer than one worker and another part.
    """
    shards = shards_of(part or rank_of_torchrun(), job.plan.n_shards)
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(map(repr, ENGINES))}, got {engine!r}")
    if n_workers < 1:
        raise ValueError(f"n_workers must be at least 1, got {n_workers}")
    remove_leftovers(job.folder)
    if n_workers == 1 and engine == "processes":
        job.compute(shards, progress)
    else:
        ENGINES[engine](job, shards, n_workers, progress)
        remove_leftovers(job.folder)  # of workers that died


def shards_of(part: Part, n_shards: int | None) -> Iterator[int]:
    """The shards of a part (i, n): every n-th, from the i-th on; without end if their number is not known."""
    i, n = part
    if not (n >= 1 and 0 <= i < n):
        raise ValueError(f"part must be (i, n) with 0 <= i < n, got {part}")
    shard = i
    while n_shards is None or shard < n_shards:
        yield shard
        shard += n


def rank_of_torchrun() -> Part:
    """The part of a process that torchrun started; else everything."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
