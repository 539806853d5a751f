"""A job: its plan, its folder, and the model that computes its shards."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

from hooked_lm.hooks import HookedRootModule
from hooked_lm.progress import progress_bar
from hooked_lm.shards.plan import Plan
from hooked_lm.shards.records import record_path

Advance = Callable[[int], object]  # is called with the number of units that were computed


class Job(ABC):
    """A job in its folder. Other processes compute shards of a pickled copy."""

    plan: Plan
    folder: Path
    model: HookedRootModule
    UNIT: ClassVar[str]  # of the progress

    @abstractmethod
    def write(self, shard: int, advance: Advance) -> bool:
        """Computes a shard and writes it with its record; False if the data end before it."""

    @abstractmethod
    def n_units(self, n_shards: int) -> int:
        """The progress of some shards, about."""

    def is_done(self, shard: int) -> bool:
        """Whether a shard has a record."""
        return record_path(self.folder, shard).exists()

    def left(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards that have no record; of data of known length."""
        return [shard for shard in shards if not self.is_done(shard)]

    def compute(self, shards: Iterable[int], progress: bool | None = None) -> None:
        """Computes those of the shards that have no record yet, with the threads of the plan; errors name the shard."""
        total = None
        if self.plan.n_shards is not None:
            shards = self.left(shards)
            total = self.n_units(len(shards))
        bar_of_work = progress_bar(self.plan.KIND, total, progress, unit=self.UNIT)
        with with_threads(self.plan.threads), bar_of_work as bar:
            for shard in shards:
                with naming(shard):
                    if not self.is_done(shard) and not self.write(shard, bar.update):
                        return  # the stream ended before


@contextmanager
def with_threads(n: int | None) -> Iterator[None]:
    """Computes with this number of threads on a CPU; None: with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def naming(shard: int) -> Iterator[None]:
    """Puts the number of the shard before the message of an error."""
    try:
        yield
    except Exception as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"shard {shard}: {error.args[0]}", *error.args[1:])
        raise
