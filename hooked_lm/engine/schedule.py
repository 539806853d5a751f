"""Staircase batching: many runs that differ from a base run in few places, in one pass through the layers.

A row joins the batch in the first layer in which it differs, with the stream of the base run. As a model is causal, only the
positions from the first one touched are computed; keys, values and states of the earlier ones are those of the base run.
What was exchanged behind the meeting of tokens (what attention or an MLP adds, say) changes one token only, until the
next layer's attention sees it. In the last layer only what the metric reads is computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.norm import norm_of
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.context import PackedContext
from hooked_lm.engine.cost import Cost
from hooked_lm.engine.edit import NONE, Edit, Interval, overlap, repeated, union
from hooked_lm.engine.ragged_batch import LayerSpans, Packing, Run, pack
from hooked_lm.engine.site_info import REACHES_LATER, SiteInfo, TokenScope, kv_source_layer


@dataclass(frozen=True)
class CellSchedule:
    """How a cell goes through the layers: the first one in which it differs, and its steps from there on.

    The last steps are those behind the blocks. A cell without any never differs where the metric reads.
    """

    cell: int
    first: int
    steps: tuple[LayerSpans, ...]
    on_demand: frozenset[str] = frozenset()  # its sites at which the model computes otherwise when somebody listens
    shows_scores: bool = False  # they are made one by one then, in all rows of a pass

    def at(self, layer: int) -> LayerSpans:
        """The steps in a layer that it has reached."""
        return self.steps[layer - self.first]

    @property
    def n_tokens(self) -> int:
        """The most positions that it has in one layer."""
        return max((steps.reading[1] - steps.reading[0] for steps in self.steps), default=0)

    @property
    def layer_rows(self) -> int:
        """The positions of all layers together."""
        return sum(steps.reading[1] - steps.reading[0] for steps in self.steps)


class Planner:
    """Plans routes: what each cell has to compute, so that nothing else is."""

    def __init__(self, base: BaseRun, places: Mapping[str, SiteInfo], reads: Interval) -> None:
        self.places, self.n_pos, self.reads = places, base.n_pos, reads
        self.kv_source_layers = [kv_source_layer(block) for block in base.model.blocks]
        self.n_layers = len(self.kv_source_layers)
        self._onward: dict[tuple[int, Interval], LayerSpans] = {}  # of layers in which nothing is exchanged

    def route(self, cell: int, edits: Sequence[Edit]) -> CellSchedule:
        """The way of one cell; ends early if nothing of it reaches the positions that are read."""
        at_layer: dict[int, list[Edit]] = {}
        on_demand = frozenset(edit.site for edit in edits if self.places[edit.site].on_demand)
        for edit in edits:
            at_layer.setdefault(self.places[edit.site].layer, []).append(edit)
        first = min(at_layer, default=self.n_layers)
        steps: list[LayerSpans] = []
        came = NONE
        for layer in range(first, self.n_layers + 1):
            now = self._next(layer, came, at_layer.get(layer, ()), first, steps)
            if now.query_rows == NONE:  # nothing differs behind this layer; an edit further on begins anew
                later = [edit for edit in edits if self.places[edit.site].layer > layer]
                return self.route(cell, later) if later and layer < self.n_layers else CellSchedule(cell, layer, ())
            steps.append(now)
            came = now.query_rows
        shows_scores = any(self.places[edit.site].stage is TokenScope.SCORES for edit in edits)
        return CellSchedule(cell, first, tuple(steps), on_demand, shows_scores)

    def _next(
        self, layer: int, came: Interval, edits: Sequence[Edit], first: int, before: Sequence[LayerSpans]
    ) -> LayerSpans:
        """The steps in a layer; those of many cells are the same."""
        if edits or (layer < self.n_layers and self.kv_source_layers[layer] is not None):
            return self._steps(layer, came, edits, first, before)
        if (layer, came) not in self._onward:
            self._onward[layer, came] = self._steps(layer, came, (), first, before)
        return self._onward[layer, came]

    def _steps(
        self, layer: int, came: Interval, edits: Sequence[Edit], first: int, before: Sequence[LayerSpans]
    ) -> LayerSpans:
        """What is computed in a layer, from what came and what is exchanged there."""
        if layer == self.n_layers:
            touched = overlap(union(came, *(edit.span(self.n_pos) for edit in edits)), self.reads)
            return LayerSpans(overlap(came, touched), touched, NONE, touched)
        spans: dict[bool, list[Interval]] = {True: [], False: []}
        for edit in edits:
            spans[self.places[edit.site].stage in REACHES_LATER].append(edit.span(self.n_pos))
        key_rows, query_rows = union(came, *spans[True]), union(came, *spans[True], *spans[False])
        own, borrowed = key_rows, self.kv_source_layers[layer]
        if borrowed is not None:
            own, key_rows = NONE, before[borrowed - first].key_rows if borrowed >= first else NONE
        # where all that was mixed is exchanged for something else, nobody sees what the tokens told
        later = (key_rows[0], self.n_pos)
        is_replaced = any(self.places[edit.site].ends_sublayer and edit.covers(later) for edit in edits)
        if key_rows != NONE and not is_replaced:
            query_rows = union(query_rows, later)
        if layer == self.n_layers - 1:
            query_rows = overlap(query_rows, self.reads)
        return LayerSpans(came, union(came, own, query_rows), key_rows, query_rows)


class BatchedPass:
    """One pass through the layers, for routes that reach its end."""

    def __init__(
        self,
        base: BaseRun,
        places: Mapping[str, SiteInfo],
        cells: Sequence[Sequence[Edit]],
        routes: Sequence[CellSchedule],
    ) -> None:
        self.base, self.places = base, places
        # neighbours take the same steps in most layers: they are one run then
        self.routes = sorted(routes, key=lambda route: (route.steps[0].query_rows, route.first, route.cell))
        self.context = PackedContext(base.context, base.n_prompts)
        self.by_site: dict[str, list[tuple[int, Edit]]] = {}
        for index, route in enumerate(self.routes):
            for edit in (*base.edits, *cells[route.cell]):
                if edit.site in places and places[edit.site].layer >= route.first:
                    self.by_site.setdefault(edit.site, []).append((index, edit))
        self.cost = Cost()

    def run(self, tokens: Tensor | None) -> Iterator[tuple[int, Interval, Tensor]]:
        """Of each cell the positions that are read, and their logits [batch, pos, token]; of all tokens, or of these."""
        model = self.base.model
        with model.hooks(fwd_hooks=[(site, self._write) for site in self.by_site]):
            packed = self._entered(len(model.blocks), self._through(len(model.blocks)))
            normalized = norm_of(model, "ln_final")(packed).to(model.embed.W_E.dtype)
            logits = model.unembed(normalized) if tokens is None else model.unembed.some(normalized, tokens)
            logits = model.cap_logits(logits)
            self.cost.flops += 2 * logits.numel() * normalized.shape[-1]
        for run, rows in zip(self.context.runs, self.context.asked.parts(logits), strict=True):
            for index, of_cell in zip(run.cells, rows.unflatten(0, (-1, self.base.n_prompts)), strict=True):
                yield self.routes[index].cell, run.steps.query_rows, of_cell

    def capture(self) -> dict[int, dict[str, Tensor]]:
        """What passes the sites that the base run kept, [batch, pos, ...], of each cell that has joined there."""
        self.captured: dict[int, dict[str, Tensor]] = {route.cell: {} for route in self.routes}
        sites = list(self.base.kept)
        stop = 1 + max(self.places[site].layer for site in sites)
        hooks = [(site, self._write) for site in self.by_site] + [(site, self._keep) for site in sites]
        with self.base.model.hooks(fwd_hooks=hooks):
            self._through(min(stop, len(self.base.model.blocks)))
        return self.captured

    def _through(self, stop: int) -> Tensor | None:
        """The stream before a layer, packed."""
        packed: Tensor | None = None
        for layer in range(min(route.first for route in self.routes), stop):
            packed = self.base.model.blocks[layer](self._entered(layer, packed), self.context)
            self.cost.count(self.base.costs[layer], self.context)
        self.cost.flops += self.context.attention_flops
        return packed

    def _entered(self, layer: int, packed: Tensor | None) -> Tensor:
        """The tokens that the layer reads: what came from the one below, and the stream of the base run."""
        there = [index for index, route in enumerate(self.routes) if route.first <= layer]
        grouped = groupby(there, key=lambda index: self.routes[index].at(layer))
        self.context.enter([Run(list(cells), steps) for steps, cells in grouped])
        self.where = {
            index: (run, place) for run, r in enumerate(self.context.runs) for place, index in enumerate(r.cells)
        }
        base, used, parts = self.base.streams[layer], 0, []
        for run in self.context.runs:
            (start, stop), came, n = run.steps.reading, run.steps.came, len(run.cells)
            if came == NONE:
                parts.append(repeated(base[:, start:stop], n))
                continue
            assert packed is not None, "a cell that came from somewhere"
            rows, length = n * self.base.n_prompts, came[1] - came[0]
            own = packed[0, used : used + rows * length].view(rows, length, packed.shape[-1])
            used += rows * length
            if came != (start, stop):
                before, behind = base[:, start : came[0]], base[:, came[1] : stop]
                own = torch.cat([repeated(before, n), own, repeated(behind, n)], 1)
            parts.append(own)
        return pack(parts)

    def _write(self, value: Tensor, hook: Any) -> None:
        """Make the changes of all cells at a site."""
        place = self.places[hook.name]
        for index, edit in self.by_site[hook.name]:
            if (found := self._rows(place, index, value)) is not None:
                edit.write(found[0], place.dims, found[1], self.base.n_pos)

    def _keep(self, value: Tensor, hook: Any) -> None:
        """Keep what each cell has at a site."""
        place = self.places[hook.name]
        for index in self.where:
            if (found := self._rows(place, index, value)) is not None:
                whole, (rows, start) = self.base.kept[hook.name].clone(), found
                whole[:, start : start + rows.shape[1]] = rows
                self.captured[self.routes[index].cell][hook.name] = whole

    def _rows(self, place: SiteInfo, index: int, value: Tensor) -> tuple[Tensor, int] | None:
        """Of a value at a site the rows of a cell, a view, and the position with which they begin; None if they are not in
        sight."""
        run, cell = self.where[index]
        if self.context.current not in (None, run):
            return None
        steps = self.context.runs[run].steps
        if place.stage in (TokenScope.SCORES, TokenScope.STATE):
            rows, interval = value, steps.query_rows if place.stage is TokenScope.SCORES else steps.reading
        else:
            rows, interval = self._packing(place.stage).part(value, run), getattr(steps, PART_OF[place.stage])
        return rows[cell * self.base.n_prompts : (cell + 1) * self.base.n_prompts], interval[0]

    def _packing(self, stage: TokenScope) -> Packing:
        return {TokenScope.BEFORE_MIXING: self.context.read, TokenScope.KEYS_AND_VALUES: self.context.told}.get(
            stage, self.context.asked
        )


PART_OF = {
    TokenScope.BEFORE_MIXING: "reading",
    TokenScope.KEYS_AND_VALUES: "telling",
    TokenScope.QUERIES_AND_AFTER: "asking",
}
