"""Exact patching to check estimates: all cells of a grid, or some at random, if the cost allows."""

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.engine.cost import token_cost
from hooked_lm.engine.plan import SweepPlan
from hooked_lm.engine.prompts import Source, Values
from hooked_lm.engine.study import Metrics, Study
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows

Check = bool | int | None  # True: all cells; a number: that many; False: none; None: as many as are affordable
AFFORDABLE = 2e11  # floating-point operations
ENOUGH = 2000  # cells
FEWEST = 30  # fewer would be too small a sample


def check_valid(check: Check) -> None:
    """Raises ValueError for fewer than 2 cells, for which there is no correlation."""
    if check is not None and not isinstance(check, bool) and (not isinstance(check, int) or check < 2):
        raise ValueError(f"check must be True, False, None or a number of cells from 2 on, got {check!r}")


def n_checked(check: Check, n_cells: int, flops: float) -> int:
    """The number of cells to run, of `n_cells` that take `flops` floating-point operations each.

    >>> n_checked(None, 500, 1e6), n_checked(None, 500, 1e12), n_checked(100, 500, 1e12)
    (500, 0, 100)
    """
    if isinstance(check, bool):
        return n_cells if check else 0
    if check is not None:
        return min(check, n_cells)
    n = min(n_cells, ENOUGH, int(AFFORDABLE / flops))
    return n if n >= min(FEWEST, n_cells) else 0


def exact_values(
    plan: SweepPlan,
    estimated: Float[Tensor, "..."],
    tokens: Rows,
    other: Rows | None,
    source: Values,
    metric: Metrics,
    check: Check = None,
    seed: int = 0,
    changes: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Float[Tensor, "..."] | None:
    """The results of exact patching in the shape of the estimates, NaN where it was not run; None if it was run for no cell.

    `changes` is the base run, "corrupted" or "clean"; `tokens` are its tokens.
    """
    n_axes = len(plan.axes)
    is_there = ~estimated.reshape(-1, *estimated.shape[-n_axes - 1 :])[0, ..., 0].isnan()
    places = is_there.nonzero()
    n = n_checked(check, len(places), tokens.shape.numel() * _token_flops(plan.model))
    if n == 0:
        return None
    if n < len(places):
        drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:n]
        places = places[drawn.sort().values]
    new = Source(plan.model, source, other, tokens, plan.sites, plan.shapes)
    values = {site: new.value(site) for site in plan.sites}
    cells = {tuple(place): plan.cell_at(values, place) for place in places.tolist()}
    study = Study(plan.axes, cells, title=f"patching {n} of {int(is_there.sum())} cells", changes=changes)
    return study.carry_out(plan.model, tokens, metric, other, max_memory, progress).values


def _token_flops(model: torch.nn.Module) -> float:
    """The approximate floating-point operations of a forward pass per token."""
    if isinstance(model, Decoder):
        return float(sum(token_cost(block).total for block in model.blocks))
    return 2.0 * sum(weight.numel() for weight in model.parameters() if weight.ndim >= 2)
