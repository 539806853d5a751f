"""The linear recurrence that state-space mixers share, without a step for every position."""

from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hooks import HookPoint, is_listening

LARGE = 1024  # numbers in the states of one position

Steps = Float[Tensor, "batch pos *state"]


def linear_scan(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """`state[pos] = decay[pos] * state[pos - 1] + update[pos]`, after `start` (zeros if None); all states.

    `decay` broadcasts against `update`, and lies between 0 and 1. Takes about `2 sqrt(pos)` steps: pieces of the
    positions are scanned side by side, each from zero; what a piece begins with is carried from piece to piece and
    added, decayed, to all of its positions. Nothing is ever divided by a decay, so small ones do no harm. A step that is
    work enough for a CPU is taken for every position: that moves a third of the memory.
    """
    n_pos, size = update.shape[1], update[:, 0].numel()
    if n_pos < 8 or (update.device.type == "cpu" and size >= LARGE):
        return step_by_step(decay, update, start)
    length = isqrt(n_pos)
    n_whole = n_pos // length * length
    states = _in_pieces(decay[:, :n_whole], update[:, :n_whole], start, length)
    if n_whole == n_pos:
        return states
    return torch.cat([states, step_by_step(decay[:, n_whole:], update[:, n_whole:], states[:, -1])], 1)


def step_by_step(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """The same, a step for each position."""
    decays, updates = decay.unbind(1), update.unbind(1)  # at once: the gradient of an index is as large as all
    states = [updates[0] if start is None else torch.addcmul(updates[0], decays[0], start)]
    for kept, added in zip(decays[1:], updates[1:], strict=True):
        states.append(torch.addcmul(added, kept, states[-1]))
    return torch.stack(states, 1)


def _in_pieces(decay: Tensor, update: Steps, start: Tensor | None, length: int) -> Steps:
    """The same for a number of positions that is a multiple of `length`."""
    decays, updates = decay.unflatten(1, (-1, length)).unbind(2), update.unflatten(1, (-1, length)).unbind(2)
    totals, states = [decays[0]], [updates[0]]
    for kept, added in zip(decays[1:], updates[1:], strict=True):
        totals.append(totals[-1] * kept)
        states.append(torch.addcmul(added, kept, states[-1]))
    starts = [torch.zeros_like(update[:, 0]) if start is None else start]
    for last, total in zip(states[-1].unbind(1)[:-1], totals[-1].unbind(1)[:-1], strict=True):
        starts.append(torch.addcmul(last, total, starts[-1]))
    carried = torch.stack(starts, 1)[:, :, None]
    return torch.addcmul(torch.stack(states, 2), torch.stack(totals, 2), carried).flatten(1, 2)


def shown_states(point: HookPoint, decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """All states, shown at a point where they can be edited; what is edited stays so, and later states follow from it.

    The point sees the states of the run without the edit, once. A number that it changes is the state at that
    position; the others are those of the recurrence. So is the gradient at the point: it counts what later positions
    make of a state. In generation with a cache each step is such a run of its own: it sees states that follow from the
    edits of the steps before.
    """
    states = linear_scan(decay, update, start)
    if not is_listening(point):
        return states
    given = point(states)
    kept = given == states
    if bool(kept.all()) and not (torch.is_grad_enabled() and given.requires_grad):
        return states
    return linear_scan(torch.where(kept, decay, 0.0), torch.where(kept, update + (given - states), given), start)
