"""Runs interventions: thousands of small changes ("cells") of one base run, and the metrics of each.

If the positions that a change can affect are known, cells share one pass through the layers (see `schedule`); otherwise each
cell is a whole forward pass, several in a batch. Both give the results of a loop with one forward pass for each cell.
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.budget import Budget, batches
from hooked_lm.engine.cells_before_blocks import (
    FIRST_STREAM,
    in_tower,
    is_before_blocks,
    is_of_images,
    n_positions,
    resume_at_blocks,
    shapes_at,
)
from hooked_lm.engine.cost import Cost
from hooked_lm.engine.edit import Cell, Change, Edit
from hooked_lm.engine.fallback_reason import fallback_reason, is_ours
from hooked_lm.engine.first_change import FirstChange
from hooked_lm.engine.full_forward import whole_forwards
from hooked_lm.engine.metric_trace import (
    EVERYTHING,
    Logits,
    TracedAccess,
    UntracedAccess,
    reads_of,
    select_logits,
    values_of,
)
from hooked_lm.engine.schedule import BatchedPass, Planner
from hooked_lm.engine.site_info import SiteInfo, TokenScope, site_infos
from hooked_lm.engine.stacks import refuse_two_stacks, tokens_at
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.source_and_target import SourceAndTarget
from hooked_lm.models.vision.inputs import ImagesAndTexts, Rows
from hooked_lm.progress import progress_bar

Metric = Callable[[Tensor], Any]
BYPASSED = r"(.*)\.(ln1\.hook_\w+|attn\.kv?_norm\.hook_\w+|attn\.hook_kv_latent)$"  # by some copies of the stream
Scores = Float[Tensor, "metric prompt"]  # one column if metrics give one number for all prompts


class Experiment:
    """Many cells on one base run, for example of the corrupted prompts of a sweep; `base` holds changes that all cells share.

    `metrics` map logits [batch, pos, d_vocab] to one number for each prompt [batch], or to one for all. `max_memory` is the
    memory that a pass may use in addition to the model. The base run's values at the sites of `compare` are kept, so that
    computation can start at the first position that a cell changes. Raises ValueError for a metric that returns something
    else, or NaN, on the base run.
    """

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Rows,
        metrics: Sequence[Metric],
        base: Cell = (),
        max_memory: int | str = "auto",
        compare: Collection[str] = (),
    ) -> None:
        if not isinstance(tokens, (SourceAndTarget, ImagesAndTexts)):
            refuse_two_stacks(model, "an Experiment")
        self.model, self.metrics = model, list(metrics)
        self.device = next(model.parameters()).device
        self.tokens = in_tower(model, tokens.to(self.device))
        self.base_changes = self._checked_cell(base)
        self.budget = Budget.of(max_memory, self.device)
        self.cost = Cost()
        self.decoder = model if isinstance(model, Decoder) else None
        self.site_infos: Mapping[str, SiteInfo] = {} if self.decoder is None else site_infos(self.decoder)
        with torch.no_grad():
            self.fallback_reason = fallback_reason(model, self.tokens)
            self._run_base(self._kept(compare))

    def _kept(self, sites: Iterable[str]) -> list[str]:
        """The sites whose values in the base run are useful for changes at these sites."""
        known = [(site, self.site_infos[site]) for site in sites if site in self.site_infos]
        kept = [site for site, info in known if info.is_cheap_to_read]
        return list(dict.fromkeys([*kept, *(info.entry_site for _, info in known if info.entry_site)]))

    def _run_base(self, keep: Sequence[str]) -> None:
        self.base: BaseRun | None = None
        edits = [change for change in self.base_changes if isinstance(change, Edit)]
        is_kept = all(map(self._is_kept_by_a_base_run, self.base_changes))
        if (
            self.decoder is not None
            and self.fallback_reason is None
            and is_kept
            and not norm_and_copies(self.base_changes)
        ):
            self.base = BaseRun(self.decoder, self.tokens, self.site_infos, edits, keep)
            logits = self.base.logits
        else:
            [(_, whole)] = whole_forwards(self.model, self.tokens, [()], self.base_changes, 1)
            logits = Logits.of(whole)
        self.cost.forwards += 1
        self.shape = logits.shape
        self.reads, values = reads_of(self.metrics, logits)
        self.scores = self._checked(values)
        if bool(self.scores.isnan().any()):
            raise ValueError("a metric is NaN for the base run, so no cell can be compared with it")
        self.base_logits = logits.some(self.reads)

    def _checked(self, values: Sequence[Any], n_expected: int | None = None) -> Scores:
        """The metrics as one tensor; raises ValueError unless each is one number, or one for each prompt."""
        n_prompts = self.tokens.shape[0]
        rows = []
        for metric, value in zip(self.metrics, values, strict=True):
            row = torch.as_tensor(value).detach().to("cpu", torch.float32) if _is_number_like(value) else None
            if row is None or row.numel() not in (1, n_prompts) or row.ndim > 1:
                got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                name = getattr(metric, "__name__", type(metric).__name__)
                raise ValueError(
                    f"the metric {name} must give one number, or one for each of the {n_prompts} prompts, for logits "
                    f"{tuple(self.shape)}, but returned {got}"
                )
            rows.append(row.reshape(-1))
        width = max(len(row) for row in rows)
        if n_expected not in (None, width):
            raise ValueError(f"the metrics returned {n_expected} numbers each for the base run, but {width} for a cell")
        return torch.stack([row.expand(width) if len(row) == 1 else row for row in rows])

    # ---- cells -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self, cells: Sequence[Cell], sites: Sequence[str]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """The values at these sites [batch, pos, ...] in the base run, and in each cell where they may differ."""
        cells = [self._checked_cell(cell) for cell in cells]
        unread = [site for site in sites if getattr(self.site_infos.get(site), "dims", ())[:2] != ("batch", "pos")]
        unknown = [cell for cell in cells if self.base is None or not self._is_known(cell)]
        if self.base is None or unread or unknown:
            if cells:
                reason = f"values at '{unread[0]}' are not computed together" if unread else self._reason_of(unknown)
                self._warn_of_whole_forwards(reason, len(cells))
            return self._captured_by_whole_forwards(cells, sites)
        before_blocks = [i for i, cell in enumerate(cells) if self._is_before_blocks(cell)]
        for some, entered in self._resume_at_blocks([cells[i] for i in before_blocks]):
            for i, changes in zip(some, entered, strict=True):
                cells[before_blocks[i]] = changes
        kept = self._kept(change.site for cell in cells for change in cell)
        base = BaseRun(
            self.base.model, self.tokens, self.site_infos, self.base.edits, list(dict.fromkeys([*sites, *kept]))
        )
        self.cost.forwards += 1
        edits = [_edits(cell) for cell in cells]
        planner = Planner(base, self.site_infos, EVERYTHING.interval(base.n_pos))
        schedules = [
            schedule for schedule in (planner.schedule(i, own) for i, own in enumerate(edits)) if schedule.spans
        ]
        found: list[dict[str, Tensor]] = [{} for _ in cells]
        for batch in batches(schedules, self.budget, base, self.reads):
            this = BatchedPass(base, self.site_infos, edits, batch)
            for cell, values in this.capture(sites).items():
                found[cell] = values
            self.cost.add(this.cost)
        return {site: base.kept[site] for site in sites}, found

    def _captured_by_whole_forwards(
        self, cells: Sequence[Cell], sites: Sequence[str]
    ) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        found = []
        for cell in [(), *cells]:
            kept: dict[str, Any] = dict.fromkeys(sites)
            list(whole_forwards(self.model, self.tokens, [cell], self.base_changes, 1, kept))
            self.cost.forwards += 1
            found.append(kept)
        return found[0], found[1:]

    def run(
        self, cells: Sequence[Cell], title: str = "patching", progress: bool | None = None
    ) -> Iterator[tuple[int, Scores]]:
        """Yields each cell's index and scores, in the order of completion. The caller's grad mode is restored at each yield."""
        scores = self.run_without_gradients(cells, title, progress)
        while True:
            before = torch.is_grad_enabled()
            try:
                torch.set_grad_enabled(False)
                found = next(scores, None)
            finally:
                torch.set_grad_enabled(before)
            if found is None:
                return
            yield found

    def run_without_gradients(
        self, cells: Sequence[Cell], title: str = "patching", progress: bool | None = None
    ) -> Iterator[tuple[int, Scores]]:
        """`run` for callers that have disabled gradients."""
        cells = [self._checked_cell(cell) for cell in cells]
        self.fallback_reason = fallback_reason(self.model, self.tokens)  # hooks may have been added since
        started = time.perf_counter()
        try:
            yield from self._run(cells, title, progress)
        finally:
            self.cost.seconds += time.perf_counter() - started

    def _run(self, cells: Sequence[Cell], title: str, progress: bool | None) -> Iterator[tuple[int, Scores]]:
        usable = self.base is not None and self.fallback_reason is None
        known = [i for i, cell in enumerate(cells) if usable and self._is_known(cell)]
        others = sorted(set(range(len(cells))) - set(known))
        if others:
            self._warn_of_whole_forwards(self._reason_of([cells[i] for i in others]), len(others))
        before_blocks = [i for i in known if self._is_before_blocks(cells[i])]
        late = sorted(set(known) - set(before_blocks))
        yield from self._together(late, [cells[i] for i in late], title, progress)
        with progress_bar(title, len(before_blocks), progress if before_blocks else False, unit="cells") as bar:
            for some, entered in self._resume_at_blocks([cells[i] for i in before_blocks]):
                yield from self._together([before_blocks[i] for i in some], entered, title, False)
                bar.update(len(some))
        yield from self._whole(cells, others, title, progress)

    def _resume_at_blocks(self, cells: Sequence[Cell]) -> Iterator[tuple[list[int], list[list[Change]]]]:
        """Yields the numbers of some cells, and their changes before the blocks as changes of the stream that enters them."""
        if cells:
            assert self.base is not None, "cells share the values of a base run"
            yield from resume_at_blocks(self.base, self.base_changes, cells, self.budget, self.cost)

    def _together(
        self, numbers: Sequence[int], cells: Sequence[Cell], title: str, progress: bool | None
    ) -> Iterator[tuple[int, Scores]]:
        """The scores of cells that share values of the base run, with their numbers."""
        done: set[int] = set()
        try:
            for i, scores in self._incrementally(cells, self.reads, title, progress):
                done.add(i)
                yield numbers[i], scores
        except UntracedAccess:  # a metric reads logits that it did not read in the base run: compute all of them
            left = [i for i in range(len(cells)) if i not in done]
            for i, scores in self._incrementally([cells[i] for i in left], EVERYTHING, title, progress):
                yield numbers[left[i]], scores

    @cached_property
    def _image_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the values at sites whose batch are images."""
        return shapes_at(self.model, self.tokens)

    def _n_pos(self, site: str) -> int:
        """The number of positions at a site."""
        if not (is_of_images(self.model, site) or isinstance(self.tokens, ImagesAndTexts)):
            return tokens_at(self.model, self.tokens, site).shape[1]
        shape = self._image_shapes.get(site) or shapes_at(self.model, self.tokens, [site])[site]
        return n_positions(shape, self.model.hook_dict[site].dims)

    def _is_kept_by_a_base_run(self, change: Change) -> bool:
        """Whether a base run can include this change: it is before the blocks, or at a site where cells can repeat it."""
        before = not any((point.name or "").startswith("blocks.") for point in self.model.points(change.site))
        return isinstance(change, Edit) and (change.site in self.site_infos or before)

    def _checked_cell(self, cell: Cell) -> list[Change]:
        """The cell with full site names and nonnegative positions; KeyError and IndexError for those that do not exist,
        ValueError for positions of a site without them."""
        checked = list[Change]()
        for change in cell:
            [site] = self.model.names(change.site)
            if isinstance(change, Edit) and change.positions is not None:
                if not {"pos", "patch", "query_pos", "key_pos"}.intersection(self.model.hook_dict[site].dims):
                    raise ValueError(f"positions={change.positions}, and '{site}' has no axis of positions")
                n_pos = self._n_pos(site)
                for pos in change.positions:
                    if not -n_pos <= pos < n_pos:
                        raise IndexError(f"position {pos} at '{site}' is out of range: the prompts have {n_pos}")
                change = replace(change, positions=tuple(pos % n_pos for pos in change.positions))
            checked.append(change if change.site == site else replace(change, site=site))
        return checked

    def _is_before_blocks(self, cell: Cell) -> bool:
        """Whether a cell changes what enters the blocks of a model that reads images."""
        return any(is_before_blocks(self.model, change.site) for change in cell)

    def _is_known(self, cell: Cell) -> bool:
        """Whether the positions that a cell affects are known.

        They are not if the cell edits an on-demand site, and the base run is changed before attention in the same layer: the
        copies at on-demand sites bypass the sites of the norm, so every position of the cell differs from the base run.
        """
        before_blocks = [is_before_blocks(self.model, change.site) for change in cell]
        if any(before_blocks) and FIRST_STREAM not in self.site_infos:
            return False
        later = [change for change, is_before in zip(cell, before_blocks, strict=True) if not is_before]
        if not all(isinstance(change, Edit) and change.site in self.site_infos for change in later):
            return False
        if norm_and_copies([*cell, *self.base_changes]):
            return False
        layers = {self.site_infos[change.site].layer for change in later if self.site_infos[change.site].on_demand}
        base = [self.site_infos[change.site] for change in self.base_changes if change.site in self.site_infos]
        return layers.isdisjoint(info.layer for info in base if info.scope is TokenScope.BEFORE_MIXING)

    def _warn_of_whole_forwards(self, reason: str, n_cells: int) -> None:
        """Warns the caller of this package that cells take longer than others; not for a kind of model whose cells always do."""
        if self.decoder is not None:
            run = (
                "1 cell runs as a whole forward pass"
                if n_cells == 1
                else f"{n_cells} cells run as whole forward passes"
            )
            warn_caller(f"{reason}: {run}")

    def _reason_of(self, cells: Sequence[Cell]) -> str:
        if self.fallback_reason is not None:
            return self.fallback_reason
        if any(norm_and_copies([*cell, *self.base_changes]) for cell in cells):
            return "a norm is changed together with copies of the stream that bypass its sites"
        unsupported = next((change for change in (*cells[0], *self.base_changes) if not self._is_known([change])), None)
        if isinstance(unsupported, Edit):
            return f"the positions that a change at '{unsupported.site}' affects are not known"
        where = "" if unsupported is None else f" at '{unsupported.site}'"
        return (
            f"the positions that a function of a whole value changes{where} are not known "
            "(use a controller with acts_by_position)"
        )

    def _incrementally(
        self, cells: Sequence[Cell], reads: TracedAccess, title: str, progress: bool | None
    ) -> Iterator[tuple[int, Scores]]:
        if not cells:
            return
        assert self.base is not None, "cells share the values of a base run"
        first_change = FirstChange(self.base, self.site_infos)
        base, edits = self.base, [first_change.without_unchanged_prefix(_edits(cell)) for cell in cells]
        planner = Planner(base, self.site_infos, reads.interval(base.n_pos))
        schedules = [planner.schedule(*each) for each in enumerate(edits)]
        for schedule in schedules:
            if not schedule.spans:
                yield schedule.cell, self.scores
        tokens = (
            None
            if reads.tokens is None or self._edits_logits(edits)
            else torch.tensor(reads.tokens, device=self.device)
        )
        base_logits = self.base_logits if reads == self.reads else base.logits.some(reads)
        changing = [schedule for schedule in schedules if schedule.spans]
        n_rows = sum(schedule.layer_rows for schedule in changing) * base.n_prompts
        with progress_bar(title, n_rows, progress, unit="rows") as bar:
            for batch in batches(changing, self.budget, base, reads):
                this = BatchedPass(base, self.site_infos, edits, batch)
                for cell, (start, stop), logits in this.run(tokens):
                    whole = self._filled(base_logits, logits, start, stop, reads, tokens is None)
                    yield cell, self._scores(whole, reads)
                del logits, whole  # before the next pass makes its own
                self.cost.add(this.cost)
                bar.update(sum(schedule.layer_rows for schedule in batch) * base.n_prompts)

    def _scores(self, logits: Float[Tensor, "batch some_pos *some_token"], reads: TracedAccess) -> Scores:
        """The metrics of a cell; each may change its logits in place."""
        return self._checked(values_of(self.metrics, logits, reads, self.shape), self.scores.shape[1])

    def _edits_logits(self, edits: Sequence[Sequence[Edit]]) -> bool:
        """Whether any cell edits a site of the unembedding, which then computes all logits."""
        return any(edit.site.startswith("unembed.") for cell in (*edits, _edits(self.base_changes)) for edit in cell)

    def _filled(
        self, base: Tensor, own: Tensor, start: int, stop: int, reads: TracedAccess, all_tokens: bool
    ) -> Float[Tensor, "batch some_pos some_token"]:
        """The logits that metrics read: those of the base run, with the cell's at the positions that differ."""
        positions = range(base.shape[1]) if reads.positions is None else reads.positions
        slots = [slot for slot, pos in enumerate(positions) if start <= pos < stop]
        there = None if len(slots) == own.shape[1] else tuple(positions[slot] - start for slot in slots)
        own = select_logits(own, TracedAccess(there, reads.tokens if all_tokens else None))
        if len(slots) == base.shape[1]:
            return own
        whole = base.clone()
        whole[:, slots] = own.to(whole)
        return whole

    def _whole(
        self, cells: Sequence[Cell], others: Sequence[int], title: str, progress: bool | None
    ) -> Iterator[tuple[int, Scores]]:
        chosen = [cells[i] for i in others]
        sites = {change.site for cell in (self.base_changes, *chosen) for change in cell}
        together = not self._may_see_the_batch and all(map(self._is_by_row, sites))
        if isinstance(self.tokens, ImagesAndTexts):  # images of a cell would meet texts of others
            together = False
        shape = torch.Size([len(self.tokens), max(self.tokens.shape[1], self.shape[1]), self.shape[-1]])
        n_cells = self.budget.cells_of_whole_forwards(self.model, shape) if together else 1
        with progress_bar(title, len(chosen), progress if chosen else False, unit="cells") as bar:
            for i, logits in whole_forwards(self.model, self.tokens, chosen, self.base_changes, n_cells):
                self.cost.forwards += 1
                bar.update()
                yield others[i], self._scores(logits, EVERYTHING)

    @property
    def _may_see_the_batch(self) -> bool:
        """Whether there is a user hook or a third-party module, which may depend on the number of rows."""
        return any(
            module.is_listening if isinstance(module, HookPoint) else not is_ours(module)
            for module in self.model.modules()
        )

    def _is_by_row(self, site: str) -> bool:
        """Whether axis 0 of a site is the batch; inside experts it is tokens."""
        return all(point.dims[:1] == ("batch",) for point in self.model.points(site))


def norm_and_copies(changes: Sequence[Change]) -> bool:
    """Whether copies of the stream (`hook_q_input`, `hook_attn_in`, ...) change in one layer with what some of them bypass: the
    norm before attention, or the latent and the norm that keys and values share where their inputs are the same."""
    blocks: dict[bool, set[str]] = {True: set(), False: set()}
    for change in changes:
        copies = change.site.endswith(("_input", ".hook_attn_in", ".hook_mlp_in", ".hook_mixer_in"))
        found = re.match(r"(.*)\.hook_\w+$" if copies else BYPASSED, change.site)
        if found is not None:
            blocks[copies].add(found[1])
    return not blocks[True].isdisjoint(blocks[False])


def _edits(cell: Sequence[Change]) -> list[Edit]:
    return [change for change in cell if isinstance(change, Edit)]


def _is_number_like(value: object) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
