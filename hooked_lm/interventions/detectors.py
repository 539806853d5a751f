"""Detectors: hook objects that watch. Record, Output, InputTokens and NanGuard; see also statistics.py and top_examples.py."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.hooks import HookPoint, Slice, SliceInput
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.base import Detector
from hooked_lm.interventions.store import Run, Store

__all__ = ["Collector", "InputTokens", "NanGradientGuard", "NanGuard", "Output", "Record"]

HEADS = ("head", "kv_head", "ssm_head")
POSITIONS = ("pos", "query_pos")


@dataclass(eq=False, repr=False)
class Collector(Detector):
    """A detector that may be given a `store`: a directory, or a `Run` that several share, into which it writes what it found.

    It is shown the live value, without a copy, and neither writes into it nor keeps it.
    """

    store: str | Path | Run | None = field(default=None, kw_only=True)
    copies: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run = self.store if isinstance(self.store, Run) else None

    @property
    def run(self) -> Run:
        """The run of the store that this writes into. Raises ValueError without a store."""
        if self.store is None:
            raise ValueError(f"{self!r} has no store: give store=, a directory")
        if self._run is None:
            self._run = Store(str(self.store)).start(detector=type(self).__name__, hook_point=str(self.hook_point))
        return self._run

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.store is not None:
            found["store"] = str(self.store.path.parent if isinstance(self.store, Run) else self.store)
        return found

    def _write(self, site: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        if self.store is not None:
            self.run.add(site, tensors, detector=type(self).__name__, **about)


@dataclass(eq=False, repr=False)
class Record(Collector):
    """Keeps the values of its sites, of every call: of each batch, and in cached generation of each step.

    What is kept is a copy that nothing else holds; a copy on another device has arrived when the call is over.

    Args:
        rows, positions, heads, features: which part of the batch, of the text, of the heads and of the last axis to keep, as
            `Slice` takes it: an index, a (start, stop) tuple, a list.
        dtype, device: what to keep values in (whole numbers stay whole) and where; as they are if None.
        axes: the names of the axes, e.g. ("batch", "pos", "d_model"), where the point does not know them: in a wrapped module.
        most_calls, most_bytes: how much to keep in memory, of all sites together. A store gets everything.
        at_cap: "stop" keeps no more, and warns once; "oldest" forgets the oldest; "raise" raises MemoryError.

    Raises ValueError for a part of an axis that a site does not have, IndexError for an index out of range, TypeError for
    what is no tensor.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> record = Record("z", 2, positions=-1, heads=[0, 5])
    >>> for text in ["The capital of France is", "When Mary and John"]:
    ...     _ = model.run_with_hooks(text, fwd_hooks=[record])
    >>> record.stacked().shape
    torch.Size([2, 1, 1, 2, 16])
    """

    rows: SliceInput = field(default=None, kw_only=True)
    positions: SliceInput = field(default=None, kw_only=True)
    heads: SliceInput = field(default=None, kw_only=True)
    features: SliceInput = field(default=None, kw_only=True)
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
        self.rows, self.positions, self.heads, self.features = map(
            _plain, (self.rows, self.positions, self.heads, self.features)
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything; a store keeps what was written."""
        self._kept: list[tuple[str, Tensor]] = []
        self._dims: dict[str, tuple[str, ...]] = {}
        self.n_bytes, self.n_dropped = 0, 0

    def see(self, value: Any, hook: HookPoint) -> None:
        name = hook.name or ""
        if not isinstance(value, Tensor):
            raise TypeError(f"'{name}' passes a {type(value).__name__}, and a record keeps tensors")
        dims = hook.dims or tuple(self.axes)
        if dims and len(dims) != value.ndim:
            raise ValueError(f"'{name}' has {value.ndim} axes, and {dims} names {len(dims)}")
        part = self._part(value.detach(), name, dims)
        dtype = _dtype(self.dtype) if self.dtype is not None and part.is_floating_point() else None
        part = part.to(device=self.device, dtype=dtype, copy=True)
        self._dims[name] = dims
        self._write(name, {"value": part})
        self._keep(name, part)

    def _part(self, value: Tensor, name: str, dims: tuple[str, ...]) -> Tensor:
        chosen = [("rows", ("batch",)), ("positions", POSITIONS), ("heads", HEADS), ("features", dims[-1:])]
        for setting, axes in chosen:
            if (wanted := getattr(self, setting)) is None:
                continue
            axis = value.ndim - 1 if setting == "features" else _axis(dims, axes)
            if axis is None:
                known = f"its axes are {dims}" if dims else "it does not name its axes: say axes=('batch', 'pos', ...)"
                raise ValueError(f"'{name}' has no {setting} to choose: {known}")
            value = Slice.unwrap(wanted).apply(value, axis)
        return value

    def _keep(self, name: str, part: Tensor) -> None:
        size = part.numel() * part.element_size()
        while self.at_cap == "oldest" and self._kept and not self._has_room(size):
            gone = self._kept.pop(0)[1]
            self.n_bytes -= gone.numel() * gone.element_size()
            self.n_dropped += 1
        if self._has_room(size):
            self._kept.append((name, part))
            self.n_bytes += size
            return
        full = f"{self!r} is full with {len(self._kept)} values of {self.n_bytes} bytes; '{name}' has {size} more"
        if self.at_cap == "raise":
            raise MemoryError(full)
        if self.at_cap == "stop" and self.n_dropped == 0 and self.store is None:
            warnings.warn(f"{full}: it and what follows are not kept", stacklevel=2)
        self.n_dropped += 1

    def _has_room(self, size: int) -> bool:
        enough_calls = self.most_calls is None or len(self._kept) < self.most_calls
        return enough_calls and (self.most_bytes is None or self.n_bytes + size <= self.most_bytes)

    @property
    def values(self) -> dict[str, list[Tensor]]:
        """What was kept, by site, a tensor for each call."""
        found: dict[str, list[Tensor]] = {}
        for name, value in self._kept:
            found.setdefault(name, []).append(value)
        return found

    def stacked(self, site: str | None = None) -> Tensor:
        """The values of a site (of the only one if None) along a new first axis, one for each call.

        Raises ValueError if their shapes differ, KeyError for a site that nothing was kept of.
        """
        _, values = self._of(site)
        if len(shapes := list(dict.fromkeys(tuple(value.shape) for value in values))) > 1:
            raise ValueError(f"calls of different shapes do not stack: {shapes}; joined(axis=...) puts them in a row")
        return torch.stack(values)

    def joined(self, site: str | None = None, axis: str = "batch") -> Tensor:
        """The values of a site put together along an axis: "batch" for batches, "pos" for the steps of cached generation.

        Raises ValueError for an axis that the site does not have.
        """
        name, values = self._of(site)
        if axis not in (dims := self._dims[name]):
            raise ValueError(f"'{name}' has no axis {axis!r}; its axes are {dims or 'not named: say axes='}")
        return torch.cat(values, dims.index(axis))

    def _of(self, site: str | None) -> tuple[str, list[Tensor]]:
        values = self.values
        if site is None and len(values) == 1:
            return next(iter(values.items()))
        if site is None or site not in values:
            asked = "no site was said" if site is None else f"nothing was kept of '{site}'"
            raise KeyError(f"{asked}; there are values of {', '.join(values) or 'nothing'}")
        return site, values[site]


