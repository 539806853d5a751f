"""The vectors of a store in a random order, to train a dictionary on."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.harvest.columns import Column
from hooked_lm.interventions.dictionaries.stream import stacked
from hooked_lm.shards.records import read_record, record_path


class ShuffledVectors:
    """The vectors of a store in a seeded random order, at nearly the speed of reading them in their own.

    The tokens of the store are cut into runs of neighbours. A buffer holds the runs of `buffer` bytes, drawn from the whole store
    without replacement, and its vectors are shuffled. So the vectors of a buffer come from `runs_per_buffer` places of the
    corpus, and each vector is seen once in an epoch. Every epoch has another order.

    It is a `Stream` of `hooked_lm.interventions.dictionaries.train_on`. Raises ValueError for an empty store.
    """

    def __init__(self, columns: Sequence[Column], buffer: int, run: int, seed: int, of_layers: bool = False) -> None:
        self.columns, self.store, self.seed, self.of_layers = list(columns), columns[0].store, seed, of_layers
        store = self.store
        if not len(store):
            raise ValueError(f"{store.path} has no tokens yet: there is nothing to read")
        size = sum(column.dtype.itemsize * torch.Size(column.shape[1:]).numel() for column in self.columns)
        self.run = max(1, min(run // size, len(store)))
        self.n_runs = -(-len(store) // self.run)
        self.runs_per_buffer = max(1, min(buffer // (size * self.run), self.n_runs))

    @property
    def buffers_per_epoch(self) -> int:
        """How many buffers hold the whole store."""
        return -(-self.n_runs // self.runs_per_buffer)

    def fill(self, number: int) -> tuple[Float[Tensor, "row *layer d_in"], Float[Tensor, "row *layer d_out"]]:
        """The shuffled vectors of a buffer, in float32; heads are flattened. Those of several layers are stacked."""
        epoch, place = divmod(number, self.buffers_per_epoch)
        order = torch.randperm(self.n_runs, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        runs = order[place * self.runs_per_buffer : (place + 1) * self.runs_per_buffer]
        sizes = [min(self.run, len(self.store) - run * self.run) for run in runs]
        rows = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + number))
        found = [self._read(column, runs, rows) for column in self.columns]
        return stacked(found, [column.name for column in self.columns], self.of_layers)

    def _read(self, column: "Column", runs: list[int], rows: Tensor) -> Float[Tensor, "row d"]:
        parts = [column[run * self.run : (run + 1) * self.run].flatten(1) for run in runs]
        return torch.cat(parts)[rows].float()

    def about(self) -> dict[str, Any]:
        """What identifies the vectors."""
        names = [column.name for column in self.columns]
        counts = {"shards": len(self.store.shards), "run": self.run, "runs_per_buffer": self.runs_per_buffer}
        shards = [
            read_record(record_path(self.store.path, shard), ("sha256",))["sha256"] for shard in self.store.shards
        ]
        identity = {"harvest": self.store.plan.digest, "sha256": hashlib.sha256("".join(shards).encode()).hexdigest()}
        if (selected := self.store._selected) is not None:
            identity["selected"] = hashlib.sha256(selected.numpy().tobytes()).hexdigest()
        return {**identity, "sites": names, "seed": self.seed, **counts}
