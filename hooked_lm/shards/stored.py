"""The shards of a folder, as they are read."""

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from hooked_lm.callers import warn_caller
from hooked_lm.notebook_repr import NotebookRepr
from hooked_lm.shards.plan import Plan
from hooked_lm.shards.records import checksum, records


class Shards(NotebookRepr):
    """The shards in a folder that have a record, also of a job in progress.

    Raises FileNotFoundError for a folder without a plan, ValueError for a damaged one.
    """

    PLAN: ClassVar[type[Plan]]
    SUFFIX: ClassVar[str]  # of the files
    FIELDS: ClassVar[tuple[str, ...]] = ("bytes", "sha256")  # of the records that are kept

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan = self.PLAN.read(self.path)
        self._facts = records(self.path, self.FIELDS)
        self.shards = sorted(self._facts)

    @cached_property
    def missing(self) -> list[int]:
        """The shards of the plan that are not computed yet."""
        return sorted(set(range(self._n_shards)) - set(self.shards))

    @property
    def _n_shards(self) -> int:
        return self._n_known() if self.plan.n_shards is None else self.plan.n_shards

    def _n_known(self) -> int:
        """The number of shards of a stream, which is not in its plan."""
        raise AssertionError("streams have a reader of their own")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {n_shards(len(self.shards))}, {self._state})"

    @property
    def is_complete(self) -> bool:
        """Whether all shards of the plan are there."""
        return not self.missing

    @property
    def _state(self) -> str:
        return "complete" if self.is_complete else f"{n_shards(len(self.missing))} missing"

    def file_of(self, shard: int) -> Path:
        """The file of a shard. Raises ValueError if it has not the size that it was written with."""
        path, size = self.path / f"shard-{shard:06d}{self.SUFFIX}", self._facts[shard]["bytes"]
        if not path.exists() or path.stat().st_size != size:
            raise ValueError(f"{path} is damaged: it should have {size} bytes; `verify` names all such files")
        return path

    def verify(self) -> None:
        """Reads every file and compares it with its checksum.

        Raises ValueError that names all damaged shards. Warns if shards are missing.
        """
        self._check(lambda path, facts: checksum(path) == facts["sha256"])
        if not self.is_complete:
            warn_caller(
                f"{self.path} is not complete: the {len(self.shards)} shards that it has are as they were written, and "
                f"{len(self.missing)} are missing; the call that made it computes them"
            )
        self._verify_joined()

    def _verify_joined(self) -> None:
        """Raises ValueError for a file made of all shards that is not what they hold."""

    def check_sizes(self) -> None:
        """Raises ValueError that names all shards whose file is missing or has not the size that it was written with."""
        self._check(lambda path, facts: True)

    def _check(self, has_content: Callable[[Path, dict[str, Any]], bool]) -> None:
        wrong = []
        for shard in self.shards:
            path, facts = self.path / f"shard-{shard:06d}{self.SUFFIX}", self._facts[shard]
            if not path.exists():
                wrong.append(f"{path.name} is missing")
            elif path.stat().st_size != facts["bytes"]:
                wrong.append(f"{path.name} has {path.stat().st_size} bytes, not {facts['bytes']}")
            elif not has_content(path, facts):
                wrong.append(f"{path.name} has other content than was written")
        if wrong:
            raise ValueError(
                f"{len(wrong)} of {len(self.shards)} shards in {self.path} are damaged: {'; '.join(wrong[:10])}. Delete these "
                "files and their records, and run the same call again: only they are computed"
            )


def n_shards(n: int) -> str:
    """A number of shards in words.

    >>> n_shards(1), n_shards(3)
    ('1 shard', '3 shards')
    """
    return "1 shard" if n == 1 else f"{n} shards"
