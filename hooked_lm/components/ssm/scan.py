"""The recurrences of state-space mixers; linear ones in fewer sequential steps than positions."""

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.readable import is_readable
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


class StateHistory(NamedTuple):
    """All states of a recurrence, and a function for what each was before its own edit, given those of earlier positions."""

    states: Steps
    before_edit: Callable[[], Steps]


class EditedStates(NamedTuple):
    """The states after a hook point, which of them are unchanged, and what the hooks added to them (zero with a gradient)."""

    states: Tensor
    unchanged: Tensor
    difference: Tensor

    def equal(self, other: "EditedStates") -> bool:
        """Whether the same entries have the same new values."""
        equal = (self.states == other.states) | (self.states.isnan() & other.states.isnan())
        return bool((equal | (self.unchanged & other.unchanged)).all())


def may_change(point: nn.Module) -> bool:
    """Whether anything at a point may change the value: hooks on the gradient and recorders do not."""
    return not isinstance(point, HookPoint) or point.may_change


def edited_states(point: HookPoint, states: Steps) -> EditedStates | None:
    """The edits of all states at a hook point; None if there are none and no gradient passes the point."""
    if not is_listening(point):
        return None
    edited = point(states)
    unchanged = edited == states
    has_gradient = torch.is_grad_enabled() and edited.requires_grad
    if not has_gradient and (not may_change(point) or bool(unchanged.all())):
        return None
    return EditedStates(edited, unchanged, edited - states)


def edited_scan(
    decay: Tensor, update: Steps, start: Tensor | None = None, edits: EditedStates | None = None
) -> StateHistory:
    """All states of `linear_scan`. Edited entries have their new values, and later states are computed from them."""
    if edits is None:
        states = linear_scan(decay, update, start)
    else:
        kept = torch.where(edits.unchanged, decay, 0.0)
        states = linear_scan(kept, torch.where(edits.unchanged, update + edits.difference, edits.states), start)

    def before_edit() -> Steps:
        first = torch.zeros_like(states[:, :1]) if start is None else start[:, None]
        return torch.addcmul(update, decay, torch.cat([first, states[:, :-1]], 1))

    return StateHistory(states, before_edit)


def all_states(
    step: Callable[[int, Tensor], Tensor], start: Tensor, n_pos: int, edits: EditedStates | None = None
) -> StateHistory:
    """As `edited_scan`, for any recurrence: `step(pos, state)` is the state after a position, given the one before it."""
    before, states, state = list[Tensor](), list[Tensor](), start
    for pos in range(n_pos):
        before.append(state := step(pos, state))
        if edits is not None:
            state = torch.where(edits.unchanged[:, pos], state + edits.difference[:, pos], edits.states[:, pos])
        states.append(state)
    return StateHistory(torch.stack(states, 1), lambda: torch.stack(before, 1))


def hooked_states(point: HookPoint, run: Callable[[EditedStates | None], StateHistory]) -> tuple[Steps, bool]:
    """All states that `run` computes after a hook point, and whether they are edited or have a gradient there.

    Entries that a hook changes keep their new values, and later states follow from them, as token by token with a cache. So a
    hook that changes states is called again, with what follows from its edits, until they stay the same: once more where they
    do not depend on the states, else up to once for each position, with the same random numbers; on a GPU the host waits for
    the values then. The gradient at the point includes the effect of a state on later states.
    """
    found = run(None)
    if not may_change(point):
        edits = edited_states(point, found.states)
        return (found.states, False) if edits is None else (run(edits).states, True)
    if not is_readable(found.states):
        raise NotImplementedError(
            f"an edit of '{point.name}' cannot be compiled, nor run on tensors without values: only values show whether it "
            "changes what later states follow from; run the model as it is"
        )
    draw_again = _same_draws(found.states.device)
    edits = edited_states(point, found.before_edit())
    if edits is None:
        return found.states, False
    if bool(edits.unchanged[:, :-1].all()):  # nothing follows
        return run(edits).states, True
    return _settled(point, run, edits, draw_again), True


def _settled(
    point: HookPoint,
    run: Callable[[EditedStates | None], StateHistory],
    edits: EditedStates,
    draw_again: Callable[[], None],
) -> Steps:
    """The states whose edits are those that the hooks make of them."""
    for _ in range(edits.states.shape[1] + 1):
        found = run(EditedStates(*(x.detach() for x in edits)))
        draw_again()
        following = edited_states(point, found.before_edit())
        if following is None:
            break
        has_gradient = torch.is_grad_enabled() and following.states.requires_grad
        if edits.equal(following):
            return run(following).states if has_gradient else found.states
        if has_gradient:
            raise NotImplementedError(
                f"an edit of '{point.name}' depends on states that follow from it, as of what is added at all positions, and "
                "no gradient passes through such edits; run within torch.no_grad(), or edit one position"
            )
        edits = following
    raise ValueError(
        f"the edit of '{point.name}' does not settle: at each position it has to depend on the states of this position and "
        "earlier ones alone, and to be the same when the hook is called again"
    )


def _same_draws(device: torch.device) -> Callable[[], None]:
    """A function after which torch draws the random numbers again that it draws from now on."""
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    here, there = torch.get_rng_state(), module.get_rng_state()

    def draw_again() -> None:
        torch.set_rng_state(here)
        module.set_rng_state(there)

    return draw_again


def read_states(
    point: HookPoint,
    n_pos: int,
    run: Callable[[EditedStates | None], StateHistory],
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
