"""Attributes by dotted names, values that may be left at a default, and what a function or a machine knows."""

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
    """What a dotted name leads to: "cfg.n_layers" gives `obj.cfg.n_layers`."""
    return attrgetter(attr_str)(obj)


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Set what a dotted name leads to."""
    owner, _, name = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, owner) if owner else obj, name, value)


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """`override`, or the default if that is None."""
    return default_flag if override is None else override


def select_compatible_kwargs(kwargs_dict: dict[str, Any], callable: Callable[..., Any]) -> dict[str, Any]:
    """Those arguments that a function takes by name.

    >>> select_compatible_kwargs({"end": "", "colour": "red"}, print)
    {'end': ''}
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {name for name, what in inspect.signature(callable).parameters.items() if what.kind in named}
    return {name: value for name, value in kwargs_dict.items() if name in taken}


def is_library_available(name: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    return name in sys.modules or find_spec(name) is not None
