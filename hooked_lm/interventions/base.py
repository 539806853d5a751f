"""Base classes of hook objects: each knows its site, and can be switched off, described, saved and loaded.

They are accepted wherever a hook is: `model.hooks([a, b])`, `run_with_hooks(..., fwd_hooks=[a])`, `model.register(a)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import cache, partial
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from hooked_lm.engine.edit import Change, Edit, Rewrite
from hooked_lm.hooks import HookPoint, token_labels
from hooked_lm.hooks.select import Site
from hooked_lm.hooks.token_labels import Labels
from hooked_lm.interventions.per_thread import Lock, PerThread
from hooked_lm.interventions.settings_json import as_json, check_types, from_json
from hooked_lm.keywords import check_arguments
from hooked_lm.models.dry_run import dry_run_now
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr
from hooked_lm.results import stored

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = TypeVar("Kind", bound="HookObject")
Loaded = TypeVar("Loaded", bound="Hooks[Any]")
FORMAT = "hooked_lm.interventions"
VERSION = 2  # version 1 had classes by bare name only, and a tuple in `Record` meant a range
PLAIN = (bool, int, float, str, list, tuple, slice)  # types of settings without tensors
SETTING_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
FORMER_KINDS = {"Output": "RecordOutput"}  # the names of kinds in files of earlier versions

_disabled: ContextVar[tuple["HookObject", ...]] = ContextVar("disabled", default=())


class _OfInit:
    """The signature of a class of hook objects: that of its `__init__`, since `__new__` takes anything to check it."""

    def __get__(self, hook: object, kind: type) -> Signature:
        if hook is not None:
            raise AttributeError("__signature__")
        return _of_init(kind)


@cache
def _of_init(kind: type) -> Signature:
    wanted = signature(kind.__init__)  # type: ignore[misc]  # of the class itself
    return wanted.replace(parameters=list(wanted.parameters.values())[1:])


@dataclass(eq=False, repr=False)
class HookObject(NotebookRepr, ABC):
    """A hook with its site and settings.

    `hook_point` is a site (name, glob, short name, list or predicate); with `layer`, the short name of a site of that layer.
    Where it acts comes first, all else is given by name; TypeError otherwise, and for an unknown name, with the nearest.
    Subclasses are dataclasses whose fields are their settings. `direction` is "fwd" for values or "bwd" for gradients;
    `when` is "pre" for the input of the site's module or "post" for its output.
    """

    hook_point: Site = ""
    layer: int | None = None
    when: str = field(default="post", kw_only=True)
    direction: ClassVar[str] = "fwd"
    _is_on: bool = field(default=True, init=False)
    _kinds: ClassVar[dict[str, type["HookObject"]]] = {}  # by `kind_name`
    __signature__ = _OfInit()

    def __new__(cls, *args: object, **kwargs: object) -> "Self":
        if args or kwargs:  # not for a copy
            check_arguments(cls.__name__, signature(cls), args, kwargs)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        HookObject._kinds[cls.kind_name()] = cls

    @classmethod
    def kind_name(cls) -> str:
        """The class name in descriptions and files; includes the module for classes outside this package."""
        is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"

    def __post_init__(self) -> None:
        if isinstance(self.hook_point, str) and not self.hook_point:
            raise ValueError(f"{type(self).__name__} needs a hook_point: the name of its site")
        if self.when not in ("pre", "post"):
            raise ValueError(f"when must be 'pre' or 'post', got {self.when!r}")
        for name, value in vars(self).items():
            if value is None or type(value) in PLAIN:
                continue
            for one in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(one, Tensor) and one.layout != torch.strided:
                    raise ValueError(
                        f"{name} of {type(self).__name__} is a sparse tensor ({one.layout}): give {name}.to_dense()"
                    )

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without the per-thread values."""
        return {
            name: value.empty_copy() if isinstance(value, (PerThread, Lock)) else value
            for name, value in vars(self).items()
        }

    @abstractmethod
    def __call__(self, value: Any, hook: HookPoint) -> Any:
        """Returns the new value or gradient; None leaves it unchanged."""

    # ---- on and off --------------------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether the hook acts in forward passes of this thread or task."""
        return self._is_on and not self.is_off_here

    @is_enabled.setter
    def is_enabled(self, is_on: bool) -> None:
        for one in (self, *self.switched_with()):
            one._is_on = is_on

    def switched_with(self) -> "tuple[HookObject, ...]":
        """The hook objects that are switched on and off with this one."""
        return ()

    @property
    def is_off_here(self) -> bool:
        """Whether a `disabled` block is open for it, in this thread or task."""
        return any(one is self for one in _disabled.get())

    def enable(self) -> None:
        """Switches the hook on again, in all threads."""
        self.is_enabled = True

    def disable(self) -> None:
        """Switches the hook off in all threads until `enable`."""
        self.is_enabled = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switches the hook off inside the block, in this thread or task only."""
        token = _disabled.set((*_disabled.get(), self, *self.switched_with()))
        try:
            yield
        finally:
            _disabled.reset(token)

    # ---- descriptions ------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor that make an equal object."""
        return {of.name: self._setting(of.name, getattr(self, of.name)) for of in fields(self) if of.init}

    def _setting(self, name: str, value: object) -> object:
        """A setting that makes an equal object, from the value of its field."""
        return value

    def to_dict(self) -> dict[str, Any]:
        """The class name and settings, for `from_dict`.

        Raises ValueError for settings that cannot be serialised, such as a predicate, and for a class with its own `__init__`.
        """
        found = self.settings()
        if wrong := sorted(found.keys() ^ signature(type(self)).parameters.keys()):
            raise ValueError(
                f"{self!r} cannot be serialised: the constructor of {type(self).__name__} and its fields differ in "
                f"{', '.join(wrong)}. Make the class a dataclass whose fields are its settings, and define no __init__"
            )
        found = self.packed(found)
        check_no_functions(self, found)
        return {"kind": self.kind_name(), **found}

    def packed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings in the form of `to_dict`."""
        return settings

    @classmethod
    def unpacked(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the constructor from settings in the form of `to_dict`."""
        return settings

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> "HookObject":
        """The object of a description from `to_dict`.

        Raises ValueError for a class that is not imported, and for a bare name that several user classes have.
        """
        settings = dict(described)
        return HookObject.kind_named(settings.pop("kind", None)).from_settings(settings)

    @staticmethod
    def kind_named(name: object, is_old: bool = False) -> type["HookObject"]:
        """The class of that name. `is_old`: the name is from a version 1 file, without the modules of user classes."""
        kinds = HookObject._kinds
        name = FORMER_KINDS.get(name, name) if isinstance(name, str) else name
        if isinstance(name, str) and name in kinds and not is_old:
            return kinds[name]
        matching = [full for full, kind in kinds.items() if name in (full, kind.__name__)]
        if len(matching) > 1:
            raise ValueError(f"several classes are called {name!r}: {', '.join(sorted(matching))}; give the full name")
        if not matching:
            raise ValueError(
                f"no class of hook objects is called {name!r}; there are {', '.join(sorted(kinds))}. Import its module"
            )
        return kinds[matching[0]]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "HookObject":
        """The object of this class with these settings, in the form of `to_dict`."""
        return cls(**cls.unpacked(settings))

    @classmethod
    def settings_from_file(cls, settings: dict[str, Any], file: "HookFile") -> dict[str, Any]:
        """Converts the settings of a file for `from_settings`; ValueError for those that a file may not decide."""
        return settings

    def settings_for_file(self, file: "HookFile") -> dict[str, Any]:
        """`to_dict`, with paths adapted to the location of the file."""
        return self._for_file(self.to_dict(), file)

    def _for_file(self, settings: dict[str, Any], file: "HookFile") -> dict[str, Any]:
        """The opposite of `settings_from_file`."""
        return settings

    def repr_table(self) -> Table:
        """What the hook found, if it shows that; else its settings, with the site first, and whether it is switched off."""
        if (found := self.found_shown()) is not None:
            return found
        settings = [(name, short_repr(value)) for name, value in self.settings().items() if value is not None]
        return Table(("setting", "value"), [*settings, *([] if self.is_enabled else [("enabled", "no")])])

    def found_shown(self) -> Table | None:
        """The table of what the hook found, for a notebook; None: its settings are shown."""
        return None

    def __repr__(self) -> str:
        """The site, and the settings that differ from their defaults."""
        usual = {of.name: _as_text(of.default) for of in fields(self)}
        shown = {
            name: _as_text(value) for name, value in self.settings().items() if name not in ("hook_point", "layer")
        }
        layer = [] if self.layer is None else [f"{self.layer}"]
        is_keyword = any(of.name == "hook_point" and of.kw_only for of in fields(self))
        where = [*layer, f"hook_point={self.hook_point!r}"] if is_keyword else [repr(self.hook_point), *layer]
        changed = [f"{name}={value}" for name, value in shown.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join([*where, *changed])})"


