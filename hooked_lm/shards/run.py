"""Carries out a job: the shards of this process, or those of several workers."""

import os
import re
from collections.abc import Iterator

from hooked_lm.engine.fingerprint import modes
from hooked_lm.files import remove_leftovers
from hooked_lm.hooks import HookedRootModule
from hooked_lm.shards.job import Job
from hooked_lm.shards.plan import check_counts
from hooked_lm.shards.workers import EXECUTORS

Part = tuple[int, int]
"""Every n-th shard from the i-th on: (i, n)."""


def carry_out(job: Job, part: Part, n_workers: int, executor: str, progress: bool | None) -> None:
    """Computes the shards of a part (i, n) that have no record."""
    shards = shards_of(part, job.plan.n_shards)
    remove_leftovers(job.folder)
    if n_workers == 1 and executor == "processes":
        job.compute(shards, progress)
    else:
        EXECUTORS[executor](job, shards, n_workers, progress)
        remove_leftovers(job.folder)  # of workers that died


def check_workers(model: HookedRootModule, n_workers: int, executor: str) -> None:
    """Raises ValueError for an unknown executor, for fewer than one worker, and for several where something holds only here.

    A worker gets the model with the hooks of `add_hook`, but not the blocks that are open in this thread. Raises TypeError for a
    number that is not whole.
    """
    check_counts(n_workers=n_workers)
    if executor not in EXECUTORS:
        raise ValueError(f"executor must be one of {', '.join(map(repr, EXECUTORS))}, got {executor!r}")
    if (n_workers > 1 or executor != "processes") and (only_here := _open_blocks(model)):
        raise ValueError(
            f"workers would compute without {only_here}, which is open in this process only: call it outside of the block "
            "(hooks of model.add_hook reach workers), or compute in this process, with n_workers=1 and executor='processes'"
        )


def _open_blocks(model: HookedRootModule) -> str:
    """What holds in this thread and not in a worker; empty if nothing does."""
    points = model.all_points()
    for name, hooks in model.list_hooks().items():
        if not all(points[name].holds(hook) for hook in hooks):
            return f"the hooks at '{name}'"
        if any(getattr(hook.user_hook, "is_off_here", False) for hook in hooks):
            return f"the block in which a hook at '{name}' is disabled"
    return ", ".join(f"{mode} ({value})" for mode, value in modes().items())


def part_of(given: Part | str | None, name: str = "shard") -> Part:
    """A part (i, n), which may be given as "i/n"; None is that of the rank of torchrun, else everything.

    Raises ValueError, with the name of the argument, for anything else.

    >>> part_of("1/3"), part_of((1, 3)), part_of(None)
    ((1, 3), (1, 3), (0, 1))
    """
    if given is None:
        return rank_of_torchrun()
    match = re.fullmatch(r"(\d+)/(\d+)", given) if isinstance(given, str) else None
    numbers = match.groups() if match else given if isinstance(given, (tuple, list)) else ()
    if len(numbers) == 2 and all(isinstance(number, (int, str)) for number in numbers):
        i, n = map(int, numbers)
        if 0 <= i < n:
            return i, n
    raise ValueError(f"{name} must be (i, n) or 'i/n', integers with 0 <= i < n, got {given!r}")


def shards_of(part: Part, n_shards: int | None) -> Iterator[int]:
    """The shards of a part (i, n): every n-th, from the i-th on; without end if their number is not known."""
    shard, n = part
    while n_shards is None or shard < n_shards:
        yield shard
        shard += n


def rank_of_torchrun() -> Part:
    """The part of a process that torchrun started; else everything."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
