"""Hooks as objects: each carries its own target, can be switched off, described, saved and loaded.

They go wherever a hook goes: `model.hooks([a, b])`, `run_with_hooks(..., fwd_hooks=[a])`, `model.register(a)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.select import Site
from hooked_lm.results import stored

FORMAT = "hooked_lm.interventions"


@dataclass(eq=False, repr=False)
class HookObject(ABC):
    """A hook that knows where it belongs.

    `hook_point` is a site (name, glob, short name, list or predicate); with a `layer` the short name of a site of that layer.
    Subclasses are dataclasses whose fields are their settings, and say by `direction` whether they see values ("fwd") or
    gradients ("bwd"), by `when` whether they see what goes into the site's module ("pre") or what comes out ("post").
    """

    hook_point: Site = ""
    layer: int | None = None
    when: str = field(default="post", kw_only=True)
    direction: ClassVar[str] = "fwd"
    is_enabled: bool = field(default=True, init=False)
    _kinds: ClassVar[dict[str, type["HookObject"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        HookObject._kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        if isinstance(self.hook_point, str) and not self.hook_point:
            raise ValueError(f"{type(self).__name__} needs a hook_point: the site that it belongs to")
        if self.when not in ("pre", "post"):
            raise ValueError(f"when must be 'pre' or 'post', got {self.when!r}")

    @abstractmethod
    def __call__(self, value: Any, hook: HookPoint) -> Any:
        """What the hook makes of a value or gradient; None leaves it as it is."""

    # ---- on and off --------------------------------------------------------------------------------------------------

    def enable(self) -> None:
        """Take part in runs again."""
        self.is_enabled = True

    def disable(self) -> None:
        """Take no part in runs until `enable`."""
        self.is_enabled = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Take no part in runs inside the block."""
        before, self.is_enabled = self.is_enabled, False
        try:
            yield
        finally:
            self.is_enabled = before

    # ---- descriptions ------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What makes another one like this: the fields that the constructor takes."""
        return {of.name: getattr(self, of.name) for of in fields(self) if of.init}

    def to_dict(self) -> dict[str, Any]:
        """The kind and settings; `from_dict` makes the same object of them. Raises ValueError for what cannot be written down,
        such as a predicate."""
        found = self.settings()
        if strange := next((name for name, value in found.items() if callable(value)), None):
            raise ValueError(f"{self!r} cannot be written down: its {strange} is a function")
        return {"kind": type(self).__name__, **found}

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> "HookObject":
        """The object that was described; raises ValueError for a kind that there is not."""
        settings = dict(described)
        kind = settings.pop("kind", None)
        if kind not in HookObject._kinds:
            raise ValueError(f"there is no hook object {kind!r}; there are {', '.join(sorted(HookObject._kinds))}")
        return HookObject._kinds[kind].from_settings(settings)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "HookObject":
        """The object of this class that has these settings, as `to_dict` told them."""
        return cls(**settings)

    def __repr__(self) -> str:
        """The target, and the settings that are not as they are by default."""
        usual = {of.name: _told(of.default) for of in fields(self)}
        told = {name: _told(value) for name, value in self.settings().items() if name not in ("hook_point", "layer")}
        where = repr(self.hook_point) if self.layer is None else f"{self.hook_point!r}, {self.layer}"
        own = [f"{name}={value}" for name, value in told.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join([where, *own])})"


class Detector(HookObject):
    """Watches and changes nothing: `see` is shown a copy, and what it returns is ignored.

    A class that never writes may say `copies = False`: then it is shown the value itself, and RuntimeError names it if it does
    write.
    """

    records: ClassVar[bool] = True
    copies: ClassVar[bool] = True

    def __call__(self, value: Any, hook: HookPoint) -> None:
        if not self.is_enabled:
            return
        if self.copies:
            return self.see(value.clone() if isinstance(value, Tensor) else value, hook)
        before = _version(value)
        self.see(value, hook)
        if _version(value) != before:
            raise RuntimeError(f"{self!r} wrote into the value of '{hook.name}', and a detector only watches")

    @abstractmethod
    def see(self, value: Any, hook: HookPoint) -> None:
        """Look at the value of a site."""


class Controller(HookObject):
    """Replaces the value of a site by what `change` returns."""

    def __call__(self, value: Any, hook: HookPoint) -> Any:
        return self.change(value, hook) if self.is_enabled else None

    @abstractmethod
    def change(self, value: Any, hook: HookPoint) -> Any:
        """The new value of a site."""


def save(objects: Sequence[HookObject], path: str | Path) -> None:
    """Write a list of hook objects to one safetensors file: tensors bit for bit, the rest as JSON.

    Raises ValueError for a setting that neither can hold; then nothing is written.
    """
    tensors: dict[str, Tensor] = {}
    described = [
        {name: _written(value, f"{index}.{name}", tensors) for name, value in one.to_dict().items()}
        for index, one in enumerate(objects)
    ]
    stored.write(path, FORMAT, tensors, {"objects": described})


def load(path: str | Path) -> list[HookObject]:
    """What `save` wrote."""
    tensors, told = stored.read(path, FORMAT)
    return [
        HookObject.from_dict({name: _loaded(value, tensors) for name, value in one.items()}) for one in told["objects"]
    ]


def _written(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A setting as JSON holds it; tensors go apart, under their key."""
    if isinstance(value, Tensor):
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"mapping": {name: _written(part, f"{key}.{name}", tensors) for name, part in value.items()}}
    if isinstance(value, (tuple, list)):
        parts = [_written(part, f"{key}.{i}", tensors) for i, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if not isinstance(value, (str, int, float, type(None))):
        what = key.replace(".", ": its ", 1)
        raise ValueError(f"hook object {what} is a {type(value).__name__}, which a file cannot hold")
    return value


def _version(value: Any) -> int:
    """How often a tensor was written to; in inference mode nobody counts."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _loaded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_loaded(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_loaded(content, tensors))
    return {name: _loaded(part, tensors) for name, part in content.items()}


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_told(one)}" for name, one in value.items()) + "}"
    return f"tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
