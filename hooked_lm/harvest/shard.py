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
from hooked_lm.harvest.plan import HarvestPlan
from hooked_lm.harvest.rows import DocumentRows, RowMaker, batched, padded_batch
from hooked_lm.harvest.shard_file import Layout, ShardFile
from hooked_lm.harvest.stored_value import REDUCTIONS
from hooked_lm.interventions.statistics import Moments

COLUMNS = {
    "tokens": torch.int32, "documents": torch.int64, "positions": torch.int32, "is_special": torch.bool,
}  # fmt: skip
AHEAD = 2  # batches that wait to be written

Values = dict[str, Tensor]


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
    rows = maker.rows(texts)
    counts = [min(1, n) for n in rows.n_kept] if plan.reduce else rows.n_kept
    columns = rows.columns()
    if plan.reduce:
        last = torch.tensor(rows.n_kept, dtype=torch.long).cumsum(0)[torch.tensor(counts, dtype=torch.long) > 0] - 1
        columns = {name: column[last] for name, column in columns.items()}
    file = ShardFile(folder, shard, layout(plan, sum(counts)))
    try:
        moments = {site: moments_of(value.shape) for site, value in plan.values.items()}
        for name, column in columns.items():
            file.write(name, 0, column.to(COLUMNS[name]))
        with Writer(plan, file, moments, counts) as writer:
            for which, values in forwards(plan, rows, maker, advance):
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
            }
        )
    except BaseException:
        file.discard()
        raise


def layout(plan: HarvestPlan, n: int) -> Layout:
    """The tensors of a shard of `n` tokens."""
    found: dict[str, tuple[torch.dtype, list[int]]] = {name: (dtype, [n]) for name, dtype in COLUMNS.items()}
    for site, value in plan.values.items():
        found |= {f"{site}{ending}": tensor for ending, tensor in value.tensors(n).items()}
    return found


@torch.no_grad()
def forwards(plan: HarvestPlan, rows: DocumentRows, maker: RowMaker, advance: Callable[[int], Any]) -> Any:
    """Yields the rows of each batch, and the values of the tokens that are kept of them, row after row."""
    model = maker.model
    device = next(model.parameters()).device
    sites = list(plan.sites)
    pad = 0 if getattr(model, "tokenizer", None) is None else model.tokens.pad_id
    options = {"names_filter": sites, "return_cache_object": False, "return_type": None}
    for which in batched(rows, plan.batch_size):
        tokens, mask = padded_batch(rows, which, pad)
        masked = {} if mask is None else {"attention_mask": mask.long().to(device)}
        _, cache = model.run_with_cache(tokens.to(device), **options, **masked)
        yield which, {site: _kept(cache[site], rows, which, plan) for site in sites}
        advance(sum(len(rows.ids[row]) for row in which))


def _kept(value: Tensor, rows: DocumentRows, which: list[int], plan: HarvestPlan) -> Tensor:
    """The vectors that are kept of a batch, row after row, or one for each row."""
    longest = value.shape[1]
    kept = torch.zeros(len(which), longest, dtype=torch.bool)
    for i, row in enumerate(which):
        kept[i, : len(rows.kept[row])] = rows.kept[row]
    if plan.reduce is None:
        return value.flatten(0, 1) if bool(kept.all()) else value[kept.to(value.device)]
    reduced = [
        REDUCTIONS[plan.reduce](own[k.to(own.device)]) for own, k in zip(value, kept, strict=True) if bool(k.any())
    ]
    return torch.stack(reduced) if reduced else value[:0, 0]


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
