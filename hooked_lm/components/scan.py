"""The linear recurrence that state-space mixers share, without a step for every position."""

from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hooks import HookPoint, is_listening

Steps = Float[Tensor, "batch pos *state"]


def linear_scan(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """`state[pos] = decay[pos] * state[pos - 1] + update[pos]`, after `start` (zeros if None); all states.

    `decay` broadcasts against `update`, and lies between 0 and 1. Takes about `2 sqrt(pos)` steps: pieces of the
    positions are scanned side by side, each from zero; what a piece begins with is carried from piece to piece and
    added, decayed, to all of its positions. Nothing is ever divided by a decay, so small ones do no harm.
    """
    n_pos = update.shape[1]
    length = isqrt(n_pos)
    if n_pos < 8:
        return step_by_step(decay, update, start)
    n_whole = n_pos // length * length
    states = _in_pieces(decay[:, :n_whole], update[:, :n_whole], start, length)
    if n_whole == n_pos:
        return states
    return torch.cat([states, linear_scan(decay[:, n_whole:], update[:, n_whole:], states[:, -1])], 1)


def step_by_step(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """The same, a step for each position."""
    state = update[:, 0] if start is None else torch.addcmul(update[:, 0], decay[:, 0], start)
    states = [state]
    for pos in range(1, update.shape[1]):
        states.append(torch.addcmul(update[:, pos], decay[:, pos], states[-1]))
    return torch.stack(states, 1)


def _in_pieces(decay: Tensor, update: Steps, start: Tensor | None, length: int) -> Steps:
    """The same for a number of positions that is a multiple of `length`."""
    decays, updates = decay.unflatten(1, (-1, length)), update.unflatten(1, (-1, length))
    totals, states = [decays[:, :, 0]], [updates[:, :, 0]]
    for step in range(1, length):
        totals.append(totals[-1] * decays[:, :, step])
        states.append(torch.addcmul(updates[:, :, step], decays[:, :, step], states[-1]))
    starts = [torch.zeros_like(update[:, 0]) if start is None else start]
    for piece in range(1, updates.shape[1]):
        starts.append(torch.addcmul(states[-1][:, piece - 1], totals[-1][:, piece - 1], starts[-1]))
    carried = torch.stack(starts, 1)[:, :, None]
    return torch.addcmul(torch.stack(states, 2), torch.stack(totals, 2), carried).flatten(1, 2)


def shown_states(point: HookPoint, decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """All states, shown at a point where they can be edited; what is edited stays so, and later states follow from it.

    The point sees the states of the run without the edit, once. A number that it changes is the state at that
    position; the others are those of the recurrence. So is the gradient at the point: it counts what later positions
    make of a state.
    """
    states = linear_scan(decay, update, start)
    if not is_listening(point):
        return states
    given = point(states)
    kept = given == states
    if bool(kept.all()) and not (torch.is_grad_enabled() and given.requires_grad):
        return states
    return linear_scan(torch.where(kept, decay, 0.0), torch.where(kept, update + (given - states), given), start)
