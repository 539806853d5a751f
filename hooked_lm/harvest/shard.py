"""Computes one shard: forward passes of its rows, while another thread writes what they gave."""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooked_lm.harvest.documents import Documents, digest
from hooked_lm.harvest.forwards import Values, forwards
from hooked_lm.harvest.plan import HarvestPlan
from hooked_lm.harvest.rows import RowMaker
from hooked_lm.harvest.shard_file import Layout, ShardFile
from hooked_lm.interventions.statistics import Moments

AHEAD = 2  # batches that wait to be written


def write_shard(
    plan: HarvestPlan,
    documents: Documents,
    maker: RowMaker,
    folder: Path,
    shard: int,
    advance: Callable[[int], Any] = lambda n_tokens: None,
) -> dict[str, Any] | None:
    """Computes a shard, writes it and returns its record; None if the data set has no documents there.

    `advance` is called with the number of tokens after each batch. Raises FloatingPointError for values that are not finite.
    """
    start, end = plan.places(shard)
    texts = documents.between(start, end)
    if not texts:
        return None
    rows = maker.rows(texts, plan.has_labels)
    counts = [min(1, n) for n in rows.n_kept] if plan.reduce else rows.n_kept
    columns = rows.columns()
    if plan.reduce:
        last = torch.tensor(rows.n_kept, dtype=torch.long).cumsum(0)[torch.tensor(counts, dtype=torch.long) > 0] - 1
        columns = {name: column[last] for name, column in columns.items()}
    file = ShardFile(folder, shard, layout(plan, sum(counts)))
    try:
        moments = {site: moments_of(value.shape) for site, value in plan.values.items()}
        for name, column in columns.items():
            file.write(name, 0, column.to(plan.columns[name]))
        with Writer(plan, file, moments, counts) as writer:
            for which, values in forwards(rows, maker, [*plan.sites], plan.batch_size, plan.reduce, advance):
                writer.put(which, values)
        return file.commit(
            {
                "shard": shard,
                "documents": [start, start + len(texts)],
                "documents_sha256": digest(document for _, document in texts),
                "rows": len(rows.ids),
                "tokens": sum(counts),
                "is_last": plan.data["documents"] is None and len(texts) < end - start,
                "sites": {site: about(of) for site, of in moments.items()},
                **({"labels": rows.table} if plan.has_labels else {}),
            }
        )
    except BaseException:
        file.discard()
        raise


def layout(plan: HarvestPlan, n: int) -> Layout:
    """The tensors of a shard of `n` tokens."""
    found: dict[str, tuple[torch.dtype, list[int]]] = {name: (dtype, [n]) for name, dtype in plan.columns.items()}
    for site, value in plan.values.items():
        found |= {f"{site}{ending}": tensor for ending, tensor in value.tensors(n).items()}
    return found


class Writer:
    """A thread that writes the values of batches, while the next ones are computed."""

    def __init__(self, plan: HarvestPlan, file: ShardFile, moments: dict[str, Moments], counts: list[int]) -> None:
        self.plan, self.file, self.moments, self.counts = plan, file, moments, counts
        self.starts = [0, *torch.tensor(counts, dtype=torch.long).cumsum(0).tolist()]
        self.queue: queue.Queue[tuple[list[int], Values] | None] = queue.Queue(AHEAD)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Writer":
        self.thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.queue.put(None)
        self.thread.join()
        if self.error is not None and kind is None:
            raise self.error

    def put(self, which: list[int], values: Values) -> None:
        """Hands over the values of a batch. Raises what went wrong in the thread."""
        if self.error is not None:
            raise self.error
        self.queue.put((which, values))

    def _work(self) -> None:
        while (given := self.queue.get()) is not None:
            if self.error is None:
                try:
                    self._write(*given)
                except BaseException as error:  # the thread that computes raises it
                    self.error = error

    def _write(self, which: list[int], values: Values) -> None:
        for site, kept in values.items():
            stored = self.plan.values[site].stored(kept.cpu())
            restored = self.plan.values[site].restored(stored)
            self._count(site, restored.flatten(1))
            for ending, tensor in stored.items():
                at = 0
                for row in which:
                    self.file.write(f"{site}{ending}", self.starts[row], tensor[at : at + self.counts[row]])
                    at += self.counts[row]

    def _count(self, site: str, values: Shaped[Tensor, "token width"]) -> None:
        self.moments[site].add(values)
        if not bool(self.moments[site].mean.isfinite().all()):
            raise FloatingPointError(
                f"'{site}' has values that are not finite in {self.plan.sites[site]['dtype']}: nothing of this shard is kept; "
                "bfloat16 and float32 hold larger values than float16"
            )


def moments_of(shape: Sequence[int]) -> Moments:
    """Mean and M2 of vectors of a shape, without any yet."""
    return Moments(tuple(shape), torch.device("cpu"), covariance=False, edges=None)


def about(moments: Moments) -> dict[str, list[float]]:
    """Mean and M2, the sum of squared differences from the mean, as lists of the flattened vector."""
    return {"mean": moments.mean.tolist(), "m2": moments.spread.tolist()}
