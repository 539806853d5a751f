"""Cuts documents into rows of tokens that a model can read, and says which tokens are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.harvest.documents import Document
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.models.decoder import Decoder
from hooked_lm.shards.plan import check_integers

LONG = ("truncate", "split", "error")
TEXTS_AT_ONCE = 256  # as many texts are tokenized together


@dataclass(frozen=True)
class DocumentRows:
    """The rows of some documents: ids of each, the number of its document, and which of its tokens are kept."""

    ids: list[list[int]]
    documents: list[int]
    kept: list[Tensor]  # bool [pos]
    special: frozenset[int]

    @property
    def n_kept(self) -> list[int]:
        """How many tokens of each row are kept."""
        return [int(kept.sum()) for kept in self.kept]

    def columns(self) -> dict[str, Tensor]:
        """What is known of each token that is kept: its id, document, position in its row, and whether it is special."""
        ids = [torch.tensor(row)[kept] for row, kept in zip(self.ids, self.kept, strict=True)]
        tokens = torch.cat([*ids, torch.empty(0, dtype=torch.long)])
        documents = torch.tensor(self.documents, dtype=torch.long).repeat_interleave(
            torch.tensor(self.n_kept, dtype=torch.long)
        )
        positions = torch.cat([*(kept.nonzero()[:, 0] for kept in self.kept), torch.empty(0, dtype=torch.long)])
        is_special = torch.isin(tokens, torch.tensor(sorted(self.special), dtype=torch.long))
        return {
            "tokens": tokens.int(),
            "documents": documents,
            "positions": positions.int(),
            "is_special": is_special,
        }


@dataclass(frozen=True)
class RowMaker:
    """How documents become rows: see `harvest` for the arguments."""

    model: Any
    context: int
    long: str = "truncate"
    positions: str | Indices = "all"
    prepend_bos: bool | None = None

    def __post_init__(self) -> None:
        if self.long not in LONG:
            raise ValueError(f"long must be one of {', '.join(map(repr, LONG))}, got {self.long!r}")
        if isinstance(self.positions, str) and self.positions not in ("all", "text"):
            raise ValueError(f"positions must be 'all', 'text' or indices, got {self.positions!r}")
        if not isinstance(self.positions, str) and plain_indices("positions", self.positions) == []:
            raise ValueError("positions is empty: there is nothing to keep")
        check_integers(context=self.context)
        if not 1 <= self.context <= self.model.cfg.n_ctx:
            raise ValueError(
                f"context must be from 1 to the model's n_ctx of {self.model.cfg.n_ctx}, got {self.context}"
            )
        if self.long == "split" and not self._continues_texts:
            raise ValueError("long='split' cuts documents for decoders; this model marks the end of a text: truncate")

    def rows(self, documents: Sequence[tuple[int, Document]]) -> DocumentRows:
        """The rows of documents, in their order; documents without tokens have none."""
        found: list[list[int]] = []
        numbers: list[int] = []
        for number, ids in self._ids(documents):
            for row in self._cut(ids, number):
                found.append(row)
                numbers.append(number)
        special = self._special
        return DocumentRows(found, numbers, [self._kept(row, special) for row in found], special)

    @property
    def _continues_texts(self) -> bool:
        """Whether nothing marks the end of a text in the tokens of the model."""
        return isinstance(self.model, Decoder)

    @property
    def _special(self) -> frozenset[int]:
        tokenizer = getattr(self.model, "tokenizer", None)
        return frozenset(() if tokenizer is None else map(int, tokenizer.all_special_ids))

    def _ids(self, documents: Sequence[tuple[int, Document]]) -> list[tuple[int, list[int]]]:
        texts = [(number, text) for number, text in documents if isinstance(text, str) and text]
        found = {number: list(ids) for number, ids in documents if not isinstance(ids, str) and len(ids)}
        truncate = not self._continues_texts and self.long == "truncate"
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            tokens, mask = self.model.tokens.encode([text for _, text in some], self.prepend_bos, "right", truncate)
            for (number, _), row, real in zip(some, tokens, mask, strict=True):
                found[number] = row[real.bool()].tolist()
        return [(number, found[number]) for number, _ in documents if number in found]

    def _cut(self, ids: list[int], number: int) -> list[list[int]]:
        if len(ids) <= self.context:
            return [ids]
        if self.long == "error":
            raise ValueError(
                f"document {number} has {len(ids)} tokens, and the context {self.context}: long='truncate' or 'split'"
            )
        if self.long == "truncate":
            return [ids[: self.context]]
        bos = self._bos(ids)
        body, size = ids[len(bos) :], self.context - len(bos)
        if size < 1:
            raise ValueError(f"a context of {self.context} has no place beside the BOS token")
        return [[*bos, *body[start : start + size]] for start in range(0, len(body), size)]

    def _bos(self, ids: list[int]) -> list[int]:
        """The prefix of the row, which each part of it repeats."""
        if getattr(self.model, "tokenizer", None) is None:
            return []
        bos = self.model.tokens.bos_ids
        return bos if ids[: len(bos)] == bos else []

    def _kept(self, row: list[int], special: frozenset[int]) -> Bool[Tensor, " pos"]:
        if self.positions == "all":
            return torch.ones(len(row), dtype=torch.bool)
        if self.positions == "text":
            return torch.tensor([token not in special for token in row])
        assert not isinstance(self.positions, str)
        wanted = plain_indices("positions", self.positions)
        places = torch.arange(len(row))
        if isinstance(wanted, slice):
            return torch.isin(places, places[wanted])
        given = torch.tensor([wanted] if isinstance(wanted, int) else list(wanted or []), dtype=torch.long)
        return torch.isin(places, torch.where(given < 0, given + len(row), given))


def batched(rows: DocumentRows, batch_size: int) -> list[list[int]]:
    """Rows of similar lengths together: the indices of each batch, the longest rows first."""
    order = sorted(range(len(rows.ids)), key=lambda row: (-len(rows.ids[row]), row))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def padded_batch(
    rows: DocumentRows, which: Sequence[int], pad: int
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"] | None]:
    """The ids of rows, padded on the right, and the mask of real tokens; None if they have one length."""
    lengths = [len(rows.ids[row]) for row in which]
    tokens = torch.full((len(which), max(lengths)), pad)
    for i, row in enumerate(which):
        tokens[i, : lengths[i]] = torch.tensor(rows.ids[row])
    if min(lengths) == max(lengths):
        return tokens, None
    return tokens, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
