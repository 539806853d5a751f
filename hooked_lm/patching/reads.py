"""Which logits a metric reads. It is shown the base run's once, and whatever it takes out of them by an index is remembered;
later runs compute that alone. What a metric does with what it took is its own affair."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

Index = tuple[Any, Any, Any]  # of the axes batch, pos, d_vocab
ALL = slice(None)


class ReadMore(BaseException):
    """A metric asks for logits that it did not ask for in the base run."""


@dataclass(frozen=True)
class Reads:
    """The positions and tokens whose logits are read, in order; None: all."""

    positions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def interval(self, n_pos: int) -> tuple[int, int]:
        """From the first position that is read to behind the last."""
        return (0, n_pos) if self.positions is None else (self.positions[0], self.positions[-1] + 1)


EVERYTHING = Reads()


@dataclass(frozen=True)
class Logits:
    """Logits [batch, pos, d_vocab] that are computed where they are read: `some(reads)` makes a tensor of its own."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    some: Callable[[Reads], Tensor]

    @classmethod
    def of(cls, logits: Float[Tensor, "batch pos d_vocab"]) -> "Logits":
        """Of logits that are there."""
        return cls(logits.shape, logits.dtype, logits.device, lambda reads: taken(logits, reads).clone())


def taken(logits: Float[Tensor, "batch pos d_vocab"], reads: Reads) -> Float[Tensor, "batch some_pos some_token"]:
    """The logits that are read."""
    some = logits if reads.positions is None else logits[:, list(reads.positions)]
    return some if reads.tokens is None else some[:, :, list(reads.tokens)]


def reads_of(metrics: Sequence[Callable[[Tensor], Any]], logits: Tensor | Logits) -> tuple[Reads, list[Any]]:
    """What these metrics read of the logits, and what they make of them."""
    source, indices = Logits.of(logits) if isinstance(logits, Tensor) else logits, list[Index | None]()
    values = [metric(_Recorder.over(source, indices)) for metric in metrics]
    return _reads(indices, source.shape), values


def _reads(taken: Sequence[Index | None], shape: torch.Size) -> Reads:
    """What these indices take together; everything, if they say nothing, or take nothing."""
    if not taken or None in taken:
        return EVERYTHING
    axes = [[places_of(index[axis], shape[axis]) for index in taken if index is not None] for axis in (1, 2)]
    found = [None if None in axis else tuple(sorted({i for some in axis for i in some or ()})) for axis in axes]
    return EVERYTHING if () in found else Reads(*found)


def served(
    logits: Float[Tensor, "batch some_pos some_token"], reads: Reads, shape: torch.Size
) -> Float[Tensor, "batch pos d_vocab"]:
    """Logits of a given shape of which only some are there; taking others out raises ReadMore."""
    return logits if reads == EVERYTHING else _Served.over(logits, reads, shape)


# What may be asked of logits without reading them.
FREE = {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")}
FREE |= {Tensor.is_floating_point, Tensor.size, Tensor.dim, Tensor.__len__}


class _Recorder(Tensor):
    """Logits that remember what is taken out of them, and compute that. What comes out is a plain tensor.

    Somebody who does more than to take out of them is given all of them, from then on.
    """

    _source: Logits
    _taken: list[Index | None]
    _whole: Tensor | None

    @classmethod
    def over(cls, source: Logits, indices: list[Index | None]) -> "_Recorder":
        made = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=source.device)
        made._source, made._taken, made._whole = source, indices, None
        return made

    def whole(self) -> Tensor:
        """All logits."""
        if self._whole is None:
            self._taken.append(None)
            self._whole = self._source.some(EVERYTHING)
        return self._whole

    def take_out(self, index: Index) -> Tensor:
        """What an index takes."""
        self._taken.append(index)
        shape = self._source.shape
        reads = Reads(places_of(index[1], shape[1]), places_of(index[2], shape[2]))
        return _indexed(self._source.some(reads), index, reads, shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args else None
        if func in FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(own, _Recorder) and own._whole is None:
            index = _index(args[1])
            if index is not None:
                return own.take_out(index)
        plain = tree_map(lambda x: x.whole() if isinstance(x, _Recorder) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(lambda x: x.whole() if isinstance(x, _Recorder) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class _Served(Tensor):
    """Logits of which only some are there."""

    _compact: Tensor
    _reads: Reads

    @classmethod
    def over(cls, compact: Tensor, reads: Reads, shape: torch.Size) -> "_Served":
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=compact.dtype, device=compact.device)
        made._compact, made._reads = compact, reads
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"logits {tuple(self.shape)}, of which {tuple(self._compact.shape)} are there"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args else None
        if func is Tensor.__getitem__ and isinstance(own, _Served):
            index = _index(args[1])
            if index is None:
                raise ReadMore
            return _indexed(own._compact, index, own._reads, own.shape)
        if func in FREE or func is Tensor.__repr__:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ReadMore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ReadMore


def _indexed(compact: Tensor, index: Index, reads: Reads, shape: torch.Size) -> Tensor:
    """What an index takes of logits of which these are there; raises ReadMore if not all of it is."""
    first, pos, token = index
    return compact[first, _translated(pos, reads.positions, shape[1]), _translated(token, reads.tokens, shape[2])]


def _index(index: Any) -> Index | None:
    """An index of three axes; None for one that is not understood (new axes, masks): then everything is read."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, (_Recorder, _Served)) or _is_mask(item) for item in items):
        return None
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [ALL] * (4 - len(items))
    if len(items) > 3:
        return None
    items += [ALL] * (3 - len(items))
    return (items[0], items[1], items[2]) if all(map(_is_plain, items[1:])) else None


def _is_plain(item: Any) -> bool:
    """Whether an index says by numbers which places it takes."""
    if isinstance(item, Tensor):
        return not item.is_floating_point()
    return isinstance(item, (int, slice)) or (isinstance(item, (list, range)) and all(isinstance(i, int) for i in item))


def _is_mask(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype in (torch.bool, torch.uint8)
    return isinstance(item, bool) or (isinstance(item, (list, tuple)) and any(isinstance(i, bool) for i in item))


def places_of(item: Any, size: int) -> tuple[int, ...] | None:
    """The places on an axis that an index takes; None for all of them."""
    if isinstance(item, slice):
        return None if item == ALL else tuple(range(*item.indices(size)))
    numbers = [item] if isinstance(item, int) else item.flatten().tolist() if isinstance(item, Tensor) else item
    return tuple(sorted({int(i) % size for i in numbers}))


def _translated(item: Any, there: tuple[int, ...] | None, size: int) -> Any:
    """The same index into an axis of which only some places are there."""
    if there is None:
        return item
    wanted = places_of(item, size)
    if wanted is None or not set(wanted) <= set(there):
        raise ReadMore
    slots = {place: slot for slot, place in enumerate(there)}
    if isinstance(item, slice):
        first = slots[wanted[0]] if wanted else 0
        if [slots[place] for place in wanted] != list(range(first, first + len(wanted))):
            raise ReadMore  # others stand between them
        return slice(first, first + len(wanted))
    if isinstance(item, int):
        return slots[item % size]
    if isinstance(item, Tensor):
        table = torch.zeros(size, dtype=torch.long)
        table[list(there)] = torch.arange(len(there))
        return table.to(item.device)[item]
    return [slots[i % size] for i in item]
