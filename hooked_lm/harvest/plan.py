"""The plan of a harvest: everything that determines its files, written before the first forward pass of the corpus."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hooked_lm.engine.fingerprint import Digest
from hooked_lm.files import replacing
from hooked_lm.harvest.documents import SAMPLE, Documents
from hooked_lm.harvest.rows import RowMaker
from hooked_lm.harvest.stored_value import DTYPES, REDUCTIONS, StoredValue
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site

FORMAT = "hooked_lm.harvest"
VERSION = 1
FILE = "plan.json"


@dataclass(frozen=True)
class Plan:
    """What a harvest computes: everything that determines its files.

    `sites` map each site to how its value is stored. The shards are ranges of `documents_per_shard` places in the data set; of a
    stream without a known end as many as it has.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    rows: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    reduce: str | None
    batch_size: int
    threads: int
    documents_per_shard: int
    tokens_per_document: float  # an estimate, from a sample
    versions: dict[str, str]

    @property
    def n_shards(self) -> int | None:
        """The number of shards; None for a stream whose end is not known."""
        n_documents = self.data["documents"]
        return None if n_documents is None else -(-n_documents // self.documents_per_shard)

    def documents(self, shard: int) -> tuple[int, int]:
        """The range of documents of a shard, by their places."""
        start, n_documents = shard * self.documents_per_shard, self.data["documents"]
        end = start + self.documents_per_shard
        return start, end if n_documents is None else min(end, n_documents)

    @property
    def values(self) -> dict[str, StoredValue]:
        """How the value of each site is stored."""
        return {site: StoredValue(**about) for site, about in self.sites.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """The content of the plan's file but for its hash."""
        n = self.n_shards
        shards = None if n is None else [list(self.documents(shard)) for shard in range(n)]
        return {"format": FORMAT, "version": VERSION, **asdict(self), "shards": shards}

    @property
    def digest(self) -> str:
        """A hash of the plan."""
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()

    @property
    def text(self) -> str:
        """The content of the plan's file."""
        return json.dumps({**self.facts, "sha256": self.digest}, indent=1) + "\n"

    def folder(self, directory: str | os.PathLike[str]) -> Path:
        """The folder of this harvest in a directory: the model's name and a part of the plan's hash."""
        name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(self.model["name"]).name or "model")
        return Path(directory) / f"{name[:60]}-{self.digest[:16]}"

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """The folder of this harvest, made with its plan if it does not exist."""
        folder = self.folder(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            with replacing(folder / FILE) as unfinished:
                unfinished.write_text(self.text)
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())
        elif (folder / FILE).read_text() != self.text:
            raise ValueError(f"{folder / FILE} was changed: it is not the plan that the folder is named after")
        return folder

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Plan":
        """The plan in a folder. Raises FileNotFoundError without one, ValueError for a damaged one."""
        path = Path(folder) / FILE
        if not path.exists():
            raise FileNotFoundError(f"{folder} has no {FILE}: it is not the folder of a harvest")
        try:
            read = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged: it is not JSON ({error})") from None
        if (read.pop("format", None), read.pop("version", None)) != (FORMAT, VERSION):
            raise ValueError(f"{path} is not the plan of a harvest in format {FORMAT}, version {VERSION}")
        digest, _ = read.pop("sha256", None), read.pop("shards", None)
        plan = cls(**read)
        if plan.digest != digest:
            raise ValueError(f"{path} was changed since it was written: its hash is {plan.digest[:12]}, not {digest}")
        return plan


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
) -> Plan:
    """The plan of a harvest; see `harvest` for the arguments.

    Raises ValueError for a site without one vector for each token, and for numbers out of range.
    """
    for name, number in (
        ("batch_size", batch_size),
        ("shard_size", shard_bytes),
        ("documents_per_shard", documents_per_shard),
        ("threads", threads),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
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
    values = stored_values(model, sites, found.ids[0], dtype)
    n_vectors = len(found.ids) if reduce else sum(found.n_kept)
    size = sum(value.bytes_per_token for value in values.values()) + 17  # of ids, documents, positions and flags
    per_shard = documents_per_shard or max(1, round(shard_bytes / size / max(n_vectors / len(sample), 1e-9)))
    tokenizer = getattr(model, "tokenizer", None)
    return Plan(
        model={
            "name": str(getattr(model.cfg, "model_name", None) or type(model).__name__),
            "sha256": Digest().of(model).hex(),
            "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
            "device": next(model.parameters()).device.type,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        },
        data=documents.about(),
        rows=_about_rows(rows),
        sites={site: asdict(value) for site, value in values.items()},
        reduce=reduce,
        batch_size=batch_size,
        threads=threads or torch.get_num_threads(),
        documents_per_shard=min(per_shard, documents.n_documents or per_shard),
        tokens_per_document=sum(map(len, found.ids)) / len(sample),
        versions={"hooked_lm": version("hooked-lm"), "torch": str(torch.__version__)},
    )


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
    names = model.names(sites)
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


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of what a tokenizer does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()
