"""Cuts documents into rows of tokens that a model can read, and says which tokens are kept."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.harvest.documents import Document, named
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.hooks.token_labels import (
    PARTS,
    ROLES,
    Labels,
    Named,
    TokenLabel,
    check_named,
    find_positions,
    is_named,
    n_turns,
)
from hooked_lm.models.budget import memory_of
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.shards.plan import check_counts, check_integers

LONG = ("truncate", "split", "error")
TEXTS_AT_ONCE = 256  # as many texts are tokenized together


@dataclass(frozen=True)
class DocumentRows:
    """The rows of some documents: ids of each, the number of its document, and which of its tokens are kept.

    Of conversations also the label of each token, and the number of turns of the whole conversation.
    """

    ids: list[list[int]]
    documents: list[int]
    kept: list[Tensor]  # bool [pos]
    special: frozenset[int]
    labels: list[Labels] | None = None
    n_turns: list[int] = field(default_factory=list)

    @property
    def n_kept(self) -> list[int]:
        """How many tokens of each row are kept."""
        return [int(kept.sum()) for kept in self.kept]

    @property
    def first(self) -> "DocumentRows":
        """The first row, of which the last token is kept."""
        kept = torch.arange(len(self.ids[0])) == len(self.ids[0]) - 1
        labels = None if self.labels is None else self.labels[:1]
        return DocumentRows(self.ids[:1], self.documents[:1], [kept], self.special, labels, self.n_turns[:1])

    @cached_property
    def table(self) -> list[TokenLabel]:
        """The labels that there are: the column "labels" has their places here."""
        return sorted({label for row in self.labels or () for label in row})

    def columns(self) -> dict[str, Tensor]:
        """What is known of each token that is kept: its id, document, position in its row, and whether it is special."""
        tokens = self._kept([torch.tensor(row) for row in self.ids])
        is_special = torch.isin(tokens, torch.tensor(sorted(self.special), dtype=torch.long))
        positions = torch.cat([*(kept.nonzero()[:, 0] for kept in self.kept), torch.empty(0, dtype=torch.long)])
        columns = {"tokens": tokens, "documents": self._of_rows(self.documents), "positions": positions}
        if self.labels is not None:
            codes = {label: code for code, label in enumerate(self.table)}
            columns["labels"] = self._kept([torch.tensor([codes[label] for label in row]) for row in self.labels])
            columns["n_turns"] = self._of_rows(self.n_turns)
        return {**columns, "is_special": is_special}

    def _kept(self, values: Sequence[Tensor]) -> Int[Tensor, " token"]:
        """A number of each token, of those that are kept."""
        parts = (row[kept] for row, kept in zip(values, self.kept, strict=True))
        return torch.cat([*parts, torch.empty(0, dtype=torch.long)])

    def _of_rows(self, values: Sequence[int]) -> Int[Tensor, " token"]:
        """A number of each row, for each token that is kept."""
        counts = torch.tensor(self.n_kept, dtype=torch.long)
        return torch.tensor(values, dtype=torch.long).repeat_interleave(counts)


@dataclass(frozen=True)
class RowMaker:
    """How documents become rows: see `harvest` for the arguments."""

    model: Any
    context: int
    long: str = "truncate"
    positions: str | Indices | Named = "all"
    prepend_bos: bool | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    chunk: int | str | None = None

    def __post_init__(self) -> None:
        if self.long not in LONG:
            raise ValueError(f"long must be one of {', '.join(map(repr, LONG))}, got {self.long!r}")
        if is_named(self.positions):
            check_named(self.positions)
        elif isinstance(self.positions, str) and self.positions not in ("all", "text"):
            names = ", ".join((*ROLES, *PARTS))
            raise ValueError(
                f"positions must be 'all', 'text' or indices, or of conversations one of {names}; got {self.positions!r}"
            )
        elif not isinstance(self.positions, str) and plain_indices("positions", self.positions) == []:
            raise ValueError("positions is empty: there is nothing to keep")
        check_integers(context=self.context)
        if isinstance(self.chunk, str):
            memory_of(self.chunk, self.model.device, "chunk")
        else:
            check_counts(chunk=self.chunk)
        if not 1 <= self.context <= self.model.cfg.n_ctx:
            raise ValueError(
                f"context must be from 1 to the model's n_ctx of {self.model.cfg.n_ctx}, got {self.context}"
            )
        if self.long == "split" and not self._continues_texts:
            raise ValueError("long='split' cuts documents for decoders; this model marks the end of a text: truncate")
        if self.chunk is not None and not self._continues_texts:
            raise ValueError("chunk= reads documents piece by piece, which decoders do: omit chunk for this model")
        try:
            json.dumps(dict(self.template_options))
        except (TypeError, ValueError) as error:
            raise TypeError(f"template_options are kept in the plan, as JSON: {error}") from None

    def rows(self, documents: Sequence[tuple[int, Document]], are_conversations: bool | None = None) -> DocumentRows:
        """The rows of documents, in their order; documents without tokens have none.

        All of them are conversations, or none is: `are_conversations` says which, and by default the first one.
        """
        is_first = [isinstance(document, Mapping) for _, document in documents[:1]]
        are_conversations = is_first == [True] if are_conversations is None else are_conversations
        for number, document in documents:
            if isinstance(document, Mapping) != are_conversations:
                kinds = ("conversation", "text")[:: 1 if are_conversations else -1]
                raise ValueError(f"document {number} is a {kinds[1]}, and the first is a {kinds[0]}: give one kind")
        read = self._conversations(documents) if are_conversations else self._texts(documents)
        special, found = self._special, DocumentRows([], [], [], self._special, [] if are_conversations else None)
        for number, ids, labels in read:
            chosen = self._chosen(labels)
            for places in self._cut(ids, number):
                row = [ids[i] for i in places]
                found.ids.append(row)
                found.documents.append(number)
                found.kept.append(self._kept(row, special) if chosen is None else chosen[places])
                if found.labels is not None and labels is not None:
                    found.labels.append([labels[i] for i in places])
                    found.n_turns.append(n_turns(labels))
        return found

    @property
    def _continues_texts(self) -> bool:
        """Whether nothing marks the end of a text in the tokens of the model."""
        return isinstance(self.model, Decoder)

    @property
    def _special(self) -> frozenset[int]:
        tokenizer = getattr(self.model, "tokenizer", None)
        return frozenset(() if tokenizer is None else map(int, tokenizer.all_special_ids))

    def _texts(self, documents: Sequence[tuple[int, Document]]) -> Iterator[tuple[int, list[int], None]]:
        """The number and the ids of each document with tokens."""
        if is_named(self.positions):
            raise ValueError(f"positions={self.positions!r}: document {documents[0][0]} is a text, which has no roles")
        if self.template_options:
            raise ValueError(f"template_options are of conversations, and document {documents[0][0]} is a text")
        texts = [(number, text) for number, text in documents if isinstance(text, str) and text]
        found = {number: list(ids) for number, ids in documents if not isinstance(ids, (str, Mapping)) and len(ids)}
        truncate = not self._continues_texts and self.long == "truncate"
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            tokens, mask = self.model.tokens.encode([text for _, text in some], self.prepend_bos, "right", truncate)
            for (number, _), row, real in zip(some, tokens, mask, strict=True):
                found[number] = row[real.bool()].tolist()
        yield from ((number, found[number], None) for number, _ in documents if number in found)

    def _conversations(self, documents: Sequence[tuple[int, Document]]) -> Iterator[tuple[int, list[int], Labels]]:
        """The number of each document, its ids, and what its tokens are."""
        if self.prepend_bos is not None:
            raise ValueError("prepend_bos is of texts: the chat template says how a conversation begins")
        for number, document in documents:
            assert isinstance(document, Mapping)
            with named(number):
                chat = self.model.chat(**{**self.template_options, **document})
            yield number, chat.tokens[0].tolist(), chat.labels[0]

    def _chosen(self, labels: Labels | None) -> Bool[Tensor, " pos"] | None:
        """Which tokens of a whole conversation the named positions select, maybe none; None for other positions."""
        if labels is None or not is_named(self.positions):
            return None
        found = torch.zeros(len(labels), dtype=torch.bool)
        found[find_positions(labels, self.positions)] = True
        return found

    def _cut(self, ids: list[int], number: int) -> list[list[int]]:
        """The places in a document of the tokens of each row."""
        n = len(ids)
        if n <= self.context:
            return [[*range(n)]]
        if self.long == "error":
            raise ValueError(
                f"document {number} has {n} tokens, and the context {self.context}: long='truncate' or 'split'"
            )
        if self.long == "truncate":
            return [[*range(self.context)]]
        n_bos = len(self._bos(ids))
        size = self.context - n_bos
        if size < 1:
            raise ValueError(f"a context of {self.context} has no place beside the BOS token")
        return [[*range(n_bos), *range(start, min(start + size, n))] for start in range(n_bos, n, size)]

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


def row_maker(
    model: HookedRootModule,
    documents: object,
    context: int | None,
    long: str,
    positions: str | Indices | Named,
    prepend_bos: bool | None,
    template_options: Mapping[str, object] | None,
    chunk: int | str | None,
) -> RowMaker:
    """How the documents that are given become rows; a `Chat` has options of its template."""
    options = {**(documents.options if isinstance(documents, Chat) else {}), **(template_options or {})}
    n_ctx = model.cfg.n_ctx if context is None else context
    return RowMaker(model, n_ctx, long, positions, prepend_bos, options, chunk)


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
