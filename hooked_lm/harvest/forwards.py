"""Forward passes of rows, in one piece or in several, and the values of the tokens that are kept of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.harvest.rows import DocumentRows, RowMaker, batched, padded_batch
from hooked_lm.harvest.stored_value import REDUCTIONS
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.generation_step import GenerationStep, run_generation, set_current
from hooked_lm.hooks.token_labels import PADDING, Labels, reading
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.generation.loop import prompt_sequence
from hooked_lm.models.generation.reading import PromptReader, chunk_of

Values = dict[str, Tensor]


def forwards(
    rows: DocumentRows,
    maker: RowMaker,
    sites: Sequence[str],
    batch_size: int,
    reduce: str | None = None,
    advance: Callable[[int], Any] = lambda n_tokens: None,
) -> Iterator[tuple[list[int], Values]]:
    """Yields the rows of each batch, and the values of the tokens that are kept of them, row after row."""
    model = maker.model
    device = next(model.parameters()).device
    pad = 0 if getattr(model, "tokenizer", None) is None else model.tokens.pad_id
    for which in batched(rows, batch_size):
        tokens, mask = padded_batch(rows, which, pad)
        labels = None if rows.labels is None else [rows.labels[row] for row in which]
        kept = KeptValues(rows, which)
        with torch.no_grad():
            real = None if mask is None else mask.long().to(device)
            if maker.chunk is None:
                read_whole(model, tokens.to(device), real, labels, sites, kept)
            else:
                read_in_chunks(model, tokens.to(device), real, labels, sites, kept, maker.chunk)
        yield which, {site: kept.of(site, reduce) for site in sites}
        advance(sum(len(rows.ids[row]) for row in which))


class KeptValues:
    """The vectors of a batch at the positions of its rows that are kept."""

    def __init__(self, rows: DocumentRows, which: Sequence[int]) -> None:
        self.kept = torch.zeros(len(which), max(len(rows.ids[row]) for row in which), dtype=torch.bool)
        for i, row in enumerate(which):
            self.kept[i, : len(rows.kept[row])] = rows.kept[row]
        self.pieces: dict[str, list[tuple[Tensor, list[int]]]] = {}  # the vectors, and how many are of each row

    def add(
        self,
        site: str,
        value: Float[Tensor, "batch pos *width"],
        positions: Int[Tensor, "*batch pos"] | None = None,
    ) -> None:
        """Keeps what is wanted of a value, whose columns are the positions of the rows.

        Of a piece `positions` are those of its columns, -1 at padding; what is kept of it goes to main memory.
        """
        here = self.kept
        if positions is not None:
            positions = positions.cpu().expand(len(here), -1)
            here = here.gather(1, positions.clamp(min=0)) & (positions >= 0)
        if value.shape[:2] != here.shape:
            raise ValueError(
                f"'{site}' is {list(value.shape)}, and what is read has {list(here.shape)} tokens [row, pos]"
            )
        if positions is None and bool(here.all()):
            vectors = value.flatten(0, 1)
        else:
            rows, columns = (index.to(value.device) for index in here.nonzero(as_tuple=True))
            vectors = value[rows, columns]
        vectors = vectors if positions is None else vectors.cpu()
        self.pieces.setdefault(site, []).append((vectors, here.sum(1).tolist()))

    def of(self, site: str, reduce: str | None) -> Float[Tensor, "vector *width"]:
        """The vectors of a site, row after row; or one of each row that has any."""
        if site not in self.pieces:
            raise ValueError(f"'{site}' was not reached in a forward pass, so that there is nothing to keep")
        pieces = self.pieces.pop(site)
        if reduce is None and len(pieces) == 1:
            return pieces[0][0]
        each = [vectors.split(counts) for vectors, counts in pieces]
        rows = [torch.cat(parts) for parts in zip(*each, strict=True)]
        if reduce is None:
            return torch.cat(rows)
        found = [REDUCTIONS[reduce](row) for row in rows if len(row)]
        return torch.stack(found) if found else rows[0]


def read_whole(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    labels: Sequence[Labels] | None,
    sites: Sequence[str],
    kept: KeptValues,
) -> None:
    """Keeps values of one forward pass, which ends at the last site."""
    options: dict[str, Any] = {"names_filter": sites, "return_cache_object": False, "return_type": None}
    options |= {} if mask is None else {"attention_mask": mask}
    n = tokens.shape[1]
    padded = None if labels is None else [[*row, *[PADDING] * (n - len(row))] for row in labels]
    with reading(padded):
        _, cache = model.run_with_cache(tokens, **options)
    for site in cache:
        kept.add(site, cache[site])


def read_in_chunks(
    model: Decoder,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    labels: Sequence[Labels] | None,
    sites: Sequence[str],
    kept: KeptValues,
    chunk: int | str,
) -> None:
    """The same from a forward pass for each piece of `chunk` tokens, or of as many as take so much memory."""

    def keep(site: str) -> Callable[[Tensor, HookPoint], None]:
        return lambda value, hook: kept.add(site, value, hook.positions)

    def run() -> None:
        sequence = prompt_sequence(model, tokens, attention_mask=mask)
        stop = model._last_layer_needed(sites, [])
        stop = None if stop is None else max(1, stop)  # the keys of a layer count the tokens that were read
        keys_values = KeyValueCache(model.cfg.n_layers if stop is None else stop, len(sequence))
        size = chunk_of(model, chunk, sequence, keys_values, sites)
        set_current(GenerationStep(0, sequence.real, len(sequence), sequence, labels))
        options = {"past_kv_cache": keys_values, "return_type": None, "stop_at_layer": stop}
        PromptReader(model, sequence, keys_values, chunk=size).pieces(len(sequence), options)

    run_generation(run, model.hooks([(site, keep(site)) for site in sites]))
