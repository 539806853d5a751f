"""The columns of a harvest, memory-mapped across its shards."""

import bisect
import os
from itertools import accumulate
from typing import Any, NoReturn, overload

import torch
from jaxtyping import UInt8
from torch import Tensor

from hooked_lm.harvest.plan import HarvestPlan
from hooked_lm.harvest.shard import COLUMNS, layout
from hooked_lm.harvest.shard_file import checked_begin, header_of
from hooked_lm.harvest.stored_value import SCALE
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.select import UnknownSite, is_shorthand
from hooked_lm.keywords import nearest
from hooked_lm.models.names import get_act_name
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.shards import Shards
from hooked_lm.shards.stored import n_shards

SiteName = str | tuple[str, int]  # a name, a short name such as "z0", or ("z", 0)


class Columns(Shards):
    """The columns of a harvest: its sites, and what is known of each token."""

    PLAN = HarvestPlan
    SUFFIX = ".safetensors"
    FIELDS = ("tokens", "bytes", "sha256", "is_last", "documents")
    plan: HarvestPlan

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.starts = [0, *accumulate(self._facts[shard]["tokens"] for shard in self.shards)]
        self._maps: dict[int, dict[str, Tensor]] = {}

    @property
    def sites(self) -> list[str]:
        """The sites, by their full names."""
        return list(self.plan.sites)

    def _n_known(self) -> int:
        """Those up to the last one that is known."""
        ends = [shard for shard in self.shards if self._facts[shard]["is_last"]]
        return ends[0] + 1 if ends else max(self.shards, default=-1) + 2

    def __len__(self) -> int:
        """The number of tokens, or of rows with `reduce`."""
        return self.starts[-1]

    @overload
    def __getitem__(self, which: SiteName) -> "Column": ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, which: Indices) -> dict[str, Tensor]: ...

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str) or (is_shorthand(which) and isinstance(which[0], str)):
            return Column(self, which if which in COLUMNS else self.site(which))
        return {name: self[name][which] for name in (*self.sites, *COLUMNS)}

    def site(self, given: SiteName) -> str:
        """The full name of a site, of which the short name may be given; raises UnknownSite if the store does not have it."""
        name = given if isinstance(given, str) else get_act_name(*given)
        for known in (name, get_act_name(name)):
            if known in self.plan.sites:
                return known
        near = ", ".join(map(repr, nearest(name, self.sites)))
        raise UnknownSite(
            f"no site {given!r} in {self.path}; did you mean {near}? Other columns are {', '.join(COLUMNS)}"
        )

    def repr_table(self) -> Table:
        """The columns with their axes, shapes and dtypes."""
        columns = [self[name] for name in (*self.sites, *COLUMNS)]
        rows = [(c.name, " ".join(c.dims), [*c.shape], str(c.dtype).removeprefix("torch.")) for c in columns]
        return Table(("column", "axes", "shape", "dtype"), rows)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}): {len(self):,} tokens in {n_shards(len(self.shards))} ({self._state}), "
            f"sites {', '.join(self.sites)}"
        )

    # ---- files -----------------------------------------------------------------------------------------------------------

    def tensors(self, shard: int) -> dict[str, Tensor]:
        """The tensors of a shard, memory-mapped; changes of them are not written."""
        if shard not in self._maps:
            path, size = self.file_of(shard), self._facts[shard]["bytes"]
            planned = layout(self.plan, self._facts[shard]["tokens"])
            begin, header = checked_begin(path, planned), header_of(planned)
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            self._maps[shard] = {
                name: _view(whole, dtype, begin + header[name]["data_offsets"][0], shape)
                for name, (dtype, shape) in planned.items()
            }
        return self._maps[shard]

    def rows(self, shard: int, name: str, rows: slice | Tensor) -> Tensor:
        """Some rows of a column of a shard."""
        tensors = self.tensors(shard)
        if name in COLUMNS:
            return tensors[name][rows]
        endings = {"": tensors[name][rows]}
        if name + SCALE in tensors:
            endings[SCALE] = tensors[name + SCALE][rows]
        return self.plan.values[name].restored(endings)


class Column(NotebookRepr):
    """The values of one site, or of one column of numbers, of all tokens: [token, ...].

    `column[i]`, `column[a:b]`, `column[[3, 5]]` and `column[tensor]` read these tokens, as tensors of their own.
    """

    def __init__(self, store: Columns, name: str) -> None:
        self.store, self.name = store, name

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the axes."""
        value = self.store.plan.values.get(self.name)
        return ("token", *(() if value is None else value.dims))

    @property
    def shape(self) -> tuple[int, ...]:
        value = self.store.plan.values.get(self.name)
        return (len(self.store), *(() if value is None else value.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values that are read; that of int8 on disk is float32."""
        value = self.store.plan.values.get(self.name)
        return COLUMNS[self.name] if value is None else torch.float32 if value.dtype == "int8" else value.torch_dtype

    def repr_table(self) -> Table:
        """The axes and their lengths."""
        return Table(("axis", "length"), [*zip(self.dims, self.shape, strict=True)])

    def __len__(self) -> int:
        return len(self.store)

    def __repr__(self) -> str:
        return (
            f"Column({self.name!r}: {', '.join(f'{dim} {n:,}' for dim, n in zip(self.dims, self.shape, strict=True))})"
        )

    def __getitem__(self, which: Indices) -> Tensor:
        if which is None or isinstance(which, tuple):
            raise TypeError(
                f"a column is indexed by tokens alone, got {which!r}; index what it gives: column[tokens][:, ...]"
            )
        plain = plain_indices("tokens", which)
        if isinstance(plain, slice) and plain.step in (None, 1):
            start, end, _ = plain.indices(len(self))
            return self._between(start, max(start, end))
        found = self._at(torch.tensor(indices_in("tokens", plain, len(self))))
        return found[0] if isinstance(plain, int) else found

    @classmethod
    def __torch_function__(cls, *called: object, **options: object) -> NoReturn:
        """Refuses a column in the place of a tensor, for it would be read as a whole. torch's operators hide a TypeError."""
        raise ValueError(
            "a column of a harvest lies on disk: index it to get a tensor, column[:1000], or column[:] for all"
        )

    def _between(self, start: int, end: int) -> Tensor:
        parts, starts = [], self.store.starts
        first = bisect.bisect_right(starts, start) - 1
        for i in range(first, len(self.store.shards)):
            if starts[i] >= end:
                break
            rows = slice(max(0, start - starts[i]), end - starts[i])
            parts.append(self.store.rows(self.store.shards[i], self.name, rows))
        if not parts:
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts)  # a view of the file could be written to

    def _at(self, numbers: Tensor) -> Tensor:
        found = torch.empty(len(numbers), *self.shape[1:], dtype=self.dtype)
        shards = torch.bucketize(numbers, torch.tensor(self.store.starts[1:]), right=True)
        for i in shards.unique().tolist():
            here = shards == i
            found[here] = self.store.rows(self.store.shards[i], self.name, numbers[here] - self.store.starts[i])
        return found


def _view(whole: UInt8[Tensor, " byte"], dtype: torch.dtype, begin: int, shape: list[int]) -> Tensor:
    """A tensor in the bytes of a file, from a byte on."""
    n_bytes = dtype.itemsize * torch.Size(shape).numel()
    return whole[begin : begin + n_bytes].view(dtype).reshape(shape)
