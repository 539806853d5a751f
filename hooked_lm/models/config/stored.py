"""Configs as JSON: a tree of component configs with the names of their classes, and the flat names that were set.

A class is named by its module and its qualified name. Only dataclasses of this package are read back: a file runs no code but
that of this package's own modules, which define them. A class that has moved since is found by its former module, too.
"""

import json
import math
from dataclasses import fields, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from hooked_lm.files import replacing
from hooked_lm.models.config.moved import present_name
from hooked_lm.models.config.row import table

__all__ = ["StoredConfig", "from_json", "to_json"]

PACKAGE = __name__.partition(".")[0]
HOMES = tuple(f"{PACKAGE}.{folder}." for folder in ("components", "families", "models"))  # of components
FORMAT = 1  # of files; a reader refuses later ones
Json = object  # None, a bool, a number, a string, or lists and dicts of these
Own = TypeVar("Own", bound="StoredConfig")


def to_json(value: object, where: str = "the config") -> Json:
    """A value of a config tree as JSON: tuples become lists, everything else that JSON lacks a dict with its type.

    Raises ValueError for a component that is defined outside of this package, and for values of other types.

    >>> to_json((1, torch.float32))
    [1, {'dtype': 'float32'}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return [to_json(part, where) for part in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, frozenset, set)):
        return {type(value).__name__: [to_json(part, where) for part in _in_order(value)]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key, where), to_json(part, where)] for key, part in value.items()]}
    cls = type(value)
    if is_dataclass(value) and cls.__module__.startswith(f"{PACKAGE}.") and "<" not in cls.__qualname__:
        own = {f.name: to_json(getattr(value, f.name), f"{cls.__qualname__}.{f.name}") for f in fields(value)}
        return {"class": f"{cls.__module__}:{cls.__qualname__}", **own}
    raise ValueError(
        f"{where} holds a {cls.__module__}.{cls.__qualname__}, which cannot be read back from a file: only components of "
        f"{PACKAGE} can. Keep the code that builds this model, and torch.save(model.state_dict(), path)"
    )


def from_json(value: Json) -> object:
    """The value that `to_json` wrote. Raises ValueError for a class that is no component of this package."""
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    if not isinstance(value, dict):
        return value
    if (name := value.get("class")) is not None:
        cls = _component(str(name))
        given = {name: from_json(part) for name, part in value.items() if name != "class"}
        if unknown := given.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"{name} has no {', '.join(sorted(unknown))}: was it written by a later version?")
        return cls(**given)
    (kind, parts), *more = value.items()
    if kind == "dtype" and not more and isinstance(found := getattr(torch, str(parts), None), torch.dtype):
        return found
    if kind in ("list", "set", "frozenset") and isinstance(parts, list) and not more:
        return {"list": list, "set": set, "frozenset": frozenset}[kind](map(from_json, parts))
    if kind == "dict" and isinstance(parts, list) and not more:
        pairs = [cast(tuple[Any, Any], from_json(part)) for part in parts]
        return dict(pairs)
    raise ValueError(f"{value!r} is no part of a config")


def _component(name: str) -> type[Any]:
    """A dataclass of this package by module and qualified name."""
    module, _, path = name.partition(":")
    try:
        if not module.startswith(HOMES):
            raise ImportError
        inside, path = present_name(module.removeprefix(f"{PACKAGE}."), path)
        module = f"{PACKAGE}.{inside}"
        found: object = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if not (isinstance(found, type) and is_dataclass(found) and found.__module__ == module):
            raise ImportError
    except (ImportError, AttributeError):
        raise ValueError(f"{name!r} is no component of this version of {PACKAGE}") from None
    return found


class StoredConfig:
    """The part of a flat config that writes it to a file and reads it back."""

    __slots__ = ()
    _given: dict[str, Any]
    _base: Any

    def to_json(self) -> dict[str, Json]:
        """The config for `json`: the names that were set, the facts that are not in the tree, and the tree that it was made from.

        Raises ValueError if the config would not be the same when it is read back.
        """
        cls: Any = type(self)
        names = table(cls)
        is_free = {name: row.is_fact and name not in names.remembered for name, row in names.rows.items()}
        facts = {name: getattr(self, name) for name in names.rows if is_free[name]}
        written: dict[str, Json] = {
            "format": FORMAT,
            "config_class": cls.__name__,
            **{name: to_json(value, name) for name, value in {**facts, **self._given}.items()},
            "tree": to_json(self._base),
        }
        again = cls.from_json(written)
        if differing := [name for name in vars(self) if not _equal(getattr(again, name), getattr(self, name))]:
            raise ValueError(f"this config would not come back from a file: {', '.join(differing)} would differ")
        return written

    @classmethod
    def from_json(cls: type[Own], written: dict[str, Json]) -> Own:
        """The config that `to_json` made. Raises ValueError for one of another class or a later format."""
        if not isinstance(written, dict):
            raise ValueError(f"the config must be an object with names, got a {type(written).__name__}")
        if written.get("format") != FORMAT:
            raise ValueError(f"the config has format {written.get('format')!r}; this version reads format {FORMAT}")
        name = written.get("config_class")
        kind: Any = next((each for each in (cls, *_subclasses(cls)) if each.__name__ == name), None)
        if kind is None:
            raise ValueError(f"the config is a {name}, not a {cls.__name__}: load it with {name}.load")
        values = {key: from_json(value) for key, value in written.items() if key not in ("format", "config_class")}
        if unknown := values.keys() - {f.name for f in fields(kind)}:
            raise ValueError(f"{name} has no {', '.join(sorted(unknown))}: was it written by a later version?")
        if (tree := values.pop("tree", None)) is not None and not is_dataclass(tree):
            raise ValueError(f"the tree of the config must be a component, got {tree!r}")
        made: Own = kind(**values) if tree is None else kind.from_tree(tree, **values)
        return made

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the config to a JSON file, from which `load` makes an equal one. The file appears whole or not at all.

        Raises ValueError for a component that is defined outside of this package, and OSError if the path is not writable.

        >>> import tempfile
        >>> from hooked_lm import HookedTransformerConfig
        >>> cfg = HookedTransformerConfig(
        ...     n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, act_fn="relu"
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cfg.save(f"{folder}/cfg.json")
        ...     HookedTransformerConfig.load(f"{folder}/cfg.json") == cfg
        True
        """
        text = json.dumps(self.to_json(), indent=1)
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls: type[Own], path: str | PathLike[str]) -> Own:
        """The config that `save` wrote. Raises ValueError for another file, and for a config of another class."""
        if Path(path).is_dir():
            raise IsADirectoryError(
                f"{path} is a folder: name a file that cfg.save wrote, or load the model and take its cfg"
            )
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            written = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a config that cfg.save wrote: {error}") from error
        if not isinstance(written, dict) or "config_class" not in written:
            raise ValueError(f"{path} is not a config that cfg.save wrote: it has no config_class")
        try:
            return cls.from_json(written)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(each for one in direct for each in _subclasses(one))]


def _in_order(value: list[Any] | set[Any] | frozenset[Any]) -> list[Any]:
    return value if isinstance(value, list) else sorted(value, key=repr)


def _equal(a: object, b: object) -> bool:
    """Whether two values are equal; NaN equals itself."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
