"""The contexts of a base run, which keeps keys, values and states for later, and of the rows that differ from it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hooked_lm.components.context import Angles, Context, KeysValues
from hooked_lm.components.kv_cache import KeyValueCache, StateCacheEntry
from hooked_lm.components.rotary import Rotary
from hooked_lm.engine.edit import Interval, repeated
from hooked_lm.engine.ragged_batch import LayerSpans, Packing, Run, cut, pack

Mix = Callable[[Tensor, Tensor, Tensor, Context], Tensor]
Mixer = Callable[[Tensor, Context, int], Tensor]


class BaseContext(Context):
    """The context of a base run: it keeps keys and values of all layers, and the states of mixers before every position."""

    norms_see_copies = False  # a hook at a norm and one at a copy may belong to different cells

    def __init__(self, context: Context) -> None:
        super().__init__(context.n_pos, context.device)
        self.pos_embed, self.per_layer = context.pos_embed, context.per_layer
        self.keys_values: dict[int, KeysValues] = {}
        self.states: dict[int, list[StateCacheEntry]] = {}
        self.start = 0  # the first position of the value that hooks are given

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


class RowContext(Context):
    """The context of some neighbouring positions of a whole prompt: queries from `start` to before `stop`, all keys."""

    def __init__(self, base: Context, interval: Interval) -> None:
        start, stop = interval
        super().__init__(stop - start, base.device)
        self.base, self.rows = base, slice(start, stop)
        self.n_past, self.n_key = start, base.n_key
        self.key_positions, self.positions = base.key_positions, base.key_positions[:, start:stop]

    def mask(self, causal: bool, window: int | None) -> Tensor | None:
        if self.n_pos == self.n_key:
            return self.base.mask(causal, window)
        return self.full_mask(causal, window)

    def _full_mask(self, causal: bool, window: int | None) -> Tensor:
        return self.base.full_mask(causal, window)[:, :, self.rows]


class PackedContext(Context):
    """The context of a ragged batch: positions that a row does not compute are those of the base run."""

    norms_see_copies = False

    def __init__(self, base: BaseContext, n_prompts: int) -> None:
        super().__init__(base.n_pos, base.device)
        self.base, self.n_prompts = base, n_prompts
        self.runs: Sequence[Run] = ()
        self.current: int | None = None  # in attention and mixers, the run whose rows are computed
        self.attention_flops = 0
        self._windows: dict[Interval, RowContext] = {}

    def enter(self, runs: Sequence[Run]) -> None:
        """Starts a layer with these runs."""
        self.runs = runs
        n_cells = [len(run.cells) for run in runs]
        self.read_packing = Packing(self.n_prompts, n_cells, [run.steps.reading for run in runs])
        self.key_packing = Packing(self.n_prompts, n_cells, [run.steps.key_rows for run in runs])
        self.query_packing = Packing(self.n_prompts, n_cells, [run.steps.query_rows for run in runs])
        self._angles: dict[tuple[Rotary, bool], Angles] = {}
        self.pos_embed = None if self.base.pos_embed is None else self._of_base(self.base.pos_embed, self.read_packing)

    def _of_base(self, value: Tensor, packing: Packing) -> Tensor:
        """A value [batch, pos, ...] of the base run, for the tokens of a batch."""
        value = value.expand(self.n_prompts, *value.shape[1:])
        both = zip(packing.n_cells, packing.intervals, strict=True)
        return pack([repeated(value[:, start:stop], n) for n, (start, stop) in both])

    # ---- which tokens ------------------------------------------------------------------------------------------------

    def query_rows(self, x: Tensor) -> Tensor:
        return self._some(x, self.query_packing)

    def key_rows(self, x: Tensor) -> Tensor:
        return self._some(x, self.key_packing)

    def _some(self, x: Tensor, wanted: Packing) -> Tensor:
        """Selects from the tokens that the layer reads those of another packing."""
        if wanted.intervals == self.read_packing.intervals:
            return x
        each = zip(self.read_packing.parts(x), self.read_packing.intervals, wanted.intervals, strict=True)
        return pack([cut(part, own, some) for part, own, some in each])

    def given(self, layer: int) -> Tensor | None:
        given = self.base.given(layer)
        return None if given is None else self._of_base(given, self.query_packing)

    def query_angles(self, rotary: Rotary) -> Angles:
        return self._turned(rotary, self.query_packing, True)

    def key_angles(self, rotary: Rotary) -> Angles:
        return self._turned(rotary, self.key_packing, False)

    def _turned(self, rotary: Rotary, packing: Packing, of_queries: bool) -> Angles:
        key = rotary, of_queries
        if key not in self._angles:
            positions = packing.positions.to(self.device)
            cos, sin = self.base.query_angles(rotary)
            self._angles[key] = cos[:, positions], sin[:, positions]
        return self._angles[key]

    # ---- row by row --------------------------------------------------------------------------------------------------

    def attend_rows(self, layer: int, mix: Mix, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        base_keys, base_values = self.base.keys_values[layer]
        mixed = queries.new_empty(*queries.shape[:3], base_values.shape[-1])
        for run, steps in self._in_turn():
            rows = self.query_packing.part(queries, run)
            if not rows.shape[1]:
                continue
            own = self.key_packing.part(keys, run), self.key_packing.part(values, run)
            k = self._whole(base_keys, own[0], steps.key_rows)
            v = self._whole(base_values, own[1], steps.key_rows)
            self.query_packing.part(mixed, run).copy_(mix(rows, k, v, self._window(steps.query_rows)))
            self.attention_flops += 2 * rows.shape[:3].numel() * k.shape[1] * (k.shape[-1] + v.shape[-1])
        return mixed

    def _whole(self, base: Tensor, own: Tensor, interval: Interval) -> Tensor:
        """Keys or values of all positions: those of the rows where they differ, else those of the base run."""
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

    def kv_of(self, kv_source_layer: int) -> KeysValues | None:
        """The keys and values of the rows in a layer; no positions, if all rows joined after it."""
        keys, values = self.base.keys_values[kv_source_layer]
        return super().kv_of(kv_source_layer) or (keys[:1, :0], values[:1, :0])

    def scan(self, layer: int, mixer: Mixer, stream: Tensor) -> Tensor:
        followed = []
        for run, steps in self._in_turn():
            rows, before = self.read_packing.part(stream, run), self.base.states[layer][steps.reading[0]]
            context = Context(rows.shape[1], self.device, None, _after(before, len(self.runs[run].cells)))
            followed.append(mixer(rows, context, 0))
        return pack(followed)

    def _in_turn(self) -> Iterator[tuple[int, LayerSpans]]:
        """Yields the runs, each marked as the current one."""
        for run, cells in enumerate(self.runs):
            with self._in_sight(run):
                yield run, cells.steps

    @contextmanager
    def _in_sight(self, run: int) -> Iterator[None]:
        self.current = run
        try:
            yield
        finally:
            self.current = None

    def _window(self, interval: Interval) -> RowContext:
        if interval not in self._windows:
            self._windows[interval] = RowContext(self.base, interval)
        return self._windows[interval]


def _after(before: StateCacheEntry, n_cells: int) -> KeyValueCache:
    """A cache of one layer for the rows of cells that start from this state."""
    cache, entry = KeyValueCache(0), StateCacheEntry()
    entry.frozen, entry.length = True, before.length
    if before.window is not None and before.state is not None:
        entry.window, entry.state = repeated(before.window, n_cells), repeated(before.state, n_cells)
    cache.entries = [entry]
    return cache
