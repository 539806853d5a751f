"""Attributes by dotted names, default values, supported keywords, installed packages."""

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

__all__ = [
    "get_nested_attr", "is_library_available", "override_or_use_default_value", "select_compatible_kwargs",
    "set_nested_attr",
]  # fmt: skip


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """The attribute of a dotted name: "cfg.n_layers" is `obj.cfg.n_layers`."""
    return attrgetter(attr_str)(obj)


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Sets the attribute of a dotted name."""
    owner, _, name = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, owner) if owner else obj, name, value)


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """`override`, or the default if that is None."""
    return default_flag if override is None else override


def select_compatible_kwargs(kwargs_dict: dict[str, Any], callable: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a function accepts by keyword.

    >>> select_compatible_kwargs({"end": "", "colour": "red"}, print)
    {'end': ''}
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {name for name, what in inspect.signature(callable).parameters.items() if what.kind in named}
    return {name: value for name, value in kwargs_dict.items() if name in taken}


def is_library_available(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return name in sys.modules or find_spec(name) is not None
