"""Which positions of a value a hook object means: by number, by name, or by what the tokens of a conversation are.

Outside generation a position is a column of the value. During generation it is a token index in the row, without padding, and
negative positions count from the end of the prompt at every step. The result is the same with and without a key/value cache.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.indices import Indices, Plain, indices_of_slice, plain_indices
from hooked_lm.hooks.token_labels import PARTS, ROLES, Labels, Named, check_named, is_named, select_positions

Positions = Named | Indices
NAMED_POSITIONS = ("all", "prompt", "last_prompt", "generated")


def check_positions(given: Positions) -> Named | Plain:
    """The positions as a name or as plain indices; ValueError for an unknown name, TypeError for what is no index."""
    if is_named(given):
        check_named(given)
        return tuple(given) if isinstance(given, list) else given
    if not isinstance(given, str):
        return plain_indices("positions", given)
    if given not in NAMED_POSITIONS:
        names = ", ".join((*NAMED_POSITIONS, *ROLES, *PARTS))
        raise ValueError(f"positions must be numbers or one of {names}, got {given!r}")
    return given


@dataclass(frozen=True)
class VisiblePositions:
    """The positions of one row's sequence in a value: `n` columns from position `first` on (below 0: padding).

    The sequence is a prompt of `n_prompt` tokens and its continuation. `row` is None if all rows have the same positions, and
    `labels` say what its tokens are, if it is a conversation. `columns` are those of the `n` that the value has; None: all.
    """

    first: int
    n: int
    n_prompt: int
    is_generating: bool = False
    row: int | None = None
    n_padding: int = 0  # at the beginning
    labels: Labels | None = None
    columns: Sequence[int] | None = None

    @classmethod
    def at(cls, hook: HookPoint, n: int, given: Positions = None) -> "list[VisiblePositions]":
        """The positions in a value with `n` columns, one entry per row if rows differ. Outside generation all are prompt.

        Rows also differ if the positions asked for are named, and the conversations of the rows have different labels.
        """
        if hook.columns is not None:
            return [
                replace(one, columns=hook.columns.shown) for one in cls.at(hook.columns.point, hook.columns.n, given)
            ]
        positions, step = hook.positions, hook.step
        if positions is None or step is None or positions.shape[-1] != n:
            same = [cls(0, n, n)]
        else:
            ends = torch.stack([positions[..., -1], (positions < 0).sum(-1)]).view(2, -1).tolist()
            rows = [None] if positions.ndim == 1 else range(len(positions))
            same = [
                cls(last - n + 1, n, last + 1 - step, True, row, gap)
                for row, last, gap in zip(rows, *ends, strict=True)
            ]
        return _with_labels(same, hook, given) if is_named(given) else same

    def index(self, position: int) -> int:
        """Where the value has this position."""
        column = position - self.first
        return column if self.columns is None else bisect_left(self.columns, column)

    @property
    def here(self) -> Sequence[int]:
        """The positions that the value has, without padding."""
        start = max(self.first + self.n_padding, 0)
        if self.columns is None:
            return range(start, self.first + self.n)
        return [self.first + column for column in self.columns if self.first + column >= start]

    def chosen(self, given: Positions, where: str) -> dict[int, int]:
        """The selected positions in the value, each with its index in the selection `given`."""
        found: dict[int, int] = {}
        for position, order in self.listed(given, where):
            found.setdefault(position, order)
        return found

    def listed(self, given: Positions, where: str) -> list[tuple[int, int]]:
        """`chosen` as pairs, including positions that are given twice."""
        here = self.here
        if given is None or given == "all":
            return [(position, position) for position in here]
        if given == "prompt":
            return [(position, position) for position in here if position < self.n_prompt]
        if given == "generated":
            return [(position, position - self.n_prompt) for position in here if position >= self.n_prompt]
        if isinstance(given, slice):
            return self._in_slice(given, here, where)
        if is_named(given):
            return [(i, order) for order, i in enumerate(self._with_meaning(given, where)) if i in here]
        numbers = listed(given)
        for wrong in (i for i in numbers if i < -self.n_prompt or (i >= self.n_prompt and not self.is_generating)):
            raise IndexError(
                f"position {wrong} is out of range at '{where}': there are {self.n_prompt} positions, so {-self.n_prompt} "
                f"to {self.n_prompt - 1}"
            )
        resolved = [i if i >= 0 else self.n_prompt + i for i in numbers]
        return [(position, order) for order, position in enumerate(resolved) if position in here]

    def _with_meaning(self, given: Named, where: str) -> list[int]:
        """The named positions of the conversation."""
        if self.labels is None:
            raise ValueError(
                f"positions={given!r} at '{where}': the prompt of this run has no roles; run the model on "
                "model.chat(messages), or give numbers"
            )
        return select_positions(self.labels, given, self.n_prompt if self.is_generating else None)

    def _in_slice(self, given: slice, here: Sequence[int], where: str) -> list[tuple[int, int]]:
        """`listed` for a slice; without a stop it includes generated tokens."""
        start, step = self._bound(given.start, 0), 1 if given.step is None else given.step
        stop = self._bound(given.stop, self.first + self.n)
        if step < 0:
            raise ValueError(f"positions={given} at '{where}': a slice of positions has a step above 0")
        wanted = range(start, stop, step)
        if not self.is_generating and not any(position in wanted for position in range(self.n_prompt)):
            raise IndexError(f"positions={given} contains none of the {self.n_prompt} positions at '{where}'")
        return [(position, wanted.index(position)) for position in here if position in wanted]

    def _bound(self, bound: int | None, default: int) -> int:
        """A bound of a slice; negative ones count from the end of the prompt."""
        return default if bound is None else bound if bound >= 0 else max(0, self.n_prompt + bound)


def _with_labels(shown: list[VisiblePositions], hook: HookPoint, given: Named) -> list[VisiblePositions]:
    """The same with labels, one entry per row if those differ; as they are if there are none."""
    labels = hook.labels
    if labels is None:
        return shown
    if not shown[0].is_generating and shown[0].n != len(labels[0]):
        raise ValueError(
            f"positions={given!r} at '{hook.name}': it has {shown[0].n} positions, the conversation {len(labels[0])}"
        )
    if len(shown) == 1 and all(row == labels[0] for row in labels):
        return [replace(shown[0], labels=labels[0])]
    rows = shown * len(labels) if len(shown) == 1 else shown
    return [replace(each, row=i, labels=row) for i, (each, row) in enumerate(zip(rows, labels, strict=True))]


def listed(given: Positions) -> list[int]:
    """Positions given as ints, as "last_prompt" or as a slice with a start and a stop from the front, as a list.

    Raises ValueError for a slice with an open or negative end, whose length depends on the prompt.
    """
    if isinstance(given, slice):
        return indices_of_slice(given)
    if is_named(given):
        raise ValueError(f"positions={given!r} are different numbers in each conversation: give numbers here")
    return [-1] if given == "last_prompt" else [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]  # ints
