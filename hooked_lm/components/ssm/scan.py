"""The recurrences of state-space mixers; linear ones in fewer sequential steps than positions."""

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.readable import is_at_hand
from hooked_lm.hooks import HookPoint, is_listening

LARGE = 1024  # entries of the states at one position

Steps = Float[Tensor, "batch pos *state"]


def linear_scan(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """`state[pos] = decay[pos] * state[pos - 1] + update[pos]`, after `start` (zeros if None); all states.

    `decay` broadcasts against `update`, and is between 0 and 1. Takes about `2 sqrt(pos)` sequential steps: segments of the
    positions are scanned in parallel, each from zero; the initial state of each segment is computed from the previous one
    and added, decayed, to all its positions. There is no division by a decay, so small ones lose no precision. On a CPU large
    states are scanned one position at a time, which moves a third of the memory.
    """
    n_pos, size = update.shape[1], update[:, 0].numel()
    if n_pos < 8 or (update.device.type == "cpu" and size >= LARGE):
        return step_by_step(decay, update, start)
    length = isqrt(n_pos)
    n_whole = n_pos // length * length
    states = _in_segments(decay[:, :n_whole], update[:, :n_whole], start, length)
    if n_whole == n_pos:
        return states
    return torch.cat([states, step_by_step(decay[:, n_whole:], update[:, n_whole:], states[:, -1])], 1)


def step_by_step(decay: Tensor, update: Steps, start: Tensor | None = None) -> Steps:
    """All states of `linear_scan`, computed one position at a time."""
    # unbound, not indexed: the gradient of each index is as large as the tensor
    decays, updates = decay.unbind(1), update.unbind(1)
    states = [updates[0] if start is None else torch.addcmul(updates[0], decays[0], start)]
    for decay_here, update_here in zip(decays[1:], updates[1:], strict=True):
        states.append(torch.addcmul(update_here, decay_here, states[-1]))
    return torch.stack(states, 1)


def _in_segments(decay: Tensor, update: Steps, start: Tensor | None, length: int) -> Steps:
    """All states of `linear_scan`, in segments of `length` positions, which must divide their number."""
    decays, updates = decay.unflatten(1, (-1, length)).unbind(2), update.unflatten(1, (-1, length)).unbind(2)
    totals, states = [decays[0]], [updates[0]]
    for decay_here, update_here in zip(decays[1:], updates[1:], strict=True):
        totals.append(totals[-1] * decay_here)
        states.append(torch.addcmul(update_here, decay_here, states[-1]))
    starts = [torch.zeros_like(update[:, 0]) if start is None else start]
    for last, total in zip(states[-1].unbind(1)[:-1], totals[-1].unbind(1)[:-1], strict=True):
        starts.append(torch.addcmul(last, total, starts[-1]))
    carried = torch.stack(starts, 1)[:, :, None]
    return torch.addcmul(torch.stack(states, 2), torch.stack(totals, 2), carried).flatten(1, 2)


class EditedStates(NamedTuple):
    """The states after a hook point, which of them are unchanged, and what the hooks added to them (zero with a gradient)."""

    states: Tensor
    unchanged: Tensor
    difference: Tensor


def edited_states(point: HookPoint, states: Steps) -> EditedStates | None:
    """The edits of all states at a hook point; None if there are none and no gradient passes the point."""
    if not is_listening(point):
        return None
    edited = point(states)
    unchanged = edited == states
    has_gradient = torch.is_grad_enabled() and edited.requires_grad
    if not has_gradient and is_at_hand(unchanged) and bool(unchanged.all()):
        return None
    return EditedStates(edited, unchanged, edited - states)


def edited_scan(decay: Tensor, update: Steps, start: Tensor | None = None, edits: EditedStates | None = None) -> Steps:
    """All states of `linear_scan`. Edited entries have their new values, and later states are computed from them."""
    if edits is not None:
        update = torch.where(edits.unchanged, update + edits.difference, edits.states)
        decay = torch.where(edits.unchanged, decay, 0.0)
    return linear_scan(decay, update, start)


def all_states(
    step: Callable[[int, Tensor], Tensor], start: Tensor, n_pos: int, edits: EditedStates | None = None
) -> Steps:
    """As `edited_scan`, for any recurrence: `step(pos, state)` is the state after a position, given the one before it."""
    states, state = list[Tensor](), start
    for pos in range(n_pos):
        state = step(pos, state)
        if edits is not None:
            state = torch.where(edits.unchanged[:, pos], state + edits.difference[:, pos], edits.states[:, pos])
        states.append(state)
    return torch.stack(states, 1)


def hooked_states(point: HookPoint, run: Callable[[EditedStates | None], Steps]) -> tuple[Steps, bool]:
    """All states that `run` computes after a hook point, and whether they are edited or have a gradient there.

    The hook is called once, with the states of the run without its edit. Entries that it changes keep their new values; all
    others are recomputed by the recurrence. The gradient at the point includes the effect of a state on later states. In
    generation with a cache each step calls the hook with states that follow from the edits of earlier steps.
    """
    states = run(None)
    edits = edited_states(point, states)
    return (states, False) if edits is None else (run(edits), True)


def read_states(
    point: HookPoint,
    n_pos: int,
    run: Callable[[EditedStates | None], Steps],
    read: Callable[[Steps], Tensor],
    in_chunks: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """The outputs `read` from all states, and the last state; see `hooked_states`.

    Several positions whose states nobody edits are computed `in_chunks`, also when a hook listens: its output is the same.
    """
    if n_pos == 1 or is_listening(point):
        states, edited = hooked_states(point, run)
        if n_pos == 1 or edited:
            return read(states), states[:, -1]
    return in_chunks()
