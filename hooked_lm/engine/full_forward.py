"""Whole forward passes, several cells in one batch: for changes whose affected positions are not known."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hooked_lm.engine.edit import Cell, Change, write_all
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.vision.inputs import Rows, repeated_rows

Keep = dict[str, Any]  # site -> its value


def whole_forwards(
    model: HookedRootModule, tokens: Rows, cells: Sequence[Cell], base: Cell, n_cells: int, keep: Keep | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yields each cell's index and output [batch, ...], up to `n_cells` in one pass. `keep` receives the values at its sites."""
    n_prompts = tokens.shape[0]
    for indices in passes(model, cells, n_cells):
        batch = [[*base, *cells[index]] for index in indices]
        sites = dict.fromkeys(change.site for cell in batch for change in cell)
        hooks: list[tuple[str, Any]] = [(site, writer(site, batch)) for site in sites]
        hooks += [] if keep is None else [(site, _keeper(keep)) for site in keep]
        outputs = model.run_with_hooks(repeated_rows(tokens, len(batch)), fwd_hooks=hooks)
        yield from zip(indices, outputs.unflatten(0, (len(batch), n_prompts)), strict=True)


def passes(model: HookedRootModule, cells: Sequence[Cell], n_cells: int) -> Iterator[list[int]]:
    """The cells of each pass.

    A hook at an on-demand site changes what other sites hold, in all rows: copies of the stream bypass the sites of the norm, or
    carry an axis of heads there, and values of copies bypass the latent of keys. So with such hooks, the cells of a pass have
    theirs at the same on-demand sites and norms.
    """

    def apart(cell: Cell) -> frozenset[str]:
        return frozenset(change.site for change in cell if is_on_demand(change.site) or ".ln1." in change.site)

    def is_on_demand(site: str) -> bool:
        return any(point.on_demand for point in model.points(site))

    any_on_demand = any(is_on_demand(change.site) for cell in cells for change in cell)
    groups: dict[frozenset[str], list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(apart(cell) if any_on_demand else frozenset(), []).append(index)
    for group in groups.values():
        yield from (group[start : start + n_cells] for start in range(0, len(group), n_cells))


def _keeper(keep: Keep) -> Callable[..., None]:
    def put(value: Tensor, hook: HookPoint) -> None:
        keep[hook.name or ""] = value

    put.records = True  # type: ignore[attr-defined]
    return put


def writer(site: str, batch: Sequence[Sequence[Change]]) -> Callable[..., Tensor]:
    """The hook of one site, which applies each cell's changes to its rows: of prompts, in a tower of images."""
    changes = [[change for change in cell if change.site == site] for cell in batch]

    def write(value: Tensor, hook: HookPoint) -> Tensor:
        if len(changes) == 1:
            return write_all(changes[0], value, hook.dims)
        n_rows = value.shape[0] // len(changes)
        for index, of_cell in enumerate(changes):
            if of_cell:
                rows = slice(index * n_rows, (index + 1) * n_rows)
                value[rows] = write_all(of_cell, value[rows], hook.dims)
        return value

    return write
