"""The columns of a harvest, memory-mapped across its shards."""

import bisect
import os
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from hooked_lm.files import OF_DAMAGE
from hooked_lm.harvest.plan import HarvestPlan
from hooked_lm.harvest.shard import layout
from hooked_lm.harvest.shard_file import checked_begin, header_of
from hooked_lm.harvest.stored_value import SCALE
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.select import UnknownSite, is_shorthand
from hooked_lm.hooks.token_labels import KEYS, TokenLabel, check_named, described, fitting
from hooked_lm.keywords import check_keywords, nearest
from hooked_lm.models.names import get_act_name
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.shards import Shards
from hooked_lm.shards.records import AGAIN, read_record, record_path
from hooked_lm.shards.stored import n_shards

SiteName = str | tuple[str, int]  # a name, a short name such as "z0", or ("z", 0)
Own = TypeVar("Own", bound="Columns")


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
        self._selected: Int[Tensor, " token"] | None = None  # of the tokens in the files; None: all

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
        return self.starts[-1] if self._selected is None else len(self._selected)

    @property
    def names(self) -> list[str]:
        """The names of all columns: the sites, and what is known of each token."""
        return [*self.sites, *self.plan.columns]

    @overload
    def __getitem__(self, which: Literal["labels"]) -> "LabelColumn": ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, which: SiteName) -> "Column": ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, which: Indices) -> dict[str, Any]: ...

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str) or (is_shorthand(which) and isinstance(which[0], str)):
            found = Column(self, which if which in self.plan.columns else self.site(which))
            return LabelColumn(found, self.labels) if which == "labels" else found
        return {name: self[name][which] for name in self.names}

    def site(self, given: SiteName) -> str:
        """The full name of a site, of which the short name may be given; raises UnknownSite if the store does not have it."""
        name = given if isinstance(given, str) else get_act_name(*given)
        for known in (name, get_act_name(name)):
            if known in self.plan.sites:
                return known
        near = ", ".join(map(repr, nearest(name, self.sites)))
        raise UnknownSite(
            f"no site {given!r} in {self.path}; did you mean {near}? Other columns are {', '.join(self.plan.columns)}"
        )

    def repr_table(self) -> Table:
        """The columns with their axes, shapes and dtypes."""
        columns = [Column(self, name) for name in self.names]
        rows = [(c.name, " ".join(c.dims), [*c.shape], str(c.dtype).removeprefix("torch.")) for c in columns]
        return Table(("column", "axes", "shape", "dtype"), rows)

    def __repr__(self) -> str:
        of_all = "" if self._selected is None else f"of {self.starts[-1]:,} "
        return (
            f"{type(self).__name__}({str(self.path)!r}): {len(self):,} {of_all}tokens in {n_shards(len(self.shards))} "
            f"({self._state}), "
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
        if name == "labels":
            return self._codes[shard][tensors[name][rows].long()]
        if name in self.plan.columns:
            return tensors[name][rows]
        endings = {"": tensors[name][rows]}
        if name + SCALE in tensors:
            endings[SCALE] = tensors[name + SCALE][rows]
        return self.plan.values[name].restored(endings)

    # ---- what tokens are -------------------------------------------------------------------------------------------------

    @cached_property
    def _tables(self) -> dict[int, list[TokenLabel]]:
        """The labels in each shard, by their numbers there."""
        found = {}
        for shard in self.shards:
            path = record_path(self.path, shard)
            try:
                found[shard] = [TokenLabel(*label) for label in read_record(path, ("labels",))["labels"]]
            except OF_DAMAGE as error:
                raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error
        return found

    @cached_property
    def labels(self) -> list[TokenLabel]:
        """The labels that tokens of these conversations have; none for other documents."""
        return sorted({label for table in self._tables.values() for label in table}) if self.plan.has_labels else []

    @cached_property
    def _codes(self) -> dict[int, Int[Tensor, " label"]]:
        """The places in `labels` of those of each shard."""
        place = {label: i for i, label in enumerate(self.labels)}
        return {shard: torch.tensor([place[label] for label in table]).int() for shard, table in self._tables.items()}

    def select(self: Own, **labels: str | int | Sequence[int]) -> Own:
        """The tokens of conversations that these labels select, as a store of their own, which reads the same files.

        `role`, `turn` and `part` select tokens for which all of these hold, such as `role="assistant", part="content"`, as
        `cache.select` does; a negative turn counts from the last message. Raises ValueError for a harvest of texts, and if
        there is no such token.
        """
        check_keywords("select", labels, KEYS)
        check_named(labels)
        if not self.plan.has_labels:
            raise ValueError(f"{labels}: {self.path} is no harvest of conversations, so that its tokens have no roles")
        parts = [self.starts[i] + self._fitting(shard, labels) for i, shard in enumerate(self.shards)]
        found, selected = copy(self), torch.cat([torch.empty(0, dtype=torch.long), *parts])
        found._selected = selected if self._selected is None else self._selected[torch.isin(self._selected, selected)]
        if not len(found):
            raise ValueError(f"{labels} selects no token: these conversations have {described(self.labels)}")
        return found

    def _fitting(self, shard: int, given: Mapping[str, Any]) -> Int[Tensor, " token"]:
        """The tokens of a shard whose label is what a dict says."""
        columns = torch.stack([self.tensors(shard)[name] for name in ("labels", "n_turns")])
        pairs, which = columns.unique(dim=1, return_inverse=True)
        table = self._tables[shard]
        fits = [fitting(given, n_turns)(table[code]) for code, n_turns in pairs.T.tolist()]
        return torch.tensor(fits, dtype=torch.bool)[which].nonzero()[:, 0]


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
        if value is None:
            return self.store.plan.columns[self.name]
        return torch.float32 if value.dtype == "int8" else value.torch_dtype

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
        plain, selected = plain_indices("tokens", which), self.store._selected
        if isinstance(plain, slice) and plain.step in (None, 1):
            start, end, _ = plain.indices(len(self))
            return self._between(start, max(start, end)) if selected is None else self._at(selected[start:end])
        numbers = torch.tensor(indices_in("tokens", plain, len(self)), dtype=torch.long)
        found = self._at(numbers if selected is None else selected[numbers])
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


class LabelColumn(NotebookRepr):
    """What each token of the conversations is: `column[i]` is a `TokenLabel(turn, role, part)`, `column[a:b]` a list of them.

    `column.codes` are their places in `store.labels`.
    """

    def __init__(self, codes: Column, labels: Sequence[TokenLabel]) -> None:
        self.codes, self.labels = codes, labels

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, which: Indices) -> Any:
        found = self.codes[which].tolist()
        return self.labels[found] if isinstance(found, int) else [self.labels[code] for code in found]

    def repr_table(self) -> Table:
        """The labels that there are."""
        return Table(("turn", "role", "part"), [tuple(label) for label in self.labels])

    def __repr__(self) -> str:
        return f"LabelColumn(of {len(self):,} tokens: {described(self.labels)})"


def _view(whole: UInt8[Tensor, " byte"], dtype: torch.dtype, begin: int, shape: list[int]) -> Tensor:
    """A tensor in the bytes of a file, from a byte on."""
    n_bytes = dtype.itemsize * torch.Size(shape).numel()
    return whole[begin : begin + n_bytes].view(dtype).reshape(shape)
