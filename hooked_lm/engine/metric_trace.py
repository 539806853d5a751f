"""Traces which logits a metric reads, so that only these are computed.

Each metric runs once on a wrapper of the base run's logits that records its indices. All scores, including those of the base
run, are then computed from copies of these logits alone, so a metric may do anything with the indexed values. Anything but
indexing, and an index that the tracer does not support, makes all logits be computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

Index = tuple[Any, Any, Any]  # of the axes batch, pos, d_vocab
Metric = Callable[[Tensor], Any]
ALL = slice(None)


class UntracedAccess(BaseException):
    """A metric reads logits that it did not read in the base run."""


@dataclass(frozen=True)
class TracedAccess:
    """The positions and tokens whose logits are read, in order; None: all."""

    positions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def interval(self, n_pos: int) -> tuple[int, int]:
        """The smallest interval that contains the positions that are read."""
        return (0, n_pos) if self.positions is None else (self.positions[0], self.positions[-1] + 1)


EVERYTHING = TracedAccess()


@dataclass(frozen=True)
class Logits:
    """Lazy logits [batch, pos, d_vocab]: `some(reads)` computes those that are read, as a new tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    some: Callable[[TracedAccess], Tensor]

    @classmethod
    def of(cls, logits: Float[Tensor, "..."]) -> "Logits":
        """Wraps a tensor of logits."""
        return cls(logits.shape, logits.dtype, logits.device, lambda reads: select_logits(logits, reads).clone())


def select_logits(logits: Float[Tensor, "..."], reads: TracedAccess) -> Float[Tensor, "..."]:
    """The logits that are read, by a single indexing operation."""
    if reads == EVERYTHING:
        return logits
    positions, tokens = (
        ALL if some is None else torch.tensor(some, dtype=torch.long, device=logits.device)
        for some in (reads.positions, reads.tokens)
    )
    if isinstance(positions, Tensor) and isinstance(tokens, Tensor):
        positions = positions[:, None]
    return logits[:, positions, tokens]


def reads_of(
    metrics: Sequence[Metric], logits: Tensor | Logits, known: TracedAccess | None = None
) -> tuple[TracedAccess, list[Any]]:
    """The logits that these metrics read, and their values; `known` skips the tracing, unless they turn out to read more."""
    source = Logits.of(logits) if isinstance(logits, Tensor) else logits
    reads, pieces = (known, {}) if known is not None else _traced(metrics, source)
    some = pieces[reads] if reads in pieces else source.some(reads)
    pieces.clear()
    try:
        return reads, values_of(metrics, some, reads, source.shape)
    except UntracedAccess:
        if reads == EVERYTHING:
            raise
        return EVERYTHING, values_of(metrics, source.some(EVERYTHING), EVERYTHING, source.shape)


def values_of(
    metrics: Sequence[Metric], logits: Float[Tensor, "..."], reads: TracedAccess, shape: torch.Size
) -> list[Any]:
    """The values of metrics on logits of which only those of `reads` exist; each metric may change its copy in place.

    Raises UntracedAccess if one reads other logits.
    """
    copies = (logits.clone() if left else logits for left in reversed(range(len(metrics))))
    return [value_of(metric, copy, reads, shape) for metric, copy in zip(metrics, copies, strict=True)]


def value_of(metric: Metric, logits: Float[Tensor, "..."], reads: TracedAccess, shape: torch.Size) -> Any:
    """The value of one metric on logits of which only those of `reads` exist; raises UntracedAccess if it reads others."""
    given = partial_logits(logits, reads, shape)
    value = metric(given)
    if isinstance(given, TracedLogits) and given.is_untraced:  # the metric caught the UntracedAccess
        raise UntracedAccess
    return value


def partial_logits(logits: Float[Tensor, "..."], reads: TracedAccess, shape: torch.Size) -> Float[Tensor, "..."]:
    """Logits of a given shape of which only those of `reads` exist; reading others raises UntracedAccess."""
    if reads == EVERYTHING:
        return logits
    return TracedLogits.over(shape, logits, lambda index: _indexed(logits, index, reads, shape))


def _traced(metrics: Sequence[Metric], source: Logits) -> tuple[TracedAccess, dict[TracedAccess, Tensor]]:
    """The logits that these metrics read, and the tensors that were computed to trace them.

    EVERYTHING if they read nothing, or do anything but index the logits.
    """
    indices, pieces = list[Index](), dict[TracedAccess, Tensor]()

    def take(index: Index) -> Tensor:
        reads = TracedAccess(*(entries_of(index[axis], source.shape[axis]) for axis in (1, 2)))
        if reads not in pieces:
            pieces[reads] = source.some(reads)
        indices.append(index)
        return _indexed(pieces[reads].clone(), index, reads, source.shape)

    for metric in metrics:
        shown = TracedLogits.over(source.shape, source, take)
        try:
            metric(shown)
        except (
            UntracedAccess,
            Exception,
        ):  # in tracing, the pieces are separate tensors, which may cause the error: use all logits
            shown.is_untraced = True
        if shown.is_untraced:
            return EVERYTHING, pieces
    return _reads(indices, source.shape), pieces


