"""The contexts of a base run, which keeps keys, values and states, and of batched rows that differ from it."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from hooked_lm.components.context import Angles, Context, KeysValues
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.kv_cache import KeyValueCache, StateCacheEntry
from hooked_lm.components.partial_context import PartialContext
from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.engine.edit import NONE, Interval, overlap, repeated
from hooked_lm.engine.ragged_batch import CellRun, LayerSpans, Packing, pack

Mix = Callable[[Tensor, Tensor, Tensor, Context], Tensor]
Mixer = Callable[[Tensor, Context, int], Tensor]


class BaseContext(Context):
    """The context of a base run: it keeps keys and values of all layers, and the states of mixers before every position.

    Positions, masks and all else are those of the run's own context.
    """

    norms_see_copies = False  # a hook at a norm and one at a copy may belong to different cells
    of_layers = ("cache", "keys_values", "states")
    keys_values: dict[int, KeysValues]
    states: dict[int, list[StateCacheEntry]]
    start: int  # the first position of the value that hooks get

    @classmethod
    def of(cls, context: Context) -> "BaseContext":
        """A context that keeps what cells read, with the attributes of this one. KeyError for a class not in `BASE_CONTEXTS`."""
        base = object.__new__(BASE_CONTEXTS[type(context)])
        vars(base).update(vars(context))
        base.keys_values, base.states, base.start = {}, {}, 0
        return base

    def first_reader(self, pos: int) -> int:
        """The first position that depends on this one or on a later one."""
        return pos

    def last_read(self, pos: int) -> int:
        """The last position that this one or an earlier one depends on."""
        return pos

    @cached_property
    def differs_by_prompt(self) -> bool:
        """Whether prompts have different positions or masks."""
        return max(len(x) for x in (self.positions, self.key_positions, self.full_mask(True, None))) > 1

    def attend_rows(self, layer: int, mix: Mix, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keys_values[layer] = keys, values
        return super().attend_rows(layer, mix, queries, keys, values)

    def scan(self, layer: int, mixer: Mixer, stream: Tensor) -> Tensor:
        """Runs the mixer position by position, as in generation, and keeps the state before each position."""
        cache, outputs = KeyValueCache(1), []
        entry = cache.state(0)
        self.states[layer] = []
        for pos in range(stream.shape[1]):
            self.start = pos
            before = StateCacheEntry()
            before.frozen, before.length, before.window, before.state = True, entry.length, entry.window, entry.state
            self.states[layer].append(before)
            outputs.append(mixer(stream[:, pos : pos + 1], Context(1, self.device, None, cache), 0))
        self.start = 0
        return torch.cat(outputs, 1)


class BaseImageContext(BaseContext, ImageContext):
    """The context of a base run over prompts with images, whose tokens may see each other: then earlier ones read later ones."""

    @cached_property
    def _first_readers(self) -> list[int] | None:
        """For each position the first one that depends on it or on a later one; None if no position depends on later ones."""
        reads = self.full_mask(True, None).any(0)[0]  # query_pos, key_pos
        first = reads.byte().argmax(0).flip(0).cummin(0).values.flip(0).tolist()
        for pos, reader in enumerate(first):  # a change there changes what others read in turn
            first[pos] = first[reader] if reader < pos else pos
        return None if first == list(range(self.n_pos)) else first

    def first_reader(self, pos: int) -> int:
        """The first position that depends on this one or on a later one: in a group of tokens that see each other, the first."""
        readers = self._first_readers
        return pos if readers is None or pos == len(readers) else readers[pos]

    def last_read(self, pos: int) -> int:
        readers = self._first_readers
        return pos if readers is None else bisect_right(readers, pos) - 1


# The context of a run -> that of a base run.
BASE_CONTEXTS: Mapping[type[Context], type[BaseContext]] = {Context: BaseContext, ImageContext: BaseImageContext}


def repeated_context(context: Context, n: int) -> Context:
    """The context of the same prompts, `n` times one after the other, for another run."""
    found = copy(context)
    found._shared = {}
    for name, x in vars(context).items():
        if isinstance(x, Tensor) and not (name.endswith("positions") and x.shape[-2] == 1):  # those are of all prompts
            setattr(found, name, torch.cat([x] * n, 1 if name == "axis_positions" else 0))
    if isinstance(found, ImageContext):
        found.deepstack_terms = tuple(torch.cat([term] * n) for term in found.deepstack_terms)
    return found


class RowContext(Context):
    """The context of contiguous positions of the prompts, for `n_cells` cells: queries in [start, stop), all keys."""

    def __init__(self, base: Context, interval: Interval, n_cells: int) -> None:
        start, stop = interval
        super().__init__(stop - start, base.device)
        self.base, self.rows, self.n_cells = base, slice(start, stop), n_cells
        self.n_past, self.n_key = start, base.n_key
        self.key_positions = self._of_cells(base.key_positions)
        self.positions = self._of_cells(base.positions[:, start:stop])

    def _of_cells(self, x: Tensor) -> Tensor:
        """What the base run has of all prompts together, or of each; for the rows of all cells."""
        return x if x.shape[0] == 1 else repeated(x, self.n_cells)

    @property
    def needs_mask(self) -> bool:
        return self.n_pos < self.n_key or self.base.real is not None or self.base.needs_mask

    def known_mask(self, causal: bool, window: int | None) -> Tensor:
        return self._of_cells(self.base.full_mask(causal, window)[:, :, self.rows])


class PackedContext(PartialContext):
    """The context of a ragged batch: positions that a row does not compute are those of the base run.

    A layer computes some tokens, the key rows, only for their keys and values or for the state after them. They are computed
    first, separately (`makes_keys_only`); the block then runs on the query rows, and uses these keys and states like a cache.
    Other rows enter it after attention (or the mixer), with the value of the base run at a site (`kept`). `packing` describes the
    tokens that are computed at present.
    """

    norms_see_copies = False

    def __init__(self, base: BaseContext, n_prompts: int, kept: Mapping[str, Tensor]) -> None:
        super().__init__(base.n_pos, base.device)
        self.base, self.n_prompts, self.kept = base, n_prompts, kept
        self.runs: Sequence[CellRun] = ()
        self.current: int | None = None  # in attention and mixers, the run whose rows are computed
        self.attention_flops = 0
        self._windows: dict[tuple[Interval, int], RowContext] = {}
        self._kept: dict[tuple[str, int, int], tuple[int, Tensor]] = {}  # name, layer, cell -> first position, rows

    def enter(self, runs: Sequence[CellRun]) -> None:
        """Starts a layer with these runs."""
        self.runs = runs
        n_cells = [len(run.cells) for run in runs]
        self.key_packing = Packing(self.n_prompts, n_cells, [run.spans.key_rows for run in runs])
        self.output_packing = Packing(self.n_prompts, n_cells, [run.spans.query_rows for run in runs])
        self.packings = self._packings_by_entry()
        self.query_packing = self.packings.get("", self._resuming_at(""))
        rows = zip((run.spans.keys for run in runs), self.query_packing.intervals, strict=True)
        self._kv_packing = Packing(self.n_prompts, n_cells, [overlap(*both) for both in rows])
        self._all_keys = Packing(self.n_prompts, n_cells, [run.spans.keys for run in runs])
        self._early_kv: KeysValues | None = None  # of the key rows
        self._early_states: dict[int, KeyValueCache] = {}
        self._use(self.output_packing)

    def _packings_by_entry(self) -> dict[str, Packing]:
        """The rows that pass all of the layer (""), and those that enter it at each site after attention."""
        sites = dict.fromkeys(run.spans.entry_site for run in self.runs)
        return {"": self.output_packing} if sites == {"": None} else {site: self._resuming_at(site) for site in sites}

    def _resuming_at(self, site: str) -> Packing:
        rows = [run.spans.query_rows if run.spans.entry_site == site else NONE for run in self.runs]
        return Packing(self.n_prompts, self.output_packing.n_cells, rows)

    @contextmanager
    def using(self, packing: Packing) -> Iterator[None]:
        """Inside the `with` block, the tokens of the batch are these."""
        before = self.packing
        self._use(packing)
        try:
            yield
        finally:
            self._use(before)

    @property
    def kv_packing(self) -> Packing:
        """The tokens whose keys and values are computed at present."""
        return self.key_packing if self.makes_keys_only else self._kv_packing

    def kv_rows(self, x: Tensor) -> Tensor:
        """The query rows whose keys and values are computed."""
        if self._kv_packing.intervals == self.query_packing.intervals:
            return x
        both = zip(self.query_packing.parts(x), self.query_packing.intervals, self._kv_packing.intervals, strict=True)
        return pack([part[:, start - first : stop - first] for part, (first, _), (start, stop) in both])

    @property
    def makes_keys_only(self) -> bool:
        """Whether the tokens of the batch are the key rows of the layer."""
        return self.packing is self.key_packing

    def _use(self, packing: Packing) -> None:
        self.packing = packing
        self._angles: dict[tuple[Rotary, tuple[Interval, ...]], Angles] = {}
        self.pos_embed = None if self.base.pos_embed is None else self.of_base(self.base.pos_embed)

    def of_base(self, value: Tensor, packing: Packing | None = None) -> Tensor:
        """A value [batch, pos, ...] of the base run, for the tokens of the batch, or of this packing."""
        value, packing = value.expand(self.n_prompts, *value.shape[1:]), packing or self.packing
        both = zip(packing.n_cells, packing.intervals, strict=True)
        return pack([repeated(value[:, start:stop], n) for n, (start, stop) in both])

    def per_layer_input(self, layer: int) -> Tensor | None:
        of_base = self.base.per_layer_input(layer)
        return None if of_base is None else self.of_base(of_base)

    def deepstack(self, layer: int) -> Tensor | None:
        """What images add to the stream after a layer; None if there are none."""
        assert isinstance(self.base, ImageContext), "only models that read images have such layers"
        of_base = self.base.deepstack(layer)
        return None if of_base is None else self.of_base(of_base)

    def query_angles(self, rotary: Rotary) -> Angles:
        if self.makes_keys_only:
            cos, sin = self.base.query_angles(rotary)
            return cos[:1, :0], sin[:1, :0]
        return self._angles_of(rotary, self.query_packing)

    def key_angles(self, rotary: Rotary) -> Angles:
        return self._angles_of(rotary, self.kv_packing)

    def _angles_of(self, rotary: Rotary, packing: Packing) -> Angles:
        key = rotary, tuple(packing.intervals)
        if key not in self._angles:
            cos, sin = self.base.query_angles(rotary)
            self._angles[key] = self.of_base(cos, packing), self.of_base(sin, packing)
        return self._angles[key]

    # ---- rows that pass a part of the layer --------------------------------------------------------------------------

    @property
    def is_partial(self) -> bool:  # type: ignore[override]
        """Whether some rows need only a part of the layer."""
        is_whole = self.query_packing is self.output_packing and (
            self._kv_packing.intervals == self.query_packing.intervals
        )
        return not (is_whole or self.makes_keys_only)

    def of_rows(
        self, passed: Callable[..., Tensor], resume_at: Callable[[str, Tensor], Tensor], *inputs: Tensor | None
    ) -> Tensor:
        """The outputs of rows that run through a sublayer, and of those that enter it, in the order of the batch."""
        if self.query_packing is self.output_packing:
            return passed(*inputs)
        outputs = {}
        for site, packing in self.packings.items():
            with self.using(packing):
                if site:
                    output = resume_at(site, self.of_base(self.kept[site]))
                else:
                    output = passed(*(None if x is None else self._full_rows(x) for x in inputs))
            outputs[site] = packing, output
        by_run = [outputs[run.spans.entry_site] for run in self.runs]
        return pack([packing.part(output, run) for run, (packing, output) in enumerate(by_run)])

    def _full_rows(self, x: Tensor) -> Tensor:
        """The rows that run through attention."""
        some = [run for run, cells in enumerate(self.runs) if not cells.spans.entry_site]
        return pack([self.output_packing.part(x, run) for run in some])

    # ---- row by row --------------------------------------------------------------------------------------------------

    def update_kv(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        if self.makes_keys_only:
            self._early_kv = keys, values
        elif self._early_kv is not None:
            early_keys, early_values = self._early_kv
            return self._after_early(early_keys, keys), self._after_early(early_values, values)
        return keys, values

    def _after_early(self, early: Tensor, x: Tensor) -> Tensor:
        """Keys or values of the key rows and the query rows, concatenated in each row."""
        both = zip(self.key_packing.parts(early), self._kv_packing.parts(x), strict=True)
        return pack([torch.cat(parts, 1) for parts in both])

    def attend_rows(self, layer: int, mix: Mix, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        base_keys, base_values = self.base.keys_values[layer]
        mixed = queries.new_empty(*queries.shape[:3], base_values.shape[-1])
        if self.makes_keys_only:
            return mixed
        for run, spans in self._each_run():
            rows = self.query_packing.part(queries, run)
            if not rows.shape[1]:
                continue
            k = self._whole(base_keys, self._all_keys.part(keys, run), spans.keys)
            v = self._whole(base_values, self._all_keys.part(values, run), spans.keys)
            self.query_packing.part(mixed, run).copy_(mix(rows, k, v, self._window(run)))
            self.attention_flops += 2 * rows.shape[:3].numel() * k.shape[1] * (k.shape[-1] + v.shape[-1])
        return mixed

    def _whole(self, base: Tensor, own: Tensor, interval: Interval) -> Tensor:
        """Keys or values of all positions: those of the rows in `interval`, and those of the base run elsewhere."""
        n_cells, (start, stop) = own.shape[0] // self.n_prompts, interval
        if start == stop:
            return repeated(base, n_cells)
        if stop - start == base.shape[1]:
            return own
        whole = base.new_empty(n_cells, *base.shape)
        whole[:, :, start:stop] = own.view(n_cells, self.n_prompts, *own.shape[1:])
        for others in (slice(0, start), slice(stop, base.shape[1])):
            if others.start < others.stop:
                whole[:, :, others] = base[:, others]
        return whole.flatten(0, 1)

    def keep_rows(self, name: str, layer: int, rows: Tensor | None) -> None:
        """Keeps the rows of each cell with their first position: of the current run, or of all runs."""
        if rows is not None:
            one, packing = self.current, self.packing if self.current is None else self.query_packing
            parts = enumerate(packing.parts(rows)) if one is None else [(one, rows)]
            for run, part in parts:
                of_cells = part.unflatten(0, (-1, self.n_prompts))
                for cell, of_cell in zip(self.runs[run].cells, of_cells, strict=True):
                    self._kept[name, layer, cell] = packing.intervals[run][0], of_cell

    def rows_of(self, name: str, layer: int) -> Tensor | None:
        """What a layer kept of the rows of the current run, or of all runs; rows that it did not compute are the base run's."""
        whole = self.base.rows_of(name, layer)
        if self.current is not None:
            return self._kept_rows(name, layer, whole, self.current, self.query_packing)
        assert whole is not None, "only choices inside attention may be of all keys"
        return pack([self._kept_rows(name, layer, whole, run, self.packing) for run in range(len(self.runs))])  # type: ignore[misc]

    def _kept_rows(self, name: str, layer: int, whole: Tensor | None, run: int, packing: Packing) -> Tensor | None:
        found = [self._kept.get((name, layer, cell)) for cell in self.runs[run].cells]
        if whole is None and not any(found):
            return None
        if whole is None:
            whole = torch.ones(self.n_prompts, self.n_pos, self.n_pos, dtype=torch.bool, device=self.device)
        (start, stop), rows = packing.intervals[run], whole[None].repeat(len(found), *[1] * whole.ndim)
        for cell, own in enumerate(found):
            if own is not None:
                rows[cell, :, own[0] : own[0] + own[1].shape[1]] = own[1]
        return rows[:, :, start:stop].flatten(0, 1)

    def kv_of(self, kv_source_layer: int) -> KeysValues | None:
        """The keys and values of the rows in a layer; without positions if all rows entered after it."""
        keys, values = self.base.keys_values[kv_source_layer]
        return super().kv_of(kv_source_layer) or (keys[:1, :0], values[:1, :0])

    def scan(self, layer: int, mixer: Mixer, stream: Tensor) -> Tensor:
        outputs = []
        for run, _ in self._each_run():
            rows, (start, stop) = self.packing.part(stream, run), self.packing.intervals[run]
            if start == stop:
                continue
            early = self._early_states.get(run)
            cache = _after(self.base.states[layer][start], len(self.runs[run].cells)) if early is None else early
            outputs.append(mixer(rows, Context(stop - start, self.device, None, cache), 0))
            if self.makes_keys_only:
                self._early_states[run] = cache
        return pack(outputs)

    def _each_run(self) -> Iterator[tuple[int, LayerSpans]]:
        """Yields the runs, each marked as the current one."""
        for run, cells in enumerate(self.runs):
            with self._as_current(run):
                yield run, cells.spans

    @contextmanager
    def _as_current(self, run: int) -> Iterator[None]:
        self.current = run
        try:
            yield
        finally:
            self.current = None

    def _window(self, run: int) -> RowContext:
        """The context of a run's query rows."""
        interval, n_cells = self.runs[run].spans.query_rows, len(self.runs[run].cells)
        n_cells = n_cells if self.base.differs_by_prompt else 1
        if (interval, n_cells) not in self._windows:
            self._windows[interval, n_cells] = RowContext(self.base, interval, n_cells)
        return self._windows[interval, n_cells]


def _after(before: StateCacheEntry, n_cells: int) -> KeyValueCache:
    """A cache of one layer with this state, repeated for the rows of `n_cells` cells."""
    cache, entry = KeyValueCache(0), StateCacheEntry()
    entry.length = before.length
    if before.window is not None and before.state is not None:
        entry.window, entry.state = repeated(before.window, n_cells), repeated(before.state, n_cells)
    cache.states[0] = entry
    return cache
