"""Cache: the activations of a run by site name, in the order of computation."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.errors import ArgumentError
from hooked_lm.files import names_the_file, replacing
from hooked_lm.hooks.listed import bytes_by, layers_in_words
from hooked_lm.hooks.padding import Masks, last_real, warn_of_padding
from hooked_lm.hooks.recorder import has_batch_axis, known_position_axis, only_row, position_axis
from hooked_lm.hooks.select import UnknownSite, site_glob
from hooked_lm.hooks.slice import Slice, SliceInput
from hooked_lm.hooks.token_labels import KEYS, Labels, TokenLabel, common_label, select_positions, token_groups
from hooked_lm.hooks.token_values import at_columns, at_means
from hooked_lm.keywords import check_keywords, nearest
from hooked_lm.notebook_repr import bytes_in_words, html_table, summary

LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")  # the first number in the name of a site
MOST_GROUPS = 60  # shown as text
MASK = "attention_mask of "  # what the names of masks in a file begin with


class Cache(Mapping[str, Tensor]):
    """The mapping from site names to tensors that `run_with_cache` returns.

    Reading a name that was not cached raises KeyError with the filter that would have cached it.

    Args:
        cache_dict: the values by name.
        has_batch_dim: whether the first axis of the values is the batch.
        dims: the names of the axes of each site, batch included. The first axis of any other site is the batch if it is as
            long as that.

    >>> import torch
    >>> cache = Cache({"layer.0": torch.zeros(2, 3), "layer.1": torch.ones(2, 3)})
    >>> cache.stack("layer.*").shape
    torch.Size([2, 2, 3])
    """

    def __init__(
        self,
        cache_dict: dict[str, Tensor],
        has_batch_dim: bool = True,
        dims: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.cache_dict = cache_dict
        self.has_batch_dim = has_batch_dim
        self.dims = {} if dims is None else dims
        self.attention_masks: Masks = {}
        self.labels: Sequence[Labels] | None = None  # what the tokens of each row are, if it is of a conversation
        self._warned = False

    def dims_of(self, site: str) -> tuple[str, ...]:
        """The names of the axes at a site, batch included; empty if they are unknown."""
        return self.dims.get(site, ())

    # ---- padding -------------------------------------------------------------------------------------------

    def keep_masks(self, masks: Masks, pos_slice: Slice | SliceInput = None) -> None:
        """Keeps the masks of the run, at the positions that were cached, as `attention_masks`; warns if these are padding."""
        positions = Slice.unwrap(pos_slice)
        masks = masks if self.has_batch_dim else {stack: mask[0] for stack, mask in masks.items()}
        for mask in masks.values():
            self._warned = self._warned or warn_of_padding(mask, positions)
        self.attention_masks = {stack: positions.apply(mask, -1) for stack, mask in masks.items()}

    @property
    def attention_mask(self) -> Tensor | None:
        """True for real tokens and False for padding, [batch, pos]; None if there is no padding, or none that is known.

        Known are the masks of texts and those that were given; for ids without a mask that of `Tokens.attention_mask`. Raises
        ValueError for an encoder-decoder, whose two are in `attention_masks`.
        """
        if len(self.attention_masks) > 1:
            raise ValueError(f"this run has a mask for each of {', '.join(self.attention_masks)}: see attention_masks")
        return next(iter(self.attention_masks.values()), None)

    def warn_of_padding(self, positions: Slice) -> None:
        """Warns, once for a cache, if these positions of all tokens are padding in some rows."""
        if not self._warned and len(self.attention_masks) == 1 and (mask := self.attention_mask) is not None:
            self._warned = warn_of_padding(mask, positions)

    def last(self, name: str, *where: object) -> Tensor:
        """The value at the last real token of each row, [batch, ...], wherever the batch is padded.

        The arguments are those of `cache[name, layer, sublayer]`. Raises KeyError as that does, and ValueError for a site
        without positions, or whose positions are not those of the tokens.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> logits, cache = model.run_with_cache(
        ...     ["Mary went home", "Mary"], padding_side="right"
        ... )
        >>> (
        ...     cache.last("resid_post", 3).shape,
        ...     torch.equal(cache.last("resid_post", 3)[1], cache["resid_post", 3][1, 1]),
        ... )
        (torch.Size([2, 128]), True)
        """
        key = (name, *where) if where else name
        value, site = self[key], _site(self.full_name(key))
        dims = self.dims_of(site)
        axis = known_position_axis(value, site, dims if self.has_batch_dim or not has_batch_axis(dims) else dims[1:])
        if axis is None:
            raise ValueError(f"'{site}' [{', '.join(dims)}] of shape {tuple(value.shape)} has no axis of positions")
        stack, *_ = site.split(".")
        mask = self.attention_masks.get(stack) if len(self.attention_masks) > 1 else self.attention_mask
        if mask is None and not self.attention_masks:
            return value.select(axis, -1)
        if mask is None or mask.shape[-1] != value.shape[axis]:
            raise ValueError(
                f"the positions of '{site}' {tuple(value.shape)} are not those of the padded tokens: index it"
            )
        columns = last_real(mask, site).to(value.device)
        if not self.has_batch_dim:
            return value.select(axis, int(columns))
        value = value.movedim(axis, 1).expand(len(columns), *(-1,) * (value.ndim - 1))
        return value[torch.arange(len(columns), device=value.device), columns]

    # ---- reading -------------------------------------------------------------------------------------------

    def full_name(self, key: object) -> str:
        """The site name of a key. The caches of models also accept short names and aliases."""
        return str(key)

    def __getitem__(self, key: object) -> Tensor:
        if isinstance(key, str) and key in self.cache_dict:
            return self.cache_dict[key]
        name = self.full_name(key)
        if name not in self.cache_dict:
            raise self._missing(name)
        return self.cache_dict[name]

    def __contains__(self, key: object) -> bool:
        try:
            return key in self.cache_dict or self.full_name(key) in self.cache_dict
        except (KeyError, ValueError, IndexError, TypeError):
            return False

    def _missing(self, name: str) -> KeyError:
        near = ", ".join(map(repr, nearest(name, self.cache_dict)))
        return UnknownSite(
            f"'{name}' is not in this cache of {len(self)} tensors{near and f', the nearest are {near}'}; "
            f"run_with_cache(..., names_filter='{name}') caches it if the model has such a site"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __repr__(self) -> str:
        """The number of tensors, their memory, and a line for each group of sites that differ by layer only."""
        groups = self._groups()
        rows = [(name, shape, dtype) for name, shape, _, dtype, _ in groups[:MOST_GROUPS]]
        wide, long = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
        lines = [f"  {name:{wide}}  {shape:{long}}  {dtype}" for name, shape, dtype in rows]
        more = [f"  and {len(groups) - MOST_GROUPS} more groups of sites"] if len(groups) > MOST_GROUPS else []
        return "\n".join([self._summary(), *lines, *more])

    def _repr_html_(self) -> str:
        rows = [(*row[:-1], bytes_in_words(row[-1])) for row in self._groups()]
        return summary(self._summary(), html_table(("site", "shape", "axes", "dtype", "bytes"), rows))

    def _summary(self) -> str:
        is_padded = any(not mask.is_meta and not mask.all() for mask in self.attention_masks.values())
        padded = "; padded, so .last(name, layer) reads the last token of each row" * is_padded
        return f"{type(self).__name__}({len(self)} tensor{'s' * (len(self) != 1)}, {self.nbytes / 1e6:.1f} MB{padded})"

    def _groups(self) -> list[tuple[str, str, str, str, int]]:
        """(sites, shape, axes, dtype, bytes) of the sites with equal names but for the layer, and equal shapes, in order."""
        groups: dict[tuple[str, str, str, str, str], list[Tensor]] = {}
        layers: dict[tuple[str, str, str, str, str], list[int]] = {}
        for name, value in self.cache_dict.items():
            found = LAYER.match(name)
            before, number, after = found.groups() if found else (name, None, "")
            axes = self.dims_of(name.removesuffix("_grad"))
            axes = axes if self.has_batch_dim or axes[:1] != ("batch",) else axes[1:]
            shown = " ".join(axes) if len(axes) == value.dim() else ""
            key = (before, after, str([*value.shape]), shown, str(value.dtype).removeprefix("torch."))
            groups.setdefault(key, []).append(value)
            layers.setdefault(key, []).extend([] if number is None else [int(number)])
        rows = []
        for key, values in groups.items():
            before, after, shape, shown, dtype = key
            sites, n_bytes = before + layers_in_words(layers[key]) + after, sum(value.nbytes for value in values)
            rows.append((sites, shape, shown, dtype, n_bytes))
        return rows

    # ---- other caches --------------------------------------------------------------------------------------

    def _with(self, cache_dict: dict[str, Tensor]) -> "Cache":
        """A cache of the same run with other values."""
        made = copy(self)
        made.cache_dict = cache_dict
        return made

    def select(self, pattern: str | Callable[[str], bool] = "*", **labels: str | int | Sequence[int]) -> "Cache":
        """A cache of the sites that match a glob ("blocks.*.hook_z") or a predicate; shares the tensors.

        Of a conversation (`model.chat`), `role`, `turn` and `part` select the positions of tokens for which all of these hold,
        as in `cache.select(role="assistant")`; of patterns these are the positions of queries, and sites without positions are
        left out. Warns if there are no sites. Raises ValueError for no such tokens, if their numbers differ between rows,
        and if the cache is not of a conversation; TypeError for other arguments.
        """
        check_keywords("select", labels, KEYS)
        if labels:
            return self._at(labels).select(pattern)
        if not (found := self._matching(pattern)):
            names = dict.fromkeys(map(site_glob, self.cache_dict))
            near = nearest(pattern, names) if isinstance(pattern, str) else list(names)[:3]
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            warn_caller(f"the filter {pattern!r} selects none of {len(self)} tensors{hint}")
        return self._with(found)

    def _at(self, given: Mapping[str, object]) -> "Cache":
        """A cache of the tokens that these labels select."""
        labels = self._of_conversation(str(given))
        columns = [select_positions(row, given) for row in labels]
        if len({len(row) for row in columns}) > 1:
            raise ValueError(
                f"{given} selects {[len(row) for row in columns]} tokens in the rows, which cannot be one tensor: take one "
                "conversation with cache.apply_slice_to_batch_dim(0)"
            )
        found = {name: at_columns(value, axis, columns, self.has_batch_dim) for name, value, axis in self._along()}
        return self._with_tokens(found, [[row[i] for i in some] for row, some in zip(labels, columns, strict=True)])

    def mean_by(self, by: str) -> "Cache":
        """A cache of the means over the tokens of each "turn", "role" or "part" of a conversation, which take the place of the
        positions. What a template adds is one of them, and `labels` says of each whose it is. Sites without positions, and those
        of whole numbers, are left out. Raises ValueError as `select`, and for rows with other turns than the first.
        """
        groups = [token_groups(row, by) for row in self._of_conversation(f"means by {by}")]
        if other := next((row for row in groups if [*row] != [*groups[0]]), None):
            raise ValueError(f"the rows have different {by}s: {', '.join(groups[0])}; and {', '.join(other)}")
        rows, labels = [[*row.values()] for row in groups], zip(groups, self.labels or (), strict=True)
        found = {
            name: at_means(value, axis, rows, self.has_batch_dim)
            for name, value, axis in self._along()
            if value.is_floating_point()
        }
        return self._with_tokens(
            found, [[common_label([row[i] for i in some]) for some in of.values()] for of, row in labels]
        )

    def _of_conversation(self, asked: str) -> Sequence[Labels]:
        if self.labels is None:
            raise ValueError(f"{asked}: this cache is not of a conversation; run the model on model.chat(messages)")
        return self.labels

    def _along(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields the values that have the positions of the tokens, each with its name and its axis of positions."""
        for name, value in self.cache_dict.items():
            dims = self.dims_of(_site(name))
            axis = position_axis(value.ndim, dims if self.has_batch_dim or not has_batch_axis(dims) else dims[1:])
            if axis is not None and self.labels is not None and value.shape[axis] == len(self.labels[0]):
                yield name, value, axis

    def _with_tokens(self, found: dict[str, Tensor], labels: Sequence[Labels]) -> "Cache":
        made = self._with(found)
        made.labels, made.attention_masks = labels, {}
        return made

    def _matching(self, pattern: str | Callable[[str], bool]) -> dict[str, Tensor]:
        test = pattern if callable(pattern) else lambda name: fnmatchcase(name, pattern)
        return {name: value for name, value in self.cache_dict.items() if test(name)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Cache":
        """Moves all values, in place, to a device and (if floating-point) a dtype; returns the cache."""
        for name, value in self.cache_dict.items():
            kind = dtype if value.is_floating_point() else None
            self.cache_dict[name] = value.to(device=device, dtype=kind)
        self.attention_masks = {stack: mask.to(device) for stack, mask in self.attention_masks.items()}
        return self

    def remove_batch_dim(self) -> "Cache":
        """Removes the batch axis, in place; raises ValueError if the batch has more than one row.

        A value without a batch axis (such as the tokens routed to an expert) is unchanged. So is one whose axes have no
        names if the first is not as long as the batch.
        """
        if self.has_batch_dim:
            size = self._batch_size()
            self.cache_dict = {
                name: only_row(name, value) if self._has_rows(name, size) else value
                for name, value in self.cache_dict.items()
            }
            self.attention_masks = {stack: mask[0] for stack, mask in self.attention_masks.items()}
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Slice | SliceInput) -> "Cache":
        """A cache of some rows of the batch; an int removes the axis. A value with one row for the whole batch keeps it.

        Raises ValueError if the cache, or one of its values, has no batch axis.
        """
        if not self.has_batch_dim:
            raise ArgumentError("this cache has no batch dimension left to slice")
        size = self._batch_size()
        rows = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        sliced = {name: self._rows_of(name, value, rows, size) for name, value in self.cache_dict.items()}
        made = self._with(sliced)
        made.attention_masks = {stack: rows.apply(mask) for stack, mask in self.attention_masks.items()}
        if self.labels is not None:
            some = rows.apply(torch.arange(size))
            made.labels = [self.labels[row] for row in some.reshape(-1).tolist()]
        made.has_batch_dim = rows.mode != "int"
        return made

    def _rows_of(self, name: str, value: Tensor, rows: Slice, size: int) -> Tensor:
        """Rows of a value in a batch of this size."""
        if value.shape[:1] == (1,) and size > 1 and has_batch_axis(self.dims_of(_site(name))):
            return value[0] if rows.mode == "int" else value
        if not self._has_rows(name, size):
            axes = ", ".join(self.dims_of(_site(name)) or map(str, value.shape))
            raise ValueError(
                f"'{name}' [{axes}] has no batch axis, so rows cannot be selected; exclude it first with "
                "cache.select(...)"
            )
        return rows.apply(value, dim=0)

    def _has_rows(self, name: str, size: int) -> bool:
        """Whether the first axis of a value is the batch, of this size. Without names of the axes, its length tells."""
        axes, lengths = self.dims_of(_site(name)), self.cache_dict[name].shape[:1]
        return has_batch_axis(axes) if axes else lengths == (size,)

    def _batch_size(self) -> int:
        """The length of the axis called batch; without names, the length of most first axes.

        Raises ValueError if no length is that of more than half of them.
        """
        axes = {name: self.dims_of(_site(name)) for name, value in self.cache_dict.items() if value.ndim}
        lengths = {name: len(self.cache_dict[name]) for name in axes if has_batch_axis(axes[name])}
        if named := [lengths[name] for name in lengths if axes[name]]:
            return max(named)
        size, count = Counter(lengths.values()).most_common(1)[0] if lengths else (1, 1)
        if 2 * count <= len(lengths):
            shown = ", ".join(f"{length} of '{name}'" for name, length in [*lengths.items()][:5])
            raise ValueError(
                f"the batch size is unknown: the axes have no names, and the first have different lengths ({shown}); give the "
                "cache its model, or keep the values of one batch with cache.select(...)"
            )
        return size

    def stack(self, pattern: str) -> Tensor:
        """The values of the sites that match a glob, of equal shape, stacked along a new first axis."""
        values = list(self._matching(pattern).values())
        if not values:
            raise self._missing(pattern)
        return torch.stack(values)

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Enables or disables gradients in this thread, as `torch.set_grad_enabled` does."""
        torch.set_grad_enabled(mode)

    # ---- size and files ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The memory of the values in bytes; shared memory is counted once."""
        storages = [value.untyped_storage() for value in self.cache_dict.values()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # also without memory

    def memory_report(self, by: str = "site") -> dict[str, int]:
        """Bytes by "site" (of all layers, whose numbers are replaced by `*`), "name", "device" or "dtype", largest first.

        Memory that two values share is counted for each of them.
        """
        return bytes_by(self.cache_dict, by)

    def model_facts(self) -> dict[str, Any]:
        """What tells the model of this cache from others; `save` writes it, and `load` compares it."""
        return {}

    def save(self, path: str | Path) -> None:
        """Writes the cache to a safetensors file. Raises OSError if it cannot be written, or the disk is full."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        dims = {site: self.dims_of(site) for site in map(_site, self)}
        about = {"names": list(self), "has_batch_dim": self.has_batch_dim, "dims": dims, "model": self.model_facts()}
        about["labels"] = self.labels
        metadata = {"format": "hooked_lm.Cache", **{key: json.dumps(value) for key, value in about.items()}}
        with replacing(path) as unfinished:
            try:
                values = {name: value.detach().clone().contiguous() for name, value in self.items()}
                values |= {f"{MASK}{stack}": mask.clone() for stack, mask in self.attention_masks.items()}
                save_file(values, unfinished, metadata)
            except SafetensorError as error:
                raise OSError(f"cannot write {path}: {error}") from None

    @classmethod
    @names_the_file
    def load(cls, path: str | Path, *args: Any) -> "Cache":
        """The cache that `save` wrote; `args` are passed to the class (an ActivationCache takes the model).

        Warns if the file was saved from another model than this one, whose weights decompositions would read. Raises
        FileNotFoundError if there is no such file, ValueError for any other and for a damaged one.
        """
        from safetensors import SafetensorError, safe_open

        if Path(path).is_dir():
            raise IsADirectoryError(f"cannot read {path}: it is a folder; name a file that Cache.save wrote")
        try:
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                if "names" not in about:
                    kind = about.get("format", "").removeprefix("hooked_lm.")
                    holds = (
                        f"it holds type {kind}; hooked_lm.load(path) loads any type"
                        if kind
                        else "Cache.save did not write it"
                    )
                    raise ValueError(f"{path} is not a cache: {holds}")
                values = {name: file.get_tensor(name) for name in json.loads(about["names"])}
                masks = {name: file.get_tensor(name) for name in file.keys() if name.startswith(MASK)}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a cache that Cache.save wrote: {error}") from None
        cache = cls(values, *args, has_batch_dim=json.loads(about["has_batch_dim"]))  # type: ignore[misc]
        cache.dims = {site: tuple(dims) for site, dims in json.loads(about.get("dims", "{}")).items()}
        cache.attention_masks = {name.removeprefix(MASK): mask for name, mask in masks.items()}
        labels = json.loads(about.get("labels", "null"))
        cache.labels = None if labels is None else [[TokenLabel(*label) for label in row] for row in labels]
        saved, given = json.loads(about.get("model", "{}")), cache.model_facts()
        other = [
            f"{name} {saved[name]!r}, not {value!r}" for name, value in given.items() if saved.get(name, value) != value
        ]
        if other:
            warn_caller(f"{path} was saved from another model: {'; '.join(other)}")
        return cache


def _site(name: str) -> str:
    """The site of a cached value or gradient."""
    return name.removesuffix("_grad")