def _reads(indices: Sequence[Index], shape: torch.Size) -> TracedAccess:
    """The union of the logits that these indices select; EVERYTHING if they select none."""
    axes = [[entries_of(index[axis], shape[axis]) for index in indices] for axis in (1, 2)]
    found = [None if None in axis else tuple(sorted({i for some in axis for i in some or ()})) for axis in axes]
    return EVERYTHING if () in found else TracedAccess(*found)


# Attributes and methods that do not read the logits.
METADATA_ONLY = {
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")
}
METADATA_ONLY |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.__len__, Tensor.__repr__}


class TracedLogits(Tensor):
    """A wrapper of logits that supports indexing; any other operation sets `is_untraced` and raises UntracedAccess."""

    is_untraced: bool
    _take: Callable[[Index], Tensor]

    @classmethod
    def over(cls, shape: torch.Size, like: Tensor | Logits, take: Callable[[Index], Tensor]) -> "TracedLogits":
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.is_untraced, made._take = False, take
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"logits {tuple(self.shape)}, only partly computed"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA_ONLY:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.__getitem__ and isinstance(args[0], TracedLogits):
            index = _index(args[1], args[0].shape)
            if index is not None:
                try:
                    return args[0]._take(index)
                except (UntracedAccess, IndexError):
                    pass
        raise cls._untraced(args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise cls._untraced(args, kwargs)

    @classmethod
    def _untraced(cls, *given: Any) -> UntracedAccess:
        for shown in tree_leaves(given):
            if isinstance(shown, TracedLogits):
                shown.is_untraced = True
        return UntracedAccess()


def _indexed(compact: Tensor, index: Index, reads: TracedAccess, shape: torch.Size) -> Tensor:
    """Indexes logits of which only those of `reads` exist; raises UntracedAccess if the index selects others."""
    first, pos, token = index
    return compact[first, _translated(pos, reads.positions, shape[1]), _translated(token, reads.tokens, shape[2])]


def _index(index: Any, shape: torch.Size) -> Index | None:
    """The index with one entry for each of three axes; None if it is not supported (new axes, masks, out of range)."""
    items = list(index) if isinstance(index, tuple) else [index]
    if len(shape) != 3 or any(item is None or isinstance(item, TracedLogits) or _is_mask(item) for item in items):
        return None
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [ALL] * (4 - len(items))
    if len(items) > 3:
        return None
    items += [ALL] * (3 - len(items))
    fits = all(_is_plain(item) and _is_in(item, size) for item, size in zip(items, shape, strict=True))
    return (items[0], items[1], items[2]) if fits else None


def _is_plain(item: Any) -> bool:
    """Whether an index is an int, a slice, or several ints."""
    if isinstance(item, Tensor):
        return not item.is_floating_point() and not item.is_complex()
    return isinstance(item, (int, slice)) or (isinstance(item, (list, range)) and all(isinstance(i, int) for i in item))


def _is_mask(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype in (torch.bool, torch.uint8)
    return isinstance(item, bool) or (isinstance(item, (list, tuple)) and any(isinstance(i, bool) for i in item))


def _is_in(item: Any, size: int) -> bool:
    """Whether an index is in range for an axis of this size (and not a slice with a negative step)."""
    if isinstance(item, slice):
        return item.step is None or item.step > 0
    numbers = _numbers(item)
    return not numbers or (-size <= min(numbers) and max(numbers) < size)


def _numbers(item: Any) -> list[int]:
    return [item] if isinstance(item, int) else item.flatten().tolist() if isinstance(item, Tensor) else list(item)


def entries_of(item: Any, size: int) -> tuple[int, ...] | None:
    """The entries of an axis that an index in range selects; None for all."""
    if isinstance(item, slice):
        return None if item == ALL else tuple(range(*item.indices(size)))
    return tuple(sorted({i % size for i in _numbers(item)}))


def _translated(item: Any, there: tuple[int, ...] | None, size: int) -> Any:
    """Translates an index to an axis of which only the entries `there` exist; raises UntracedAccess if it selects others."""
    if there is None:
        return item
    wanted = entries_of(item, size)
    if wanted is None or not set(wanted) <= set(there):
        raise UntracedAccess
    slots = {place: slot for slot, place in enumerate(there)}
    if isinstance(item, slice):
        first = slots[wanted[0]] if wanted else 0
        if [slots[place] for place in wanted] != list(range(first, first + len(wanted))):
            raise UntracedAccess  # the entries are not contiguous
        return slice(first, first + len(wanted))
    if isinstance(item, int):
        return slots[item % size]
    if isinstance(item, Tensor):
        table = torch.zeros(size, dtype=torch.long)
        table[list(there)] = torch.arange(len(there))
        return table.to(item.device)[item]
    return [slots[i % size] for i in item]
