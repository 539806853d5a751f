"""A data set as the analyses of features read it: batches of tokens, and which of them count."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.engine.prompts import rows_of, some_rows
from hooked_lm.hooks.token_labels import PADDING, Labels, Named, check_named, find_positions, is_named, reading
from hooked_lm.interventions.top_examples import TopExamples
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import Rows, VisionInputs, ids_of
from hooked_lm.shards.plan import name_of


@runtime_checkable
class Stored(Protocol):
    """Texts with values that were computed before: an `ActivationStore`."""

    plan: Any

    def batches(self, site: str, batch_size: int) -> Iterable[Any]: ...


Data = Int[Tensor, "prompt pos"] | Sequence[str] | VisionInputs | Chat | Stored | Iterable[Any]


@dataclass(frozen=True)
class TextBatch:
    """Texts, padded on the right: `real` is True except at padding, `counts` at the positions that are looked at.

    `labels` say what the columns of each row are, if the texts are conversations. Of a harvest there are the `documents` of the
    rows and the `values` of the site.
    """

    model: Decoder
    tokens: Rows
    real: Bool[Tensor, "batch pos"]
    counts: Bool[Tensor, "batch pos"]
    labels: Sequence[Labels] | None = None
    documents: Sequence[int] = ()
    values: Tensor | None = None

    def run_to(self, site: str, top: TopExamples) -> None:
        """A forward pass as far as the site, for what `top` keeps of it."""
        top.batch(ids_of(self.tokens).cpu(), self.real)
        top.only(self.counts)
        model = self.model
        if self.values is not None:
            top.see(self.values.to(model.device), model.hook_dict[site])
            return
        with model.hooks([top]), reading(self.labels):  # `names_filter` stops the run after the site
            run: dict[str, Any] = {"return_type": None, "attention_mask": self.real.long().to(model.device)}
            model.run_with_cache(self.tokens.to(model.device), names_filter=site, **run)


@dataclass(frozen=True)
class Corpus:
    """Texts in batches of `size`, on the CPU. Of each text the first `skip` tokens do not count, and of conversations only those
    that named `positions` select."""

    model: Decoder
    data: Data
    size: int
    skip: int = 0
    positions: Named | None = None

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"skip must be at least 0, got {self.skip}")
        if self.size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.size}")
        if self.positions is not None:
            if not is_named(self.positions):
                raise ValueError(
                    f"positions are by what tokens are, such as 'assistant', got {self.positions!r}; skip= is by number"
                )
            check_named(self.positions)

    @property
    def described(self) -> str:
        """Which positions count, in words."""
        return f", skip {self.skip}" * (self.skip > 0) + f", positions {self.positions!r}" * (
            self.positions is not None
        )

    def batches(self, site: str) -> Iterator[TextBatch]:
        """The batches, of a harvest with the values of this site."""
        if not isinstance(self.data, Stored):
            yield from self
            return
        if self.positions is not None:
            raise ValueError("positions of a harvest are selected by the store: store.select(role=..., part=...)")
        if (name := self.data.plan.model["name"]) != name_of(self.model):
            raise ValueError(f"the harvest is of the model {name!r}, and this is {name_of(self.model)!r}")
        for tokens, real, labels, documents, values in self.data.batches(site, self.size):
            counts = real & (torch.arange(tokens.shape[1]) >= self.skip)
            yield TextBatch(self.model, tokens, real, counts, labels, documents, values)

    def __iter__(self) -> Iterator[TextBatch]:
        if isinstance(self.data, Stored):
            raise ValueError(
                "a harvest has values of its sites, and here the model is run: give texts or conversations"
            )
        for given in self._parts():
            tokens, real, labels = _read(self.model, given)
            counts = real & (real.cumsum(1) > self.skip)
            if self.positions is not None:
                if labels is None:
                    raise ValueError(
                        f"positions={self.positions!r}: the texts have no roles; give model.chat(messages)"
                    )
                for row, of_row in enumerate(labels):
                    chosen = torch.zeros(len(of_row), dtype=torch.bool)
                    chosen[find_positions(of_row, self.positions)] = True
                    counts[row] &= chosen
            yield TextBatch(self.model, tokens, real, counts, labels)

    def _parts(self) -> Iterable[Any]:
        """The batches as they were given."""
        assert not isinstance(self.data, Stored)
        data, size = [self.data] if isinstance(self.data, str) else self.data, self.size
        if isinstance(data, VisionInputs):
            whole, n = rows_of(self.model, data), len(data)
            return (some_rows(self.model, whole, range(i, min(i + size, n))) for i in range(0, n, size))
        if isinstance(data, Tensor):
            return data.split(size) if data.numel() else []
        if isinstance(data, Chat) or (isinstance(data, Sequence) and all(isinstance(text, str) for text in data)):
            return (data[start : start + size] for start in range(0, len(data), size))
        return data


def _read(
    model: Decoder, batch: Tensor | VisionInputs | Chat | Sequence[str]
) -> tuple[Rows, Bool[Tensor, "batch pos"], Sequence[Labels] | None]:
    """The tokens of a batch, the mask that is True except at padding, and labels of conversations."""
    if isinstance(batch, Tensor):
        if batch.ndim != 2 or batch.is_floating_point():
            raise ValueError(f"a batch is token ids [batch, pos] or texts, got {batch.dtype} {list(batch.shape)}")
        model.tokens.check_ids(batch)
        return batch.cpu(), torch.ones_like(batch, dtype=torch.bool, device="cpu"), None
    if isinstance(batch, VisionInputs):
        rows, given = rows_of(model, batch), batch.attention_mask
        return rows, (torch.ones(rows.shape) if given is None else given.cpu()).bool(), None
    if isinstance(batch, Chat):
        return padded_on_the_right(batch)
    tokens, mask = model.tokens.encode(batch, padding_side="right", truncate=True)
    return tokens, mask.bool(), None


def padded_on_the_right(chat: Chat) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], list[Labels]]:
    """The tokens of conversations, as texts are padded: a column is the position in the conversation."""
    mask = chat.attention_mask.cpu().bool()
    order = (~mask).int().argsort(dim=1, stable=True)
    rows = ([label for label in row if label != PADDING] for row in chat.labels)
    labels: list[Labels] = [[*row, *[PADDING] * (mask.shape[1] - len(row))] for row in rows]
    return chat.tokens.cpu().gather(1, order), mask.gather(1, order), labels
