"""The columns of a harvest, memory-mapped across its shards."""

import bisect
import json
import os
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import UInt8
from torch import Tensor

from hooked_lm.files import replacing
from hooked_lm.harvest.plan import Plan
from hooked_lm.harvest.shard import COLUMNS
from hooked_lm.harvest.shard_file import layout_of, record_path, shard_path
from hooked_lm.harvest.stored_value import SCALE
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.select import unknown

INDEX = "index.json"  # a cache of the records, which may be deleted


class Columns:
    """The columns of a harvest: its sites, and what is known of each token."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan = Plan.read(self.path)
        self._facts = _facts(self.path)
        self.shards = sorted(self._facts)
        self.starts = [0, *accumulate(self._facts[shard]["tokens"] for shard in self.shards)]
        self._maps: dict[int, dict[str, Tensor]] = {}

    @property
    def sites(self) -> list[str]:
        """The sites, by their full names."""
        return list(self.plan.sites)

    @cached_property
    def missing(self) -> list[int]:
        """The shards of the plan that are not computed yet; of a stream, those up to its last one that is known."""
        ends = [shard for shard in self.shards if self._facts[shard]["is_last"]]
        n_shards = self.plan.n_shards
        if n_shards is None:
            n_shards = ends[0] + 1 if ends else max(self.shards, default=-1) + 2
        return sorted(set(range(n_shards)) - set(self.shards))

    @property
    def is_complete(self) -> bool:
        """Whether all shards of the plan are there."""
        return not self.missing

    def __len__(self) -> int:
        """The number of tokens, or of rows with `reduce`."""
        return self.starts[-1]

    @overload
    def __getitem__(self, which: str) -> "Column": ...
    @overload
    def __getitem__(self, which: Indices) -> dict[str, Tensor]: ...

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return {name: self[name][which] for name in (*self.sites, *COLUMNS)}
        if which not in COLUMNS and which not in self.plan.sites:
            raise unknown(which, {**dict.fromkeys(self.sites), **COLUMNS})
        return Column(self, which)

    def __repr__(self) -> str:
        state = "complete" if self.is_complete else f"{len(self.missing)} shards missing"
        return (
            f"{type(self).__name__}({str(self.path)!r}): {len(self):,} tokens in {len(self.shards)} shards ({state}), "
            f"sites {', '.join(self.sites)}"
        )

    # ---- files -----------------------------------------------------------------------------------------------------------

    def tensors(self, shard: int) -> dict[str, Tensor]:
        """The tensors of a shard, memory-mapped; changes of them are not written."""
        if shard not in self._maps:
            path, size = shard_path(self.path, shard), self._facts[shard]["bytes"]
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} is damaged: it should have {size} bytes; `verify` names all such files")
            whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            self._maps[shard] = {
                name: _view(whole, dtype, begin, shape) for name, (dtype, shape, begin) in layout_of(path).items()
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


class Column:
    """The values of one site, or of one column of numbers, of all tokens: [token, ...].

    `column[i]`, `column[a:b]`, `column[[3, 5]]` and `column[tensor]` read these tokens; a slice within one shard is a view of the
    file.
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

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, which: Indices) -> Tensor:
        plain = plain_indices("tokens", which)
        if plain is None or (isinstance(plain, slice) and plain.step in (None, 1)):
            start, end, _ = (plain or slice(None)).indices(len(self))
            return self._between(start, max(start, end))
        found = self._at(torch.tensor(indices_in("tokens", plain, len(self))))
        return found[0] if isinstance(plain, int) else found

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
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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


def _facts(folder: Path) -> dict[int, dict[str, Any]]:
    """What the records say of the size of each shard; from the cache, and from records that it lacks."""
    try:
        cached = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        cached = {}
    numbers = {int(path.stem.removeprefix("shard-")) for path in folder.glob("shard-*.json")}
    facts = {int(n): of for n, of in cached.items() if int(n) in numbers}
    for shard in sorted(numbers - facts.keys()):
        path = record_path(folder, shard)
        try:
            record = json.loads(path.read_text())
            facts[shard] = {name: record[name] for name in ("tokens", "bytes", "sha256", "is_last", "documents")}
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}; delete it, and harvest again") from None
    if facts.keys() != {int(n) for n in cached}:
        try:
            with replacing(folder / INDEX) as unfinished:
                unfinished.write_text(json.dumps(facts))
        except OSError:  # a folder that cannot be written
            pass
    return facts
