"""Incremental batching: many cells that differ from a base run at few positions, in one pass through the layers.

A row joins the batch at the first layer that it changes, with the residual stream of the base run. The model is causal, so only
the positions from the first change on are computed; keys, values and states of earlier positions are those of the base run.
An edit after attention (of the output of attention or an MLP) changes only its own tokens, until the next layer attends to
them. In the last layer only the positions that the metric reads are computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.context import PackedContext
from hooked_lm.engine.cost import Cost
from hooked_lm.engine.edit import NONE, Edit, Input, Interval, overlap, repeated, union
from hooked_lm.engine.ragged_batch import CellRun, LayerSpans, Packing, pack
from hooked_lm.engine.site_info import (
    REACHES_LATER,
    SiteInfo,
    TokenScope,
    in_series,
    kv_source_layer,
    mixing,
    score_edits,
)
from hooked_lm.hooks import HookPoint
from hooked_lm.models.placement import enter


@dataclass(frozen=True)
class CellSchedule:
    """What a cell computes: the first layer in which it differs from the base run, and its spans in this and the later layers.

    The last spans are those after the blocks. A cell without spans does not differ where the metric reads.
    """

    cell: int
    first: int
    spans: tuple[LayerSpans, ...]
    on_demand: frozenset[str] = frozenset()  # its edited on-demand sites, which change how the model computes
    shows_scores: bool = False  # then all rows of a pass compute explicit scores

    def at(self, layer: int) -> LayerSpans:
        """The spans in a layer from the first one on."""
        return self.spans[layer - self.first]

    @property
    def n_tokens(self) -> int:
        """The largest number of positions in one layer."""
        return max((spans.rows[1] - spans.rows[0] for spans in self.spans), default=0)

    @property
    def layer_rows(self) -> int:
        """The number of positions in all layers together."""
        return sum(spans.rows[1] - spans.rows[0] for spans in self.spans)


class Planner:
    """Schedules cells so that they compute as few positions as possible."""

    def __init__(self, base: BaseRun, site_infos: Mapping[str, SiteInfo], reads: Interval) -> None:
        self.site_infos, self.n_pos, self.context = site_infos, base.n_pos, base.context
        self.reads = reads[0], max(reads[1], base.context.last_read(reads[1] - 1) + 1)
        self.base_edits = base.edits
        # sites at which rows may enter; a change of the base run there would be made twice
        self.entry_sites = base.kept.keys() - {edit.site for edit in base.edits}
        self.kv_source_layers = [kv_source_layer(block) for block in base.model.blocks]
        self.mixes = [bool(mixing(block)) for block in base.model.blocks]
        mixes_inputs = [any(getattr(part, "mixes_inputs", False) for part in mixing(b)) for b in base.model.blocks]
        self.has_state = [has_part(b, "mixer") or m for b, m in zip(base.model.blocks, mixes_inputs, strict=True)]
        # what has a state reads or makes queries: also tokens that are computed for their states alone need them
        self.in_series = [in_series(b) or m for b, m in zip(base.model.blocks, mixes_inputs, strict=True)]
        self.n_layers = len(self.kv_source_layers)
        self._without_edits: dict[tuple[int, Interval], LayerSpans] = {}  # of layers without an edit

    def schedule(self, cell: int, edits: Sequence[Edit]) -> CellSchedule:
        """The schedule of one cell; without spans if no edit affects the positions that the metric reads."""
        at_layer: dict[int, list[Edit]] = {}
        on_demand = frozenset(edit.site for edit in edits if self.site_infos[edit.site].on_demand)
        for edit in edits:
            at_layer.setdefault(self.site_infos[edit.site].layer, []).append(edit)
        first = min(at_layer, default=self.n_layers)
        spans: list[LayerSpans] = []
        changed_input = NONE
        for layer in range(first, self.n_layers + 1):
            now = self._cached_spans(layer, changed_input, at_layer.get(layer, ()), first, spans)
            if now.query_rows == NONE:  # nothing differs after this layer; a later edit starts again
                later = [edit for edit in edits if self.site_infos[edit.site].layer > layer]
                return self.schedule(cell, later) if later and layer < self.n_layers else CellSchedule(cell, layer, ())
            spans.append(now)
            changed_input = now.query_rows
        shows_scores = any(self.site_infos[edit.site].scope is TokenScope.SCORES for edit in edits)
        return CellSchedule(cell, first, tuple(spans), on_demand, shows_scores)

    def _cached_spans(
        self, layer: int, changed_input: Interval, edits: Sequence[Edit], first: int, before: Sequence[LayerSpans]
    ) -> LayerSpans:
        """The spans in a layer; many cells have the same."""
        if edits or (layer < self.n_layers and self.kv_source_layers[layer] is not None):
            return self._spans(layer, changed_input, edits, first, before)
        if (layer, changed_input) not in self._without_edits:
            self._without_edits[layer, changed_input] = self._spans(layer, changed_input, (), first, before)
        return self._without_edits[layer, changed_input]

    def _spans(
        self, layer: int, changed_input: Interval, edits: Sequence[Edit], first: int, before: Sequence[LayerSpans]
    ) -> LayerSpans:
        """The spans in a layer, from those of the layer below and the edits here."""
        if layer == self.n_layers:
            touched = overlap(union(changed_input, *(edit.span(self.n_pos) for edit in edits)), self.reads)
            return LayerSpans(changed_input, NONE, touched)
        if changed_input == NONE and (entry_site := self._entry_site(edits)):
            query_rows = union(*(edit.span(self.n_pos) for edit in edits))
            if layer == self.n_layers - 1:
                query_rows = overlap(query_rows, self.reads)
            return LayerSpans(query_rows=query_rows, entry_site=entry_site)
        spans: dict[bool, list[Interval]] = {True: [], False: []}
        for edit in edits:
            spans[self.site_infos[edit.site].scope in REACHES_LATER].append(edit.span(self.n_pos))
        changed, query_rows = union(changed_input, *spans[True]), union(changed_input, *spans[True], *spans[False])
        source = self.kv_source_layers[layer]
        shared = NONE if source is None or source < first else before[source - first].keys
        # later positions attend to them, and earlier ones of the same image; with a changed pattern all do
        changed_keys = (changed if source is None else shared) if self.mixes[layer] else NONE
        of_scores = score_edits([*edits, *self.base_edits], self.site_infos, layer)
        attending = union(
            (self.context.first_reader(changed_keys[0]), self.n_pos), *(edit.span(self.n_pos) for edit in of_scores)
        )
        if changed_keys != NONE:
            query_rows = union(query_rows, attending)
        key_rows = NONE
        if layer == self.n_layers - 1 and not of_scores and not self.in_series[layer]:
            # a function of states gets those of all positions, without its own changes of the earlier ones
            of_states = any(self._is_function_of_states(edit, layer) for edit in (*edits, *self.base_edits))
            query_rows = overlap(query_rows, (0, self.reads[1]) if of_states else self.reads)
            if source is None:
                changed_keys = overlap(changed_keys, (0, query_rows[1]))
            if source is None and changed_keys != NONE and changed_keys[0] < query_rows[0]:
                key_rows = (
                    changed_keys[0],
                    query_rows[0] if self.has_state[layer] else min(changed_keys[1], query_rows[0]),
                )
        return LayerSpans(
            changed_input, key_rows, query_rows, union(key_rows, query_rows) if self.has_state[layer] else changed_keys
        )

    def _is_function_of_states(self, edit: Edit, layer: int) -> bool:
        info = self.site_infos.get(edit.site)
        is_of_states = info is not None and info.layer == layer and info.scope is TokenScope.STATE
        return is_of_states and not isinstance(edit.value, Tensor)

    def _entry_site(self, edits: Sequence[Edit]) -> str:
        """The site after attention at which a cell with these edits may enter its first layer; "" if there is none."""
        sites = {self.site_infos[edit.site].entry_site for edit in edits}
        early = [site for site in sites if not site or not self.site_infos[site].ends_sublayer] or list(sites)
        return early[0] if len(early) == 1 and early[0] in self.entry_sites else ""


class BatchedPass:
    """One pass through the layers, for schedules that have spans."""

    def __init__(
        self,
        base: BaseRun,
        site_infos: Mapping[str, SiteInfo],
        cells: Sequence[Sequence[Edit]],
        schedules: Sequence[CellSchedule],
    ) -> None:
        self.base, self.site_infos = base, site_infos
        # neighbours have the same spans in most layers, where they form one run
        self.schedules = sorted(
            schedules, key=lambda one: (one.spans[0].query_rows, one.first, one.spans[0].entry_site, one.cell)
        )
        self.context = PackedContext(base.context, base.n_prompts, base.kept)
        self.by_site: dict[str, list[tuple[int, Edit]]] = {}
        for index, schedule in enumerate(self.schedules):
            for edit in sorted((*base.edits, *cells[schedule.cell]), key=lambda edit: not isinstance(edit, Input)):
                if edit.site in site_infos and site_infos[edit.site].layer >= schedule.first:
                    self.by_site.setdefault(edit.site, []).append((index, edit))
        self.cost = Cost()

    def run(self, tokens: Tensor | None) -> Iterator[tuple[int, Interval, Tensor]]:
        """Yields each cell, its interval of positions, and their logits [batch, pos, token], of `tokens` or of all tokens."""
        model = self.base.model
        with model.hooks(fwd_hooks=[(site, self._write) for site in self.by_site]):
            logits = self._logits(self._run_layers(len(model.blocks)), tokens)
        for run, rows in zip(self.context.runs, self.context.output_packing.parts(logits), strict=True):
            for index, of_cell in zip(run.cells, rows.unflatten(0, (-1, self.base.n_prompts)), strict=True):
                yield self.schedules[index].cell, run.spans.query_rows, of_cell

    def capture(self, sites: Sequence[str]) -> dict[int, dict[str, Tensor]]:
        """The values [batch, pos, ...] of each cell at these sites, which the base run kept, from where the cell starts on."""
        self.captured: dict[int, dict[str, Tensor]] = {schedule.cell: {} for schedule in self.schedules}
        last, n_layers = max(self.site_infos[site].layer for site in sites), len(self.base.model.blocks)
        hooks = [(site, self._write) for site in self.by_site] + [(site, self._keep) for site in sites]
        with self.base.model.hooks(fwd_hooks=hooks):
            packed = self._run_layers(min(last + 1, n_layers))
            if last == n_layers:
                self._logits(packed, None)
        return self.captured

    def _logits(self, packed: Tensor | None, tokens: Tensor | None) -> Tensor:
        """The logits of `tokens`, or of all tokens, for the output of the last block."""
        model = self.base.model
        normalized = norm_of(model, "ln_final")(self._layer_input(len(model.blocks), packed)).to(model.embed.W_E.dtype)
        logits = model.unembed(normalized) if tokens is None else model.unembed.some(normalized, tokens)
        self.cost.flops += 2 * logits.numel() * normalized.shape[-1]
        return model.cap_logits(logits)

    def _run_layers(self, stop: int) -> Tensor | None:
        """The stream before a layer, packed."""
        packed: Tensor | None = None
        for layer in range(min(schedule.first for schedule in self.schedules), stop):
            block = self.base.model.blocks[layer]
            packed = enter(block, self._layer_input(layer, packed), self.context)
            if self.context.key_packing.n_tokens:
                early, packed = self._split(packed)
                with self.context.using(self.context.key_packing):
                    block.make_keys(early, self.context)
            packed = block(packed, self.context)
            self.cost.count(self.base.costs[layer], self.context)
        self.cost.flops += self.context.attention_flops
        return packed

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The key rows and the query rows of a layer's input."""
        runs = self.context.runs
        reading = Packing(self.base.n_prompts, self.context.packing.n_cells, [run.spans.rows for run in runs])
        parts = [(part, run.spans) for part, run in zip(reading.parts(packed), runs, strict=True)]
        early = [part[:, : spans.key_rows[1] - spans.key_rows[0]] for part, spans in parts]
        late = [part[:, part.shape[1] - (spans.query_rows[1] - spans.query_rows[0]) :] for part, spans in parts]
        return pack(early), pack(late)

    def _layer_input(self, layer: int, packed: Tensor | None) -> Tensor:
        """The input rows of a layer: the output of the layer below, completed from the stream of the base run."""
        started = [index for index, schedule in enumerate(self.schedules) if schedule.first <= layer]
        grouped = groupby(started, key=lambda index: self.schedules[index].at(layer))
        self.context.enter([CellRun(list(cells), spans) for spans, cells in grouped])
        self.where = {
            index: (run, cell) for run, r in enumerate(self.context.runs) for cell, index in enumerate(r.cells)
        }
        base, used, parts = self.base.streams[layer], 0, []
        for run in self.context.runs:
            (start, stop), changed_input, n = run.spans.rows, run.spans.changed_input, len(run.cells)
            if changed_input == NONE:
                parts.append(repeated(base[:, start:stop], n))
                continue
            assert packed is not None, "a changed input comes from the layer below"
            rows, length = n * self.base.n_prompts, changed_input[1] - changed_input[0]
            own = packed[0, used : used + rows * length].view(rows, length, packed.shape[-1])
            used += rows * length
            if changed_input != (start, stop):
                before, after = (
                    base[:, start : min(changed_input[0], stop)],
                    base[:, max(changed_input[1], start) : stop],
                )
                own = own[:, max(start - changed_input[0], 0) : max(stop - changed_input[0], 0)]
                own = torch.cat([repeated(before, n), own, repeated(after, n)], 1)
            parts.append(own)
        return pack(parts)

    def _write(self, value: Tensor, hook: HookPoint) -> None:
        """Applies the edits of all cells at a site."""
        name = hook.name or ""
        info = self.site_infos[name]
        for index, edit in self.by_site[name]:
            if (found := self._rows(info, index, value)) is not None:
                edit.write(found[0], info.dims, found[1], self.base.n_pos)

    def _keep(self, value: Tensor, hook: HookPoint) -> None:
        """Keeps the value of each cell at a site."""
        name = hook.name or ""
        info = self.site_infos[name]
        for index in self.where:
            if (found := self._rows(info, index, value)) is not None:
                whole, (rows, start) = self.base.kept[name].clone(), found
                whole[:, start : start + rows.shape[1]] = rows
                self.captured[self.schedules[index].cell][name] = whole

    def _rows(self, info: SiteInfo, index: int, value: Tensor) -> tuple[Tensor, int] | None:
        """The rows of a cell in the value at a site, as a view, and their first position; None if this call has none of them."""
        run, cell = self.where[index]
        if self.context.current not in (None, run):
            return None
        if self.context.makes_keys_only and info.scope not in REACHES_LATER:
            return None
        of_keys = info.scope is TokenScope.KEYS_AND_VALUES and not info.on_demand  # those on demand are of all inputs
        packing = self.context.kv_packing if of_keys else self.context.packing
        start, stop = packing.intervals[run]
        if start == stop:
            return None
        by_run = info.scope in (TokenScope.SCORES, TokenScope.STATE)
        rows = value if by_run else packing.part(value, run)
        return rows[cell * self.base.n_prompts : (cell + 1) * self.base.n_prompts], start
