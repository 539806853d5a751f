"""The activations of a store as a data set of Hugging Face, or of torch."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import Dataset

from hooked_lm.callers import warn_caller
from hooked_lm.harvest.columns import Column, Columns, LabelColumn
from hooked_lm.hooks.token_labels import KEYS, PADDING, Labels, TokenLabel

TOKENS_AT_ONCE = 4096
KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "float32"}  # Arrow has no bfloat16


def by_token(store: Columns, sites: Sequence[str]) -> Any:
    """A `datasets.Dataset` with an example for each token: its vectors, heads flattened, and what is known of it."""
    datasets = _datasets()
    features = {site: _vector(datasets, store[site]) for site in sites}
    kinds = {torch.int32: "int32", torch.int64: "int64", torch.bool: "bool"}
    features |= {name: datasets.Value(kinds[dtype]) for name, dtype in store.plan.columns.items()}
    if store.plan.has_labels:
        features["labels"] = dict(zip(KEYS, map(datasets.Value, ("int32", "string", "string")), strict=True))

    def examples() -> Iterator[dict[str, Any]]:
        for start in range(0, len(store), TOKENS_AT_ONCE):
            some = {name: _plain(store[name][start : start + TOKENS_AT_ONCE]) for name in features}
            yield from (dict(zip(some, row, strict=True)) for row in zip(*some.values(), strict=True))

    return datasets.Dataset.from_generator(examples, features=datasets.Features(features))


def by_row(store: Columns, sites: Sequence[str]) -> Any:
    """A `datasets.Dataset` in the schema of SAELens: an example for each row of the full context.

    Each site is an array [context, d_in], heads flattened; "token_ids" are the row's tokens. Shorter rows are left out, with a
    warning. Raises ValueError if there is no other.
    """
    datasets = _datasets()
    context = store.plan.rows["context"]
    starts = rows_of(store)
    whole = [start for start, end in starts if end - start == context]
    if not whole:
        raise ValueError(f"no row has the full context of {context} tokens: harvest with context=... or long='split'")
    if len(whole) < len(starts):
        warn_caller(f"{len(starts) - len(whole)} of {len(starts)} rows are shorter than {context} tokens")
    widths = {site: torch.Size(store[site].shape[1:]).numel() for site in sites}
    features = {site: datasets.Array2D((context, width), KINDS[store[site].dtype]) for site, width in widths.items()}
    features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context)

    def examples() -> Iterator[dict[str, Any]]:
        for start in whole:
            row = slice(start, start + context)
            yield {site: _plain(store[site][row]) for site in sites} | {"token_ids": store["tokens"][row].tolist()}

    return datasets.Dataset.from_generator(examples, features=datasets.Features(features))


def rows_of(store: Columns) -> list[tuple[int, int]]:
    """The first token of each row, and the one after its last."""
    documents, positions = store["documents"][:], store["positions"][:]
    begins = (documents[1:] != documents[:-1]) | (positions[1:] <= positions[:-1])
    bounds = [0, *(begins.nonzero()[:, 0] + 1).tolist(), len(store)]
    return [] if not len(store) else list(pairwise(bounds))


def row_batches(
    store: Columns, site: str, size: int
) -> Iterator[tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], list[Labels] | None, list[int], Tensor]]:
    """The rows of a store, `size` at a time: ids, the mask of the tokens that are stored, labels, documents, values of a site.

    A column is a position in the row. Tokens that are not stored have the id 0, as padding has.
    """
    if store.plan.reduce is not None:
        raise ValueError(
            f"{store.path} has one vector of each row (reduce={store.plan.reduce!r}), and no tokens around it"
        )
    values, starts = store[site], rows_of(store)
    for first in range(0, len(starts), size):
        some = starts[first : first + size]
        places = [store["positions"][start:end].long() for start, end in some]
        n = int(max(place[-1] for place in places)) + 1
        ids, mask = torch.zeros(len(some), n, dtype=torch.long), torch.zeros(len(some), n, dtype=torch.bool)
        found = torch.zeros(len(some), n, *values.shape[1:], dtype=values.dtype)
        labels = [[PADDING] * n for _ in some] if store.plan.has_labels else None
        for i, ((start, end), place) in enumerate(zip(some, places, strict=True)):
            ids[i, place], mask[i, place], found[i, place] = store["tokens"][start:end].long(), True, values[start:end]
            if labels is not None:
                for position, label in zip(place.tolist(), store["labels"][start:end], strict=True):
                    labels[i][position] = label
        documents = [int(store["documents"][start]) for start, _ in some]
        yield ids, mask, None if labels is None else [*labels], documents, found


class TokenDataset(Dataset[dict[str, Any]]):
    """A data set of torch with an example for each token; read many at once with a `BatchSampler`, as `__getitems__` does."""

    def __init__(self, store: Columns, names: Sequence[str]) -> None:
        self.columns: dict[str, Column | LabelColumn] = {name: store[name] for name in names}
        self.n = len(store)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, token: int) -> dict[str, Any]:
        return {name: column[token] for name, column in self.columns.items()}

    def __getitems__(self, tokens: list[int]) -> list[dict[str, Any]]:
        found = {name: column[tokens] for name, column in self.columns.items()}
        return [{name: values[i] for name, values in found.items()} for i in range(len(tokens))]


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError(
            "a data set of Hugging Face needs the package datasets: pip install 'hooked-lm[corpus]'"
        ) from None
    return datasets


def _vector(datasets: Any, column: Column) -> Any:
    return datasets.Sequence(datasets.Value(KINDS[column.dtype]), length=torch.Size(column.shape[1:]).numel())


def _plain(values: Tensor | Sequence[TokenLabel]) -> Any:
    if not isinstance(values, Tensor):
        return [label._asdict() for label in values]
    if values.dtype == torch.bfloat16:
        values = values.float()
    return values.flatten(1).numpy() if values.ndim > 1 else values.tolist()
