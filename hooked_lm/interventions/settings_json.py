"""Settings of hook objects as JSON and tensors, and checks of settings from a file."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, SupportsIndex, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

DEEPEST = 20  # nested lists


def as_json(value: object, key: str, tensors: dict[str, Tensor]) -> Any:
    """A setting as JSON; tensors are added to `tensors`. Raises ValueError for types that cannot be serialised."""
    if isinstance(value, Tensor):
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"mapping": {name: as_json(part, f"{key}.{name}", tensors) for name, part in value.items()}}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, (tuple, list)):
        parts = [as_json(part, f"{key}.{i}", tensors) for i, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if not isinstance(value, (str, int, float, type(None))):
        what = key.replace(".", ": its ", 1)
        raise ValueError(f"hook object {what} is a {type(value).__name__}, which a file cannot hold")
    return value


def from_json(value: object, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The setting from the output of `as_json`; ValueError for anything else."""
    if depth > DEEPEST:
        raise ValueError(f"a setting is nested more than {DEEPEST} deep")
    if isinstance(value, list):
        return [from_json(part, tensors, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items())) if len(value) == 1 else (None, None)
    if kind == "tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if kind == "slice" and isinstance(content, list) and len(content) == 3:
        return slice(*content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(from_json(part, tensors, depth + 1) for part in content)
    if kind == "mapping" and isinstance(content, dict):
        return {name: from_json(part, tensors, depth + 1) for name, part in content.items()}
    raise ValueError(f"{repr(value)[:80]} is no setting, nor a tensor of this file")


def check_types(kind: type, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that a class does not have, and for values of the wrong type."""
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError):  # a user's class whose annotations cannot be evaluated
        hints = {}
    known = [of.name for of in fields(kind) if of.init]
    for name, value in settings.items():
        if name.partition(".")[0] not in known:
            raise ValueError(f"{kind.__name__} has no setting {name!r}; it has {', '.join(known)}")
        if name in known and not fits(value, hints.get(name, Any)):
            raise ValueError(f"{name} of {kind.__name__} is {repr(value)[:80]}, which it does not take")


def fits(value: object, hint: Any) -> bool:
    """Whether a JSON value or tensor matches a type hint; unsupported hints match everything.

    >>> fits(3, float | int | None), fits("3", float | int), fits([1, "a"], list[int])
    (True, False, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Callable):  # type: ignore[arg-type]
        return callable(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(one, parts[1]) for one in value.values())
    if origin is tuple and ... not in parts:
        return isinstance(value, (list, tuple)) and len(value) == len(parts) and all(map(fits, value, parts))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, (list, tuple)) and all(fits(one, parts[0]) for one in value)
    if origin is not None:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (int, SupportsIndex):
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None or hint in (str, bool, slice, type(None)):
        return value is None if hint is None else isinstance(value, hint)
    if isinstance(hint, type) and issubclass(hint, (Tensor, Path, np.ndarray, torch.dtype, torch.device)):
        return isinstance(value, hint)
    if hint is Any or not isinstance(hint, type):
        return True
    return isinstance(value, hint)
