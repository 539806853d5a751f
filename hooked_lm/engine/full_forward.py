"""Whole forward passes, several cells in one batch: for changes whose affected positions are not known."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hooked_lm.engine.edit import Cell, Change, write_all
from hooked_lm.hooks import HookedRootModule

Keep = dict[str, Any]  # site -> its value


def whole_forwards(
    model: HookedRootModule, tokens: Tensor, cells: Sequence[Cell], base: Cell, n_cells: int, keep: Keep | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yields each cell's index and output [batch, ...], `n_cells` cells in one pass. `keep` receives the values at its sites."""
    n_prompts = tokens.shape[0]
    for start in range(0, len(cells), n_cells):
        batch = [[*base, *cell] for cell in cells[start : start + n_cells]]
        sites = dict.fromkeys(change.site for cell in batch for change in cell)
        hooks: list[tuple[str, Any]] = [(site, _writer(site, batch, n_prompts)) for site in sites]
        hooks += [] if keep is None else [(site, _keeper(keep)) for site in keep]
        outputs = model.run_with_hooks(tokens.repeat(len(batch), 1), fwd_hooks=hooks)
        yield from enumerate(outputs.unflatten(0, (len(batch), n_prompts)), start)


def _keeper(keep: Keep) -> Callable[..., None]:
    def put(value: Tensor, hook: Any) -> None:
        keep[hook.name] = value

    put.records = True  # type: ignore[attr-defined]
    return put


def _writer(site: str, batch: Sequence[Sequence[Change]], n_prompts: int) -> Callable[..., Tensor]:
    """The hook of one site, which applies each cell's changes to its rows."""
    changes = [[change for change in cell if change.site == site] for cell in batch]

    def write(value: Tensor, hook: Any) -> Tensor:
        if len(changes) == 1:
            return write_all(changes[0], value, hook.dims)
        for index, of_cell in enumerate(changes):
            if of_cell:
                rows = slice(index * n_prompts, (index + 1) * n_prompts)
                value[rows] = write_all(of_cell, value[rows], hook.dims)
        return value

    return write
