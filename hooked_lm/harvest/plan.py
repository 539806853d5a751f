"""The plan of a harvest: everything that determines its files, written before the first forward pass of the corpus."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from hooked_lm import shards
from hooked_lm.harvest.documents import SAMPLE, Documents
from hooked_lm.harvest.rows import DocumentRows, RowMaker
from hooked_lm.harvest.stored_value import DTYPES, REDUCTIONS, StoredValue
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.shards.plan import check_counts, facts_of_model, name_of

OF_COLUMNS = 17  # bytes of the id, the document, the position and the flag of a token


@dataclass(frozen=True, repr=False)
class HarvestPlan(shards.Plan):
    """What a harvest computes: everything that determines its files.

    `sites` map each site to how its value is stored. The items are documents; a stream without a known end has as many as it
    gives.
    """

    rows: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    reduce: str | None
    tokens_per_document: float  # an estimate, from a sample
    KIND: ClassVar[str] = "harvest"
    FORMAT: ClassVar[str] = "hooked_lm.harvest"

    @property
    def n_items(self) -> int | None:
        return self.data["documents"]

    @property
    def values(self) -> dict[str, StoredValue]:
        """How the value of each site is stored."""
        return {site: StoredValue(**about) for site, about in self.sites.items()}

    @property
    def bytes_per_vector(self) -> int:
        """The bytes on disk of one token that is kept, at all sites, with its id, document, position and flag."""
        return sum(value.bytes_per_token for value in self.values.values()) + OF_COLUMNS

    def n_vectors(self, rows: DocumentRows) -> int:
        """How many vectors of each site are kept of these rows."""
        return len(rows.ids) if self.reduce else sum(rows.n_kept)


def planned(
    model: HookedRootModule,
    documents: Documents,
    sites: Site,
    rows: RowMaker,
    dtype: torch.dtype,
    reduce: str | None,
    batch_size: int,
    shard_bytes: int,
    documents_per_shard: int | None,
    threads: int | None = None,
) -> HarvestPlan:
    """The plan of a harvest; see `harvest` for the arguments.

    Raises ValueError for a site without one vector for each token, and for numbers out of range.
    """
    plan, _ = sketched(
        model, documents, sites, rows, dtype, reduce, batch_size, shard_bytes, documents_per_shard, threads
    )
    return replace(plan, model=facts_of_model(model), data=documents.about())


def sketched(
    model: HookedRootModule,
    documents: Documents,
    sites: Site,
    rows: RowMaker,
    dtype: torch.dtype,
    reduce: str | None,
    batch_size: int,
    shard_bytes: int,
    documents_per_shard: int | None = None,
    threads: int | None = None,
) -> tuple[HarvestPlan, DocumentRows]:
    """The plan without what identifies the model and the documents, and the rows of a sample; reads nothing else."""
    check_counts(
        batch_size=batch_size, shard_size=shard_bytes, documents_per_shard=documents_per_shard, threads=threads
    )
    if reduce is not None and reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(map(repr, REDUCTIONS))}, or None, got {reduce!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    n = documents.n_documents or SAMPLE
    step = max(1, n // SAMPLE)
    sample = [each for i in range(0, n, step)[:SAMPLE] for each in documents.between(i, i + 1)]
    found = rows.rows(sample)
    if not found.ids:
        raise ValueError(f"none of the first {len(sample)} documents has a token: there is nothing to harvest")
    if not sum(found.n_kept):
        longest = max(map(len, found.ids))
        raise ValueError(
            f"positions={rows.positions!r} keep no token of the first {len(sample)} documents, whose rows have up to {longest} "
            "tokens: there is nothing to harvest"
        )
    values = stored_values(model, sites, found.ids[0], dtype)
    plan = HarvestPlan(
        model={"name": name_of(model)},
        data={"kind": "sample", "documents": documents.n_documents},
        items_per_shard=1,
        batch_size=batch_size,
        threads=threads or torch.get_num_threads(),
        versions=shards.versions(),
        rows=_about_rows(rows),
        sites={site: asdict(value) for site, value in values.items()},
        reduce=reduce,
        tokens_per_document=sum(map(len, found.ids)) / len(sample),
    )
    per_document = plan.n_vectors(found) / len(sample)
    n_documents = documents_per_shard or max(1, round(shard_bytes / plan.bytes_per_vector / max(per_document, 1e-9)))
    return replace(plan, items_per_shard=min(n_documents, documents.n_documents or n_documents)), found


def _about_rows(rows: RowMaker) -> dict[str, Any]:
    given = rows.positions
    bos = (
        rows.model.tokens.default_prepend_bos
        if rows.prepend_bos is None and hasattr(rows.model, "tokens")
        else rows.prepend_bos
    )
    positions = (
        given
        if isinstance(given, str)
        else repr(given)
        if isinstance(given, slice)
        else torch.as_tensor(given).tolist()
    )
    return {"context": rows.context, "long": rows.long, "positions": positions, "prepend_bos": bos}


def stored_values(
    model: HookedRootModule, sites: Site, ids: Sequence[int], dtype: torch.dtype
) -> dict[str, StoredValue]:
    """How the value of each site is stored, found by a forward pass of one row."""
    names = [] if isinstance(sites, Sequence) and not sites else model.names(sites)
    if not names:
        raise ValueError(f"sites={sites!r} name no site: there is nothing to harvest")
    for name in names:
        dims = model.hook_dict[name].dims
        if dims[:2] != ("batch", "pos"):
            raise ValueError(
                f"'{name}' has {list(dims)}: a harvest keeps sites with one vector for each token [batch, pos, ...]"
            )
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        cache = model.run_with_cache(tokens, names_filter=names, return_cache_object=False, return_type=None)[1]
    if missing := [name for name in names if name not in cache]:
        raise ValueError(f"'{missing[0]}' was not reached in a forward pass, so that there is nothing to keep")
    kind = str(dtype).removeprefix("torch.")
    return {
        name: StoredValue(list(cache[name].shape[2:]), kind, list(model.hook_dict[name].dims[2:])) for name in names
    }