class Detector(HookObject):
    """Reads values without changing them: `see` gets a copy, and its return value is ignored.

    A class that never writes in place may set `copies = False`: `see` then gets the value itself, and writing to it raises
    RuntimeError.
    """

    records: ClassVar[bool] = True
    copies: ClassVar[bool] = True

    def __call__(self, value: object, hook: HookPoint) -> None:
        if not self.is_enabled or dry_run_now() is not None:  # where there are no values to see
            return
        if self.copies:
            return self.see(value.clone() if isinstance(value, Tensor) else value, hook)
        before = _version(value)
        self.see(value, hook)
        if _version(value) != before:
            raise RuntimeError(f"{self!r} wrote into the value of '{hook.name}', and detectors must not change values")

    @abstractmethod
    def see(self, value: Any, hook: HookPoint) -> None:
        """Processes the value of a site."""


class Controller(HookObject):
    """Replaces the value of a site by the return value of `change`."""

    def __call__(self, value: Any, hook: HookPoint) -> Any:
        return self.change(value, hook) if self.is_enabled else None

    @abstractmethod
    def change(self, value: Any, hook: HookPoint) -> Any:
        """The new value of a site."""

    def as_edit(self, point: HookPoint, like: Tensor | None = None) -> Change:
        """The same change at one site, in the form that the engine takes in a cell of a sweep.

        An `Edit` if the changed part of the value is known and each position depends on that position alone; otherwise a
        `Rewrite` of the whole value, which needs whole forward passes. `like` is a tensor on the meta device with the shape
        and dtype of the value; None if unknown.
        """
        return self.local_edit(point, like) or rewrite(self, point)

    def local_edit(self, point: HookPoint, like: Tensor | None) -> Edit | None:
        """The change as an `Edit`; None if the changed part is unknown, or positions depend on each other."""
        return None