@dataclass(eq=False, repr=False)
class Output(Record):
    """Records what the model says: the logits, before a soft cap or a factor if there is one; with "unembed.hook_in" the last
    stream.

    Both sites are in every model class. In generation it asks for the logits of all positions, not of the last one alone.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> output = Output(positions=-1)
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[output])
    >>> bool((output.stacked()[0, :, 0] == logits[:, -1]).all())
    True
    """

    hook_point: Site = "unembed.hook_out"


@dataclass(frozen=True, eq=False)
class Texts:
    """What a run reads: all ids of its rows so far and which are real, the number of the first row, how many ids are new."""

    ids: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    first: int
    n_new: int


@dataclass(eq=False, repr=False)
class InputTokens(Collector):
    """Keeps the token ids of each batch, which are no padding, and which are special.

    Models get their mask apart from the ids, so say it with `batch(tokens, mask)` before the run. Else ids at either end of a
    row that are `pad` are taken for padding, and without `pad` none. Generation says itself what is padding; there each step
    is a call, and belongs to the rows before. An encoder-decoder has "hook_tokens" (its source) and
    "hook_decoder_tokens"; of a wrapped module nothing is seen, and `batch` says everything.

    Args:
        pad: the id of padding, if it means nothing else.
        special: the ids of special tokens.
        most_calls: how many batches to keep; the oldest are forgotten. All if None.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> inputs = InputTokens.of(model)
    >>> _ = model.run_with_hooks("The capital of France is", fwd_hooks=[inputs])
    >>> inputs.special_mask[0].tolist()
    [[True, False, False, False, False, False]]
    """

    hook_point: Site = "hook_tokens"
    pad: int | None = field(default=None, kw_only=True)
    special: Sequence[int] = field(default=(), kw_only=True)
    most_calls: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_calls is not None and self.most_calls < 1:
            raise ValueError(f"most_calls must be at least 1, got {self.most_calls}")
        self.special = tuple(sorted(self.special))
        self.clear()

    @classmethod
    def of(cls, model: Any, hook_point: Site = "hook_tokens", **settings: Any) -> "InputTokens":
        """With the special ids of a model's tokenizer, and its padding where that has an id of its own."""
        tokenizer = model.tokens.need_tokenizer()
        ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        alone = ids["pad"] not in (ids["bos"], ids["eos"])
        special = [int(token) for token in tokenizer.all_special_ids]
        return cls(hook_point, pad=ids["pad"] if alone else None, special=special, **settings)

    def clear(self) -> None:
        """Forget everything, and count texts from 0 again."""
        self.ids: list[Tensor] = []
        self.mask: list[Tensor] = []
        self.n_texts = 0
        self.latest: Texts | None = None
        self._is_said = False

    def batch(self, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> None:
        """Say what the next run reads: ids, and 1 for real tokens or 0 for padding. Raises ValueError for another shape."""
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(f"the mask is {list(mask.shape)}, and the tokens are {list(tokens.shape)}")
        self._begin(tokens, self._not_padding(tokens) if mask is None else mask)
        self._is_said = True

    def see(self, value: Any, hook: HookPoint) -> None:
        was_said, self._is_said = self._is_said, False
        if hook.step and self.latest is not None:
            self._go_on(value, hook)
        elif not was_said:
            self._begin(value, self._not_padding(value) if hook.positions is None else hook.positions >= 0)
        elif value.shape != self.ids[-1].shape or bool((value.cpu() != self.ids[-1]).any()):
            got = f"{list(value.shape)}, and batch() was told of others {list(self.ids[-1].shape)}"
            raise ValueError(f"'{hook.name}' reads ids {got}: say what the run reads, or nothing")

    def _begin(self, tokens: Tensor, mask: Tensor) -> None:
        ids, real = self._add(tokens, mask)
        self.latest = Texts(ids, real, self.n_texts, ids.shape[1])
        self.n_texts += len(ids)

    def _go_on(self, tokens: Tensor, hook: HookPoint) -> None:
        """A step of generation: with the key/value cache it reads what is new, without it everything again."""
        before = self.latest
        assert before is not None
        real = torch.ones_like(tokens) if hook.positions is None else hook.positions.expand(tokens.shape) >= 0
        ids, mask = self._add(tokens, real)
        if ids.shape[1] > before.ids.shape[1]:
            self.latest = Texts(ids, mask, before.first, ids.shape[1] - before.ids.shape[1])
        else:
            whole = torch.cat([before.ids, ids], 1), torch.cat([before.mask, mask], 1)
            self.latest = Texts(*whole, before.first, ids.shape[1])

    def _add(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        mask = mask.expand(tokens.shape)
        ids, real = tokens.detach().to("cpu", torch.long, copy=True), mask.detach().to("cpu", torch.bool, copy=True)
        self.ids.append(ids)
        self.mask.append(real)
        if self.most_calls is not None:
            del self.ids[: -self.most_calls], self.mask[: -self.most_calls]
        self._write(str(self.hook_point), {"ids": ids, "mask": real})
        return ids, real

    def _not_padding(self, tokens: Tensor) -> Tensor:
        if self.pad is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        real = (tokens != self.pad).long()
        return (real.cumsum(-1) > 0) & (real.flip(-1).cumsum(-1).flip(-1) > 0)

    @property
    def n_bytes(self) -> int:
        """What is held."""
        kept = [*self.ids, *self.mask, *((self.latest.ids, self.latest.mask) if self.latest else ())]
        return sum({id(ids): ids.numel() * ids.element_size() for ids in kept}.values())

    @property
    def special_mask(self) -> list[Tensor]:
        """Which ids are special, for each batch."""
        return [torch.isin(ids, torch.tensor(self.special, dtype=torch.long)) for ids in self.ids]

    def texts_of(self, value: Tensor, site: str) -> "Texts":
        """The texts that a value [batch, pos, ...] was computed on. Raises ValueError if they are not known."""
        now = self.latest
        if now is None or len(now.ids) != len(value) or value.shape[1] not in (now.n_new, now.ids.shape[1]):
            known = "not known" if now is None else list(now.ids.shape)
            raise ValueError(
                f"'{site}' is {list(value.shape)}, and the token ids are {known}: give `inputs` to the same run, before this "
                "detector, or call batch(tokens, mask) first"
            )
        return now


@dataclass(eq=False, repr=False)
class NanGuard(Collector):
    """Raises ValueError at the first value that is NaN or infinite: its site, its index and how many there are.

    Scores of attention are -inf where they are masked, by design: watch them with `nan_only`. With a store, the value is
    written there first.

    >>> import torch
    >>> from hooked_lm.hooks import wrap
    >>> net = wrap(torch.nn.Sequential(torch.nn.Identity()))
    >>> net.run_with_hooks(torch.tensor([1.0, float("nan")]), fwd_hooks=[NanGuard("0")])
    Traceback (most recent call last):
    ...
    ValueError: the value at '0' is NaN at [1], the first of 1 among 2
    """

    nan_only: bool = field(default=False, kw_only=True)

    def see(self, value: Any, hook: HookPoint) -> None:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return
        value = value.detach()
        if bool(value.sum().isfinite()):  # then every summand is
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
    """The same on the gradient: the first one that is NaN or infinite, going backwards."""

    direction: ClassVar[str] = "bwd"


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {dtype!r} in torch")
    return found


def _axis(dims: tuple[str, ...], wanted: tuple[str, ...]) -> int | None:
    return next((axis for axis, dim in enumerate(dims) if dim in wanted), None)


def _plain(chosen: Any) -> Any:
    """A choice as something that can be written down."""
    if isinstance(chosen, slice):
        return (chosen.start, chosen.stop, chosen.step)
    return chosen.tolist() if hasattr(chosen, "tolist") else chosen
