"""The memory and the layer-rows of a run, before the run."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.errors import ArgumentError
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import Cache, HookedRootModule
from hooked_lm.keywords import nearest
from hooked_lm.models.dry_run import Allocation, DryRun
from hooked_lm.notebook_repr import NotebookRepr, Table, bytes_in_words

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

Run = Callable[..., Any]
METHODS = {"forward": "__call__", "cache": "run_with_cache", "generate": "generate"}
TOOLS = {
    "sweep": "hooked_lm.patching:sweep",
    "attribution": "hooked_lm.analysis:attribute",
}  # of higher floors, by name
ALWAYS: dict[str, dict[str, Any]] = {"generate": {"return_type": "tokens", "verbose": False}}
WEIGHTS, RECORDED = "weights", "recorded"


class PeakPart(NamedTuple):
    """What one part of a run holds on a device at the peak, and the largest of its tensors."""

    device: str
    part: str
    bytes: int
    tensors: int
    largest: str


@dataclass(frozen=True, repr=False)
class Estimate(NotebookRepr):
    """The memory of a run at its peak, and how much it computes; see `model.estimate`.

    Args:
        what: the run: "forward", "cache", "sweep", "attribution", "generate", or the name of a function.
        parts: what is in memory at the peak of each device, the weights first.
        layer_rows: tokens times layers of all forward passes of the model, not those of its untrained twin.
        free: the bytes that each device has free now, beside the weights if they are there; devices that cannot say are left out.
        cache: the cache that the run returns, of tensors that have shape, dtype and device but no memory; None if there is none.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = model.estimate((8, 64), names_filter="*.hook_resid_post", what="cache")
    >>> found.layer_rows == 8 * 64 * model.cfg.n_layers, found.fits
    (True, True)
    >>> found.cache.memory_report()
    {'blocks.*.hook_resid_post': 1048576}
    """

    what: str
    parts: tuple[PeakPart, ...]
    layer_rows: int
    free: Mapping[str, int]
    cache: Cache | None = None

    @property
    def bytes(self) -> int:
        """The bytes at the peak, weights left out, of all devices."""
        return sum(part.bytes for part in self.parts if part.part != WEIGHTS)

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """The bytes of each part at the peak, of all devices, with the weights."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.part] = found.get(part.part, 0) + part.bytes
        return found

    @property
    def fits(self) -> bool | None:
        """Whether each device has as much free as the run takes beside the weights; None if a device does not say."""
        needed: dict[str, int] = {}
        for part in self.parts:
            needed[part.device] = needed.get(part.device, 0) + (part.part != WEIGHTS) * part.bytes
        if needed.keys() - self.free.keys():
            return None
        return all(size <= self.free[device] for device, size in needed.items())

    def repr_table(self) -> Table:
        """A row for each part of each device."""
        rows = [(part.device, part.part, bytes_in_words(part.bytes), part.tensors, part.largest) for part in self.parts]
        return Table(("device", "part", "at the peak", "tensors", "largest"), rows)

    def __repr__(self) -> str:
        free = ", ".join(f"{bytes_in_words(size)} free on {device}" for device, size in self.free.items())
        weights = self.bytes_by_part[WEIGHTS]
        return (
            f"Estimate({self.what}: {bytes_in_words(self.bytes)} beside {bytes_in_words(weights)} of weights"
            f"{f', {free}' * bool(free)}; {self.layer_rows:,} layer-rows)"
        )

    def __str__(self) -> str:
        table = self.repr_table()
        rows = [[str(cell) for cell in row] for row in (table.columns, *table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([repr(self), *lines])

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each part of each device: `device`, `part`, `bytes`, `tensors`, `largest`."""
        return pd.DataFrame(self.parts, columns=list(PeakPart._fields))


def estimated(
    model: HookedRootModule, what: str | Run, prompts: tuple[object, ...], options: Mapping[str, object]
) -> Estimate:
    """The estimate of a run of the model, by its name or its function; see `model.estimate`."""
    name, run = named_run(model, what)
    dry, given = DryRun(model), _without_shapes(model, prompts)
    own = {name: _own(option) for name, option in options.items()}
    with dry.running():
        result = run(*given, **own)
    cache = next((x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Cache)), None)
    recorded = {dry.number_of(value) for value in ({} if cache is None else cache.cache_dict).values()}
    parts = [_part(str(device), WEIGHTS, tensors) for device, tensors in _weights(model).items()]
    for device, memory in dry.memory.items():
        by_part: dict[str, list[Allocation]] = {}
        for made in memory.at_peak:
            by_part.setdefault(RECORDED if made.storage in recorded else made.part, []).append(made)
        found = [_part(str(device), part, made) for part, made in by_part.items()]
        parts += sorted(found, key=lambda part: -part.bytes)
    free = {str(device): size for device in dry.memory if (size := free_bytes(device)) is not None}
    return Estimate(name, tuple(parts), dry.layer_rows, free, cache)


def named_run(model: HookedRootModule, what: str | Run) -> tuple[str, Run]:
    """The name of a run, and its function of prompts and options; ValueError for an unknown name."""
    if not isinstance(what, str):
        return getattr(what, "__name__", "run"), partial(what, model)
    if what in TOOLS:
        return what, partial(resolve_name(TOOLS[what]), model, progress=False)
    methods = {name: getattr(model, method) for name, method in METHODS.items() if hasattr(model, method)}
    if what not in methods:
        known = [*methods, *TOOLS]
        near = nearest(what, known, 0.5)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"it is {', '.join(map(repr, known))}, or a function of the model"
        )
        raise ArgumentError(f"what={what!r} is no run of a {type(model).__name__}; {hint}")
    return what, partial(methods[what], **ALWAYS.get(what, {}))


def free_bytes(device: torch.device) -> int | None:
    """The bytes of a device that are free for new tensors; None where that is not known."""
    if device.type == "cuda" and torch.cuda.is_available():
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":") for line in file)
    except OSError:
        return None
    return 1024 * int(found["MemAvailable"].split()[0]) if device.type == "cpu" else None


def _without_shapes(model: HookedRootModule, prompts: tuple[object, ...]) -> Iterator[object]:
    """Prompts as a run takes them: in place of a shape ids that are words, other ones for each shape."""
    special = {*getattr(getattr(model, "tokenizer", None), "all_special_ids", ())}
    words = (id for id in count() if id not in special)
    for given in prompts:
        if not (isinstance(given, tuple) and given and all(isinstance(n, int) for n in given)):
            yield given
        elif min(given) < 1:
            raise ArgumentError(f"the shape of token ids must be numbers of at least 1, got {given}")
        else:
            yield torch.full(given, next(words), device=next(model.parameters()).device)


def _own(option: object) -> object:
    """An option that the run may change: the entries of a key/value cache are copied, and share its tensors."""
    if not isinstance(option, KeyValueCache):
        return option
    own = copy(option)
    own.entries, own.states = [copy(each) for each in option.entries], {n: copy(x) for n, x in option.states.items()}
    return own


def _weights(model: HookedRootModule) -> dict[torch.device, list[Allocation]]:
    """The weights on each device; what several share is counted once."""
    found: dict[tuple[torch.device, int], Allocation] = {}
    for weight in (*model.parameters(), *model.buffers()):
        key = weight.device, weight.untyped_storage()._cdata
        found[key] = Allocation(0, WEIGHTS, weight.nbytes, tuple(weight.shape), weight.dtype)
    by_device: dict[torch.device, list[Allocation]] = {}
    for (device, _), held in found.items():
        by_device.setdefault(device, []).append(held)
    return by_device


def _part(device: str, name: str, made: list[Allocation]) -> PeakPart:
    largest = max(made, key=lambda one: one.nbytes)
    words = f"{[*largest.shape]} {str(largest.dtype).removeprefix('torch.')}"
    return PeakPart(device, name, sum(one.nbytes for one in made), len(made), words)
