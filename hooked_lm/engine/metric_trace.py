"""Which logits a metric reads. It is run once on the base run's to find out: whatever it takes out of them by an index is noted.
All scores, those of the base run too, are then made of these logits alone, by the same steps; so what a metric does with what
it took, writing into it included, is its own affair. An index that a tensor would refuse is refused by a tensor."""

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
    """A metric asks for logits that it did not ask for in the base run."""


@dataclass(frozen=True)
class TracedAccess:
    """The positions and tokens whose logits are read, in order; None: all."""

    positions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def interval(self, n_pos: int) -> tuple[int, int]:
        """From the first position that is read to after the last."""
        return (0, n_pos) if self.positions is None else (self.positions[0], self.positions[-1] + 1)


EVERYTHING = TracedAccess()


@dataclass(frozen=True)
class Logits:
    """Logits [batch, pos, d_vocab] that are computed where they are read: `some(reads)` makes a tensor of its own."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    some: Callable[[TracedAccess], Tensor]

    @classmethod
    def of(cls, logits: Float[Tensor, "..."]) -> "Logits":
        """Of logits that are there."""
        return cls(logits.shape, logits.dtype, logits.device, lambda reads: taken(logits, reads).clone())


def taken(logits: Float[Tensor, "..."], reads: TracedAccess) -> Float[Tensor, "..."]:
    """The logits that are read."""
    some = logits if reads.positions is None else logits[:, list(reads.positions)]
    return some if reads.tokens is None else some[:, :, list(reads.tokens)]


def reads_of(
    metrics: Sequence[Metric], logits: Tensor | Logits, known: TracedAccess | None = None
) -> tuple[TracedAccess, list[Any]]:
    """What these metrics read of the logits, and what they make of them; `known` is what they are taken to read, until they ask
    for more."""
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
    """The values of metrics on logits of which only those of `reads` exist; each metric may write into its copy. Raises
    UntracedAccess if one reads others."""
    copies = (logits.clone() if left else logits for left in reversed(range(len(metrics))))
    return [value_of(metric, copy, reads, shape) for metric, copy in zip(metrics, copies, strict=True)]


def value_of(metric: Metric, logits: Float[Tensor, "..."], reads: TracedAccess, shape: torch.Size) -> Any:
    """What one metric makes of logits of which these are there, also of a tensor that it writes into."""
    given = served(logits, reads, shape)
    value = metric(given)
    if isinstance(given, Shown) and given.is_short:  # the metric has caught what said so
        raise UntracedAccess
    return value


def served(logits: Float[Tensor, "..."], reads: TracedAccess, shape: torch.Size) -> Float[Tensor, "..."]:
    """Logits of a given shape of which only some are there; taking others out raises UntracedAccess."""
    if reads == EVERYTHING:
        return logits
    return Shown.over(shape, logits, lambda index: _indexed(logits, index, reads, shape))


def _traced(metrics: Sequence[Metric], source: Logits) -> tuple[TracedAccess, dict[TracedAccess, Tensor]]:
    """What these metrics read; everything, if they read nothing, or do anything but take out of the logits. And the logits that
    were computed to find out."""
    indices, pieces = list[Index](), dict[TracedAccess, Tensor]()

    def take(index: Index) -> Tensor:
        reads = TracedAccess(*(places_of(index[axis], source.shape[axis]) for axis in (1, 2)))
        if reads not in pieces:
            pieces[reads] = source.some(reads)
        indices.append(index)
        return _indexed(pieces[reads].clone(), index, reads, source.shape)

    for metric in metrics:
        shown = Shown.over(source.shape, source, take)
        try:
            metric(shown)
        except (
            UntracedAccess,
            Exception,
        ):  # it may be that the pieces are not parts of one tensor: they are in the next run
            shown.is_short = True
        if shown.is_short:
            return EVERYTHING, pieces
    return _reads(indices, source.shape), pieces


def _reads(indices: Sequence[Index], shape: torch.Size) -> TracedAccess:
    """What these indices take together; everything, if they take nothing."""
    axes = [[places_of(index[axis], shape[axis]) for index in indices] for axis in (1, 2)]
    found = [None if None in axis else tuple(sorted({i for some in axis for i in some or ()})) for axis in axes]
    return EVERYTHING if () in found else TracedAccess(*found)


# What may be asked of logits without reading them.
FREE = {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")}
FREE |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.__len__, Tensor.__repr__}


class Shown(Tensor):
    """Logits with a shape that can be indexed; anything else needs more of them: `is_short` is set, and UntracedAccess raised."""

    is_short: bool
    _take: Callable[[Index], Tensor]

    @classmethod
    def over(cls, shape: torch.Size, like: Tensor | Logits, take: Callable[[Index], Tensor]) -> "Shown":
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.is_short, made._take = False, take
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"logits {tuple(self.shape)}, of which only some are there"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FREE:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.__getitem__ and isinstance(args[0], Shown):
            index = _index(args[1], args[0].shape)
            if index is not None:
                try:
                    return args[0]._take(index)
                except (UntracedAccess, IndexError):
                    pass
        raise cls._too_few(args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise cls._too_few(args, kwargs)

    @classmethod
    def _too_few(cls, *given: Any) -> UntracedAccess:
        for shown in tree_leaves(given):
            if isinstance(shown, Shown):
                shown.is_short = True
        return UntracedAccess()


def _indexed(compact: Tensor, index: Index, reads: TracedAccess, shape: torch.Size) -> Tensor:
    """What an index takes of logits of which these are there; raises UntracedAccess if not all of it is."""
    first, pos, token = index
    return compact[first, _translated(pos, reads.positions, shape[1]), _translated(token, reads.tokens, shape[2])]


def _index(index: Any, shape: torch.Size) -> Index | None:
    """An index of three axes; None for one that is not understood (new axes, masks, out of range): then everything is read."""
    items = list(index) if isinstance(index, tuple) else [index]
    if len(shape) != 3 or any(item is None or isinstance(item, Shown) or _is_mask(item) for item in items):
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
    """Whether an index says by numbers which places it takes."""
    if isinstance(item, Tensor):
        return not item.is_floating_point() and not item.is_complex()
    return isinstance(item, (int, slice)) or (isinstance(item, (list, range)) and all(isinstance(i, int) for i in item))


def _is_mask(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype in (torch.bool, torch.uint8)
    return isinstance(item, bool) or (isinstance(item, (list, tuple)) and any(isinstance(i, bool) for i in item))


def _is_in(item: Any, size: int) -> bool:
    """Whether a tensor has all the places of an index."""
    if isinstance(item, slice):
        return item.step is None or item.step > 0
    numbers = _numbers(item)
    return not numbers or (-size <= min(numbers) and max(numbers) < size)


def _numbers(item: Any) -> list[int]:
    return [item] if isinstance(item, int) else item.flatten().tolist() if isinstance(item, Tensor) else list(item)


def places_of(item: Any, size: int) -> tuple[int, ...] | None:
    """The places on an axis that an index in range takes; None for all of them."""
    if isinstance(item, slice):
        return None if item == ALL else tuple(range(*item.indices(size)))
    return tuple(sorted({i % size for i in _numbers(item)}))


def _translated(item: Any, there: tuple[int, ...] | None, size: int) -> Any:
    """The same index into an axis of which only some places are there."""
    if there is None:
        return item
    wanted = places_of(item, size)
    if wanted is None or not set(wanted) <= set(there):
        raise UntracedAccess
    slots = {place: slot for slot, place in enumerate(there)}
    if isinstance(item, slice):
        first = slots[wanted[0]] if wanted else 0
        if [slots[place] for place in wanted] != list(range(first, first + len(wanted))):
            raise UntracedAccess  # others are between them
        return slice(first, first + len(wanted))
    if isinstance(item, int):
        return slots[item % size]
    if isinstance(item, Tensor):
        table = torch.zeros(size, dtype=torch.long)
        table[list(there)] = torch.arange(len(there))
        return table.to(item.device)[item]
    return [slots[i % size] for i in item]
