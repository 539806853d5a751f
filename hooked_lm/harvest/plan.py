"""The plan of a harvest: everything that determines its files, written before the first forward pass of the corpus."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from hooked_lm import shards
from hooked_lm.harvest.documents import SAMPLE, Documents
from hooked_lm.harvest.forwards import forwards
from hooked_lm.harvest.rows import DocumentRows, RowMaker
from hooked_lm.harvest.stored_value import DTYPES, REDUCTIONS, StoredValue
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.indices import Indices
from hooked_lm.hooks.select import Site
from hooked_lm.hooks.token_labels import Named, is_named
from hooked_lm.shards.plan import check_counts, facts_of_model, name_of

COLUMNS = {
    "tokens": torch.int32, "documents": torch.int64, "positions": torch.int32, "is_special": torch.bool,
}  # fmt: skip
OF_CONVERSATIONS = {"labels": torch.int32, "n_turns": torch.int32}


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
    def has_labels(self) -> bool:
        """Whether the documents are conversations, of which the role of each token is stored."""
        return "template" in self.rows

    @property
    def columns(self) -> dict[str, torch.dtype]:
        """What is stored of each token that is kept, beside its vectors."""
        return COLUMNS | (OF_CONVERSATIONS if self.has_labels else {})

    @property
    def bytes_of_columns(self) -> int:
        """The bytes of these columns of one token."""
        return sum(dtype.itemsize for dtype in self.columns.values())

    @property
    def bytes_per_vector(self) -> int:
        """The bytes on disk of one token that is kept, at all sites, with its columns."""
        return sum(value.bytes_per_token for value in self.values.values()) + self.bytes_of_columns

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
    values = stored_values(rows, found, sites, dtype)
    plan = HarvestPlan(
        model={"name": name_of(model)},
        data={"kind": "sample", "documents": documents.n_documents},
        items_per_shard=1,
        batch_size=batch_size,
        threads=threads or torch.get_num_threads(),
        versions=shards.versions(),
        rows=_about_rows(rows, found.labels is not None),
        sites={site: asdict(value) for site, value in values.items()},
        reduce=reduce,
        tokens_per_document=sum(map(len, found.ids)) / len(sample),
    )
    per_document = plan.n_vectors(found) / len(sample)
    n_documents = documents_per_shard or max(1, round(shard_bytes / plan.bytes_per_vector / max(per_document, 1e-9)))
    return replace(plan, items_per_shard=min(n_documents, documents.n_documents or n_documents)), found


def _about_rows(rows: RowMaker, are_conversations: bool) -> dict[str, Any]:
    tokens = getattr(rows.model, "tokens", None)
    bos = tokens.default_prepend_bos if rows.prepend_bos is None and tokens is not None else rows.prepend_bos
    about = {"context": rows.context, "long": rows.long, "positions": _about_positions(rows.positions)}
    about |= {} if rows.chunk is None else {"chunk": rows.chunk}
    if not are_conversations:
        return {**about, "prepend_bos": bos}
    template = json.dumps(rows.model.tokenizer.chat_template).encode()
    return {**about, "template": {"sha256": hashlib.sha256(template).hexdigest(), **rows.template_options}}


def _about_positions(given: str | Indices | Named) -> Any:
    if isinstance(given, str) or is_named(given):
        return dict(given) if isinstance(given, Mapping) else given
    return repr(given) if isinstance(given, slice) else torch.as_tensor(given).tolist()


def stored_values(maker: RowMaker, rows: DocumentRows, sites: Site, dtype: torch.dtype) -> dict[str, StoredValue]:
    """How the value of each site is stored, found by a forward pass of one row."""
    model = maker.model
    names = [] if isinstance(sites, Sequence) and not sites else model.names(sites)
    if not names:
        raise ValueError(f"sites={sites!r} name no site: there is nothing to harvest")
    for name in names:
        dims = model.hook_dict[name].dims
        if dims[:2] != ("batch", "pos"):
            raise ValueError(
                f"'{name}' has {list(dims)}: a harvest keeps sites with one vector for each token [batch, pos, ...]"
            )
    _, values = next(forwards(rows.first, maker, names, 1))
    kind = str(dtype).removeprefix("torch.")
    return {
        name: StoredValue(list(values[name].shape[1:]), kind, list(model.hook_dict[name].dims[2:])) for name in names
    }
