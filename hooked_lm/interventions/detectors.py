"""Detectors: hook objects that only read values. Record, Output, NanGuard; see also input_tokens, statistics, top_examples."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.base import HookFile
from hooked_lm.interventions.collector import Collector, pick_site
from hooked_lm.interventions.input_tokens import InputTokens
from hooked_lm.interventions.part import Part, selected
from hooked_lm.interventions.part_editor import PartHook
from hooked_lm.notebook_repr import Table, bytes_in_words

__all__ = ["Collector", "InputTokens", "NanGradientGuard", "NanGuard", "Record", "RecordOutput"]


@dataclass(eq=False, repr=False)
class Record(PartHook, Collector):
    """Keeps copies of the values of its sites for every call: each batch, and each step of cached generation.

    Copies to another device are synchronous. A call without any of the positions is not kept.

    Args:
        positions, heads, features, rows: what is kept, as for controllers (`PartHook`); all axes are kept. In generation
            `positions=-1` is the last token of the prompt, "generated" the tokens after it, and `slice(-1, None)` both.
        dtype, device: dtype (of floating-point values) and device of the copies; unchanged if None.
        axes: the names of the axes, e.g. ("batch", "pos", "d_model"), for points without axis names (wrapped modules).
        most_calls, most_bytes: limits of what is kept in memory, for all sites together. A store gets everything.
        at_cap: "stop" keeps no more, and warns once; "oldest" drops the oldest, and raises MemoryError for a single value above
            the limit; "raise" raises MemoryError.

    Raises ValueError for indices of an axis that a site lacks, IndexError for an index out of range, TypeError for a value
    that is not a tensor.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> record = Record("z", 2, positions=-1, heads=[0, 5])
    >>> for text in ["The capital of France is", "When Mary and John"]:
    ...     _ = model.run_with_hooks(text, fwd_hooks=[record])
    >>> record.stacked().shape
    torch.Size([2, 1, 1, 2, 16])
    """

    dtype: torch.dtype | str | None = field(default=None, kw_only=True)
    device: torch.device | str | None = field(default=None, kw_only=True)
    axes: Sequence[str] = field(default=(), kw_only=True)
    most_calls: int | None = field(default=None, kw_only=True)
    most_bytes: int | None = field(default=None, kw_only=True)
    at_cap: str = field(default="stop", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_cap not in ("stop", "oldest", "raise"):
            raise ValueError(f"at_cap must be 'stop', 'oldest' or 'raise', got {self.at_cap!r}")
        for name in ("most_calls", "most_bytes"):
            if (most := getattr(self, name)) is not None and most < 0:
                raise ValueError(f"{name} must be at least 0, got {most}")
        if self.dtype is not None:
            self.dtype = str(_dtype(self.dtype)).removeprefix("torch.")
        self.device = None if self.device is None else str(self.device)
        self.clear()

    @classmethod
    def settings_from_file(cls, settings: dict[str, Any], file: HookFile) -> dict[str, Any]:
        """The settings; in version 1 of the format a tuple meant a range."""
        if file.version == 1:
            names = ("rows", "positions", "heads", "features")
            ranges = {name: slice(*settings[name]) for name in names if isinstance(settings.get(name), tuple)}
            settings = {**settings, **ranges}
        return super().settings_from_file(settings, file)

    def clear(self) -> None:
        """Deletes the values in memory; a store is not changed."""
        self._kept: list[tuple[str, Tensor]] = []
        self._dims: dict[str, tuple[str, ...]] = {}
        self.n_bytes, self.n_dropped = 0, 0

    def sees_only(self, part: Part) -> bool:
        """What is recorded is the part; a class with its own `see` may need more."""
        return type(self).see is Record.see and type(self).__call__ is Collector.__call__

    def see(self, value: object, hook: HookPoint) -> None:
        name = hook.name or ""
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' passes a {type(value).__name__}, and a record keeps tensors")
        dims = hook.dims or tuple(self.axes)
        if dims and len(dims) != value.ndim:
            raise ValueError(f"'{name}' has {value.ndim} axes, and {dims} names {len(dims)}")
        part = selected(value.detach(), hook, self.positions, self.heads, self.features, self.rows, dims)
        if value.numel() and not part.numel():
            return
        dtype = _dtype(self.dtype) if self.dtype is not None and part.is_floating_point() else None
        part = part.to(device=self.device, dtype=dtype, copy=True)
        self._dims[name] = dims
        self._write(name, {"value": part})
        self._keep(name, part)

    def _keep(self, name: str, part: Tensor) -> None:
        size = part.numel() * part.element_size()
        if self.at_cap == "oldest" and self.store is None and not self._fits(size, [], 0):
            raise MemoryError(f"{self!r} can keep nothing: one value of '{name}' has {size} bytes")
        while self.at_cap == "oldest" and self._kept and not self._fits(size, self._kept, self.n_bytes):
            gone = self._kept.pop(0)[1]
            self.n_bytes -= gone.numel() * gone.element_size()
            self.n_dropped += 1
        if self._fits(size, self._kept, self.n_bytes):
            self._kept.append((name, part))
            self.n_bytes += size
            return
        full = f"{self!r} is full with {len(self._kept)} values of {self.n_bytes} bytes; '{name}' has {size} more"
        if self.at_cap == "raise":
            raise MemoryError(full)
        if self.at_cap == "stop" and self.n_dropped == 0 and self.store is None:
            warnings.warn(f"{full}: it and what follows are not kept", stacklevel=2)
        self.n_dropped += 1

    def _fits(self, size: int, kept: Sequence[Any], n_bytes: int) -> bool:
        """Whether a value of that size may be kept in addition to `kept`."""
        enough_calls = self.most_calls is None or len(kept) < self.most_calls
        return enough_calls and (self.most_bytes is None or n_bytes + size <= self.most_bytes)

    def found_shown(self) -> Table:
        """A row for each site: the number of calls that are kept, the shape of the last, and their memory."""
        kept = self.values.items()
        rows = [(site, len(v), [*v[-1].shape], bytes_in_words(sum(one.nbytes for one in v))) for site, v in kept]
        return Table(("site", "calls", "shape", "memory"), rows)

    @property
    def values(self) -> dict[str, list[Tensor]]:
        """The kept values: site -> one tensor for each call."""
        found: dict[str, list[Tensor]] = {}
        for name, value in self._kept:
            found.setdefault(name, []).append(value)
        return found

    def stacked(self, site: str | tuple[str, int] | None = None) -> Tensor:
        """The values of a site (None: the only one), stacked along a new first axis of calls.

        Raises ValueError if their shapes differ, KeyError for a site without values.
        """
        values = self.values[pick_site(site, self.values)]
        if len(shapes := list(dict.fromkeys(tuple(value.shape) for value in values))) > 1:
            raise ValueError(f"calls of different shapes do not stack: {shapes}; joined(axis=...) puts them in a row")
        return torch.stack(values)

    def joined(self, site: str | tuple[str, int] | None = None, axis: str = "batch") -> Tensor:
        """The values of a site concatenated along an axis: "batch" for batches, "pos" for the steps of cached generation.

        Raises ValueError for an axis that the site does not have.
        """
        values = self.values[name := pick_site(site, self.values)]
        if axis not in (dims := self._dims[name]):
            raise ValueError(f"'{name}' has no axis {axis!r}; its axes are {dims or 'not named: say axes='}")
        return torch.cat(values, dims.index(axis))


@dataclass(eq=False, repr=False)
class RecordOutput(Record):
    """Records the logits, before any soft cap or scaling; with "unembed.hook_in", the input of the unembedding.

    Every model class has both sites. In generation, logits are then computed at all positions instead of the last alone.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> output = RecordOutput(positions=-1)
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[output])
    >>> bool((output.stacked()[0, :, 0] == logits[:, -1]).all())
    True
    """

    hook_point: Site = "unembed.hook_out"


@dataclass(eq=False, repr=False)
class NanGuard(Collector):
    """Raises ValueError at the first value that is NaN or infinite: its site, its index and how many there are.

    Masked attention scores are -inf by design: use `nan_only` for them. With a store, the value is first written there.

    >>> import torch
    >>> from hooked_lm.hooks import wrap
    >>> net = wrap(torch.nn.Sequential(torch.nn.Identity()))
    >>> net.run_with_hooks(torch.tensor([1.0, float("nan")]), fwd_hooks=[NanGuard("0")])
    Traceback (most recent call last):
    ...
    ValueError: the value at '0' is NaN at [1], the first of 1 among 2
    """

    nan_only: bool = field(default=False, kw_only=True)

    def see(self, value: object, hook: HookPoint) -> None:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return
        value = value.detach()
        if bool(value.sum().isfinite()):  # then every entry is finite
            return
        bad = value.isnan() if self.nan_only else ~value.isfinite()
        if not (count := int(bad.sum())):
            return
        index = bad.nonzero()[0].tolist()
        kind = "NaN" if bool(value[tuple(index)].isnan()) else str(value[tuple(index)].item())
        names = f" ({', '.join(f'{dim} {i}' for dim, i in zip(hook.dims, index, strict=False))})" if hook.dims else ""
        what = "gradient" if self.direction == "bwd" else "value"
        self._write(hook.name or "", {"value": value}, kind=kind, index=index)
        raise ValueError(
            f"the {what} at '{hook.name}' is {kind} at {index}{names}, the first of {count} among {value.numel()}"
        )


@dataclass(eq=False, repr=False)
class NanGradientGuard(NanGuard):
    """`NanGuard` for gradients: raises at the first one in the backward pass that is NaN or infinite."""

    direction: ClassVar[str] = "bwd"


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {dtype!r} in torch")
    return found
