"""Tensors of a checkpoint under other names."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hooked_lm.weights.loading import dtype_of, shape_of
from hooked_lm.weights.shards import Headers


class Renamed(Headers):
    """Tensors under other names; `names` maps each name to the one in `tensors`, or to those of its parts, in order.

    `rows` maps names to the rows of that tensor which they mean, by default all.
    """

    def __init__(
        self,
        tensors: Headers | Mapping[str, Tensor],
        names: Mapping[str, str | tuple[str, ...]],
        rows: Mapping[str, range] | None = None,
    ) -> None:
        self._tensors, self._names, self._rows = tensors, names, rows or {}

    def __getitem__(self, name: str) -> Tensor:
        old, rows = self._names[name], self._rows.get(name)
        whole = self._tensors[old] if isinstance(old, str) else torch.cat([self._tensors[part] for part in old])
        return whole if rows is None else whole[rows.start : rows.stop]

    def __contains__(self, name: object) -> bool:  # that of Mapping would look the tensor up
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        first, *more = (shape_of(self._tensors, part) for part in self._parts(name))
        if name in self._rows:
            return (len(self._rows[name]), *first[1:])
        return (first[0] + sum(shape[0] for shape in more), *first[1:]) if more else first

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return dtype_of(self._tensors, self._parts(name)[0])

    def _parts(self, name: str) -> tuple[str, ...]:
        old = self._names[name]
        return (old,) if isinstance(old, str) else old

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def present_name(name: str, renamed: Mapping[str, str]) -> str:
    """The current name of a tensor; `renamed` maps regular expressions of old names to their replacements."""
    for old, new in renamed.items():
        name = re.sub(old, new, name)
    return name


def rename_tensors(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Tensors by current names; `renamed` is as for `present_name`."""
    names = {present_name(name, renamed): name for name in tensors}
    return tensors if all(new == old for new, old in names.items()) else Renamed(tensors, names)


def recut(tensors: Mapping[str, Tensor], cuts: Mapping[str, tuple[tuple[str, ...], range]]) -> Mapping[str, Tensor]:
    """Tensors of which some are rows of what others make together: `cuts` maps their names to those others, and to the rows."""
    names: dict[str, str | tuple[str, ...]] = {name: name for name in tensors}
    names |= {name: parts for name, (parts, _) in cuts.items()}
    return Renamed(tensors, names, {name: rows for name, (_, rows) in cuts.items()}) if cuts else tensors
