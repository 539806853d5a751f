"""What a harvest will cost, before it begins: tokens, bytes, and hours by a small shard that is timed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import torch

from hooked_lm.engine.budget import bytes_of
from hooked_lm.harvest.documents import SAMPLE, Document, Documents, InMemory, documents_of
from hooked_lm.harvest.plan import HarvestPlan, sketched
from hooked_lm.harvest.rows import RowMaker, row_maker
from hooked_lm.harvest.run import dtype_of
from hooked_lm.harvest.shard import write_shard
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.indices import Indices
from hooked_lm.hooks.select import Site
from hooked_lm.hooks.token_labels import Named
from hooked_lm.notebook_repr import NotebookRepr, Table, bytes_in_words
from hooked_lm.shards.plan import check_counts

__all__ = ["HarvestEstimate", "estimate_harvest"]


@dataclass(frozen=True, repr=False)
class HarvestEstimate(NotebookRepr):
    """The size of a harvest, and how long it takes; see `estimate_harvest`.

    Args:
        documents: the number of documents.
        tokens: the number of tokens that the model reads, BOS tokens included.
        vectors: how many vectors of each site are kept.
        bytes_by_site: the bytes on disk of each site, and of "ids and positions".
        shards: the number of files.
        tokens_per_second: of one process, as timed; None for a model without weights.
        share_cut: of the documents, those that fill the context with `long="truncate"`: what follows in them is left out.
    """

    documents: int
    tokens: int
    vectors: int
    bytes_by_site: dict[str, int]
    shards: int
    tokens_per_second: float | None
    share_cut: float = 0.0

    @property
    def bytes(self) -> int:
        """The bytes on disk."""
        return sum(self.bytes_by_site.values())

    @property
    def hours(self) -> float | None:
        """The hours of one process; n processes on as many devices take the n-th part."""
        return None if self.tokens_per_second is None else self.tokens / self.tokens_per_second / 3600

    def repr_table(self) -> Table:
        """The bytes of each site."""
        return Table(("", "on disk"), [(site, bytes_in_words(size)) for site, size in self.bytes_by_site.items()])

    def __repr__(self) -> str:
        took = (
            "not timed" if self.hours is None else f"{_duration(self.hours)} at {self.tokens_per_second:,.0f} tokens/s"
        )
        files = f"{self.shards:,} file{'s' * (self.shards != 1)}"
        cut = f" ({self.share_cut:.0%} fill the context and are cut, see long=)" if self.share_cut else ""
        read = f"{self.documents:,} documents{cut}, {self.tokens:,} tokens"
        return f"HarvestEstimate({read}: {bytes_in_words(self.bytes)} in {files}; {took})"


def estimate_harvest(
    model: HookedRootModule,
    documents: object,
    sites: Site,
    *,
    tokens_per_document: int | None = None,
    positions: str | Indices | Named = "all",
    dtype: str | torch.dtype = torch.float32,
    reduce: str | None = None,
    context: int | None = None,
    long: str = "truncate",
    chunk: int | str | None = None,
    prepend_bos: bool | None = None,
    template_options: Mapping[str, object] | None = None,
    column: str | None = None,
    max_documents: int | None = None,
    batch_size: int = 32,
    shard_size: int | str = "512MB",
) -> HarvestEstimate:
    """The tokens, bytes and hours of a harvest, from a sample of 1,000 documents and a small shard that is timed.

    Args:
        model: as for `harvest`; on the meta device, as `HookedTransformer(cfg)` with `device="meta"` builds it, it needs no
            memory, and nothing is timed.
        documents: as for `harvest`; or a number of documents, each with `tokens_per_document` tokens.

    The other arguments are those of `harvest`. Bytes are exact for the sample, up to the headers of files. The time is that of a
    shard that takes about a second, from documents to the disk of temporary files. Raises as `harvest`, and ValueError for a
    stream without `max_documents`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = estimate_harvest(
    ...     model, 1000, ("resid_post", 1), tokens_per_document=20, dtype="bfloat16"
    ... )
    >>> found.tokens, found.bytes == 20_000 * (128 * 2 + 17)
    (20000, True)
    """
    rows = row_maker(model, documents, context, long, positions, prepend_bos, template_options, chunk)
    if isinstance(documents, int):
        if tokens_per_document is None:
            raise ValueError(f"of {documents} documents nothing else is known: give tokens_per_document=")
        check_counts(documents=documents, tokens_per_document=tokens_per_document)
        known, n = documents_of([_unknown(model, tokens_per_document)]), documents
    else:
        known = documents_of(documents, column, max_documents)
        if known.n_documents is None:
            raise ValueError("a stream has no end that is known: give max_documents=, or a number of documents")
        n = known.n_documents
    settings = (dtype_of(dtype), reduce, batch_size, bytes_of(shard_size, "shard_size"))
    plan, sample = sketched(model, known, sites, rows, *settings)
    n_sampled = sum(map(len, sample.ids)) / plan.tokens_per_document
    vectors = round(plan.n_vectors(sample) / n_sampled * n)
    is_cut = [long == "truncate" and len(row) == rows.context for row in sample.ids]
    by_site = {site: value.bytes_per_token * vectors for site, value in plan.values.items()}
    return HarvestEstimate(
        n,
        round(plan.tokens_per_document * n),
        vectors,
        by_site | {"ids and positions": plan.bytes_of_columns * vectors},
        max(1, -(-vectors * plan.bytes_per_vector // settings[-1])),
        None if next(model.parameters()).is_meta else _speed(plan, known, rows),
        sum(is_cut) / len(is_cut),
    )


def _unknown(model: HookedRootModule, n: int) -> Document:
    """A document of `n` tokens, none of which is special."""
    special = set(getattr(getattr(model, "tokenizer", None), "all_special_ids", ()))
    return [next(token for token in range(len(special) + 1) if token not in special)] * n


def _speed(plan: HarvestPlan, documents: Documents, maker: RowMaker) -> float:
    """The tokens of a second in the first shard that takes a second, of 4, 16 or 64 batches, after one that warms up."""
    n, speed = plan.data["documents"] or SAMPLE, 0.0
    for n_batches in (1, 4, 16, 64):
        wanted = n_batches * plan.batch_size
        some = [text for i in range(0, n, max(1, n // wanted))[:wanted] for _, text in documents.between(i, i + 1)]
        few = InMemory(some * (-(-wanted // len(some))), wanted, seed=None)  # each is read several times
        timed = replace(plan, items_per_shard=wanted, data=plan.data | {"documents": wanted})
        tokens: list[int] = []
        with TemporaryDirectory() as folder:
            start = time.perf_counter()
            write_shard(timed, few, maker, timed.write(folder), 0, tokens.append)
            seconds = time.perf_counter() - start
        speed = sum(tokens) / seconds
        if n_batches > 1 and seconds > 1:
            break
    return speed


def _duration(hours: float) -> str:
    """A duration in the unit that suits it."""
    units: Sequence[tuple[str, float]] = (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))
    name, size = next((unit for unit in units if hours >= 2 * unit[1]), units[-1])
    return f"{hours / size:.3g} {name}"
