"""Recorder: the hook that stores values in a cache, and which of their axes are the batch and the positions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import checkpoint
from hooked_lm.hooks.point import HookPoint
from hooked_lm.hooks.slice import Slice, SliceInput

QUERY_POSITIONS = ("pos", "query_pos")
MOST_UNNAMED = 3  # axes without names that are read as [batch, feature] or [batch, pos, feature]


class Recorder:
    """A hook that stores values under the point's name, and gradients under name + "_grad"."""

    records = True

    def __init__(
        self,
        cache: dict[str, Tensor],
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        pos_slice: Slice | SliceInput = None,
        suffix: str = "",
    ) -> None:
        self.cache = cache
        self.device = device
        self.remove_batch_dim = remove_batch_dim
        self.pos_slice = Slice.unwrap(pos_slice)
        self.suffix = suffix
        self.copies_later = False  # whether the caller calls `wait` before it reads the values
        self._copied_from: set[torch.device] = set()

    def __call__(self, value: object, hook: HookPoint) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the value at '{hook.name}' is a {type(value).__name__}, not a tensor: exclude it from the cache"
            )
        if not self.suffix and checkpoint.is_recomputing():
            return  # the forward pass has stored the value
        name, value = f"{hook.name}{self.suffix}", value.detach()
        if self.pos_slice.mode != "identity":
            value = self._some_positions(value, hook)
        if self.remove_batch_dim and has_batch_axis(hook.dims):
            value = only_row(name, value)
        self.cache[name] = value if self.device is None else self._moved(value)

    def _moved(self, value: Tensor) -> Tensor:
        """The value on the device of the cache; a copy from a GPU, into pinned memory on the CPU, may still be under way."""
        assert self.device is not None
        if not self.copies_later or not _is_on_gpu(value) or value.device == torch.device(self.device):
            return value.to(self.device)
        self._copied_from.add(value.device)
        return value.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """Waits until all copies have arrived."""
        for device in self._copied_from:
            torch.cuda.synchronize(device)
        self._copied_from.clear()

    def query_columns(self, hook: HookPoint, shape: tuple[int, ...]) -> list[int] | None:
        """The query positions that it stores, of scores or a pattern of this shape; None: all."""
        if self.pos_slice.mode == "identity":
            return None
        n = shape[hook.dims.index("query_pos")]
        columns: list[int] = self.pos_slice.apply(torch.arange(n)).reshape(-1).tolist()
        return columns

    def _some_positions(self, value: Tensor, hook: HookPoint) -> Tensor:
        axis = known_position_axis(value, hook.name or "", hook.dims)
        if axis is None:
            return value
        if hook.columns is not None:
            places = {column: place for place, column in enumerate(hook.columns.shown)}
            wanted = self.pos_slice.apply(torch.arange(hook.columns.n))
            index = torch.tensor([places[column] for column in wanted.reshape(-1).tolist()], device=value.device)
            return value.index_select(axis, index) if wanted.ndim else value.select(axis, int(index))
        value = self.pos_slice.apply(value, axis)
        return value.clone() if self.pos_slice.mode == "slice" else value  # a view would keep the whole value alive


def _is_on_gpu(value: Tensor) -> bool:
    return value.is_cuda


@contextmanager
def copying_together(*hooks: list[tuple[str, Recorder]]) -> Iterator[None]:
    """Within the block, recorders copy values from GPUs while the run goes on; the end of the block waits for the copies."""
    recorders = [each[0][1] for each in hooks if each]  # all sites have the same
    for recorder in recorders:
        recorder.copies_later = True
    yield
    for recorder in recorders:
        recorder.wait()


def has_batch_axis(dims: tuple[str, ...]) -> bool:
    """Whether the first axis of a site is the batch; true for axes without names."""
    return dims[:1] in ((), ("batch",))


def position_axis(n_axes: int, dims: tuple[str, ...]) -> int | None:
    """The index of the position axis, or None. Without names, or with names of another number of axes, it is the second of three.

    >>> (
    ...     position_axis(4, ("batch", "head", "query_pos", "key_pos")),
    ...     position_axis(3, ()),
    ...     position_axis(2, ()),
    ... )
    (2, 1, None)
    """
    if len(dims) != n_axes:
        return 1 if n_axes == MOST_UNNAMED else None
    return next((i for i, dim in enumerate(dims) if dim in QUERY_POSITIONS), None)


def known_position_axis(value: Tensor, site: str, dims: tuple[str, ...]) -> int | None:
    """As `position_axis`; of a value with more axes than names, the names are those of the first axes.

    Raises ValueError for two axes without names, or more than three: any could be the positions.
    """
    if 0 < len(dims) < value.ndim:
        return position_axis(len(dims), dims)
    if len(dims) != value.ndim and (value.ndim == 2 or value.ndim > MOST_UNNAMED):
        raise ValueError(
            f"pos_slice: the position axis of '{site}', of shape {tuple(value.shape)}, is unknown; "
            "name its axes (HookPoint('batch', 'pos')), or exclude the site with names_filter"
        )
    return position_axis(value.ndim, dims)


def only_row(name: str, value: Tensor) -> Tensor:
    if value.shape[:1] != (1,):
        size = f"batch size {len(value)}" if value.ndim else "no axis"
        raise ArgumentError(
            f"cannot remove the batch dimension of '{name}', of shape {tuple(value.shape)}: it has {size}, not one row"
        )
    return value[0]
