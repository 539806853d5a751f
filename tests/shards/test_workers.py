"""After an error in one of several workers none begins another shard, and the user reads which shard it was."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from hooked_lm import HookedTransformer
from hooked_lm.shards import Job, Plan, carry_out
from hooked_lm.shards.records import record_path, write_record

N_SHARDS, N_WORKERS, N_GOOD = 60, 2, 5


@dataclass(frozen=True)
class NumbersPlan(Plan):
    KIND: ClassVar[str] = "test"
    FORMAT: ClassVar[str] = "hooked_lm.test"

    @property
    def n_items(self) -> int | None:
        return self.data["n"]


@dataclass
class Numbers(Job):
    """Shards that say when they began. After some, one fails while all workers have one in hand; the others take a while."""

    plan: NumbersPlan
    folder: Path
    model: HookedTransformer
    UNIT: ClassVar[str] = "numbers"

    def n_units(self, n_shards: int) -> int:
        return n_shards

    def write(self, shard: int, advance: Callable[[int], object]) -> bool:
        (self.folder / f"began-{shard}").write_text(repr(time.monotonic()))
        (self.folder / f"worker-{os.getpid()}").touch()
        if shard >= N_SHARDS:
            return False
        if shard >= N_GOOD:
            self._wait_for_all_workers()
            if self._is_first_to_fail(shard):
                raise ZeroDivisionError("a number is zero")
            time.sleep(0.3)
        write_record(record_path(self.folder, shard), {})
        return True

    def _wait_for_all_workers(self) -> None:
        end = time.monotonic() + 60
        while len(list(self.folder.glob("worker-*"))) < N_WORKERS and time.monotonic() < end:
            time.sleep(0.01)

    def _is_first_to_fail(self, shard: int) -> bool:
        try:
            with (self.folder / "failed").open("x") as file:
                json.dump([shard, time.monotonic()], file)
        except FileExistsError:
            return False
        return True


@pytest.mark.slow
@pytest.mark.xdist_group("harvest workers")
@pytest.mark.parametrize("n", [N_SHARDS, None], ids=["known number", "stream"])
def test_no_shard_begins_after_an_error(tmp_path: Path, n: int | None) -> None:
    model = HookedTransformer.from_pretrained("demo")
    about = {"name": "demo", "device": "cpu"}
    plan = NumbersPlan(about, {"n": n}, items_per_shard=1, batch_size=1, threads=1, versions={})
    job = Numbers(plan, plan.write(tmp_path), model)
    with pytest.raises(ZeroDivisionError, match=r"^shard \d+: a number is zero") as raised:
        carry_out(job, (0, 1), N_WORKERS, "processes", progress=False)
    shard, failed = json.loads((job.folder / "failed").read_text())
    assert str(raised.value).startswith(f"shard {shard}:")
    began = [float(path.read_text()) for path in job.folder.glob("began-*")]
    # the other worker may have begun one just before it could know
    assert sum(when > failed for when in began) <= N_WORKERS - 1
    assert len(began) < N_SHARDS / 2
    assert len(list(job.folder.glob("shard-*.json"))) == len(began) - 1  # those in hand are complete