def rewrite(hook: Callable[..., Any], point: HookPoint) -> Rewrite:
    """Wraps any hook function at a site as a `Rewrite` of the whole value."""
    return Rewrite(point.name or "", partial(_rewritten, hook, point, token_labels.current()))


def _rewritten(hook: Callable[..., Any], point: HookPoint, labels: Sequence[Labels] | None, value: Tensor) -> Any:
    with token_labels.reading(labels):
        new = hook(value, hook=point)
    if isinstance(new, Tensor) and new.shape != value.shape:
        raise ValueError(f"{hook!r} replaced {tuple(value.shape)} at '{point.name}' by {tuple(new.shape)}")
    return value if new is None else new


@dataclass(frozen=True)
class HookFile:
    """A file of hook objects: its folder, the format version, and the `store` argument of `Hooks.load`."""

    folder: Path
    version: int = VERSION
    store: str | Path | None = None


class Hooks(NotebookRepr, list[Kind]):
    """A list of hook objects that can be saved and loaded. A single object is a list of one.

    >>> from hooked_lm.interventions import Scale
    >>> Hooks(Scale("z", 2, factor=0.5))
    [Scale('z', 2, factor=0.5)]
    """

    def __init__(self, objects: Kind | Iterable[Kind] = ()) -> None:
        super().__init__([objects] if isinstance(objects, HookObject) else objects)

    def repr_table(self) -> Table:
        """A row for each object: its class, and all that its text says."""
        rows = [(i, type(one).__name__, short_repr(one)) for i, one in enumerate(self)]
        return Table(("", "class", "hook"), rows)

    def _repr_line(self) -> str:
        """The number of objects."""
        return f"Hooks({len(self)} object{'s' * (len(self) != 1)})"

    def save(self, path: str | Path) -> None:
        """Writes the objects to one safetensors file: tensors bit for bit, other settings as JSON.

        Raises ValueError for a setting that cannot be serialised, TypeError for what is no hook object; then nothing is written.
        """
        if strange := [one for one in self if not isinstance(one, HookObject)]:
            raise TypeError(f"only hook objects can be saved, not {strange[0]!r}: a function has no settings")
        tensors: dict[str, Tensor] = {}
        file = HookFile(Path(path).absolute().parent)
        described = [
            {name: as_json(value, f"{index}.{name}", tensors) for name, value in one.settings_for_file(file).items()}
            for index, one in enumerate(self)
        ]
        stored.write(path, FORMAT, tensors, {"objects": described, "version": VERSION})

    @classmethod
    @stored.names_the_file
    def load(cls: type[Loaded], path: str | Path, store: str | Path | None = None) -> Loaded:
        """The hook objects of a file that `save` wrote.

        For safety, the `store` of a detector must be inside the folder of the file. Otherwise pass `store`, a directory that
        all of them write into.

        Raises ValueError for any other file, classes that are not imported, settings that a class does not have, and a store
        outside the folder.
        """
        tensors, header = stored.read(path, FORMAT)
        version, objects = header.get("version", 1), header.get("objects")
        if version not in range(1, VERSION + 1) or isinstance(version, bool):
            raise ValueError(
                f"{path} has version {version!r} of the format; this package reads versions 1 to {VERSION}"
            )
        if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
            raise ValueError(f"{path} is damaged: it has no list of objects")
        file = HookFile(Path(path).absolute().parent, version, store)
        return cls([_object(one, tensors, file, f"{path}: object {i}") for i, one in enumerate(objects)])


def _object(described: dict[str, Any], tensors: Mapping[str, Tensor], file: HookFile, where: str) -> HookObject:
    """One object of a file. Any error in its settings becomes a ValueError that names the object."""
    try:
        settings = {name: from_json(value, tensors) for name, value in described.items()}
        name = settings.pop("kind", None)
        kind = HookObject.kind_named(name, is_old=file.version == 1)
        check_types(kind, settings)
        return kind.from_settings(kind.settings_from_file(settings, file))
    except SETTING_ERRORS as error:
        raise ValueError(f"{where} cannot be read: {error}") from error


def check_no_functions(hook: HookObject, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that is a function, which cannot be serialised."""
    if function := next((name for name, value in settings.items() if callable(value)), None):
        raise ValueError(f"{hook!r} cannot be serialised: its {function} is a function")


def _version(value: object) -> int:
    """The number of in-place writes to a tensor; 0 for inference tensors, which have no version counter."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _as_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_as_text(one)}" for name, one in value.items()) + "}"
    return f"tensor{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
