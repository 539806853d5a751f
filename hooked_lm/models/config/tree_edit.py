"""Applies a change of flat names to a tree that has parts without flat names."""

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention


def edited(tree: Any, old: Any, new: Any) -> Any:
    """Applies the differences between `old` and `new` to `tree`.

    `old` and `new` are the trees built from its flat names before and after a change. Other parts of `tree`, such as offsets
    and blocks without flat names, are kept. Raises ValueError, with the path, if a changed part of `tree` differs from `old`.

    >>> from hooked_lm.components.norm import RMSNorm
    >>> edited(RMSNorm.Config(8, offset=1.0), RMSNorm.Config(8), RMSNorm.Config(8, eps=0.1))
    RMSNorm.Config(d_model=8, eps=0.1, weight=True, offset=1.0, ...)
    """
    return _edited(_with_scales(tree), old, new, "")


def _edited(actual: Any, old: Any, new: Any, place: str) -> Any:
    # nothing changed, or `tree` lacks the part
    if _same(old, new) or (actual is None and old is not None and new is not None):
        return actual
    if _same(actual, old):
        return new
    if isinstance(actual, tuple) and isinstance(old, tuple) and isinstance(new, tuple):
        return _edited_layers(actual, old, new, place)
    if type(actual) is type(old) and is_dataclass(actual) and is_dataclass(new) and not isinstance(new, type):
        parts = {field.name: getattr(new, field.name) for field in fields(new)}
        for name in parts.keys() & {field.name for field in fields(old)}:
            parts[name] = _edited(getattr(actual, name), getattr(old, name), parts[name], f"{place}.{name}")
        return type(new)(**parts)
    raise ValueError(f"the tree has {actual!r} at {place.lstrip('.')}, where its flat names say {old!r}")


def _edited_layers(actual: tuple[Any, ...], old: tuple[Any, ...], new: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    """Edits layer by layer. Added layers are copies of the others. Raises ValueError if these are not all equal."""
    beyond = len(new) - len(old)
    if beyond > 0 and any(layers.count(layers[0]) != len(layers) for layers in (actual, old) if layers):
        raise ValueError(
            f"the tree's {len(old)} layers differ from each other, so flat names do not say what further layers would be"
        )
    if beyond > 0 and not old:
        return new
    actual, old = actual + actual[:1] * beyond, old + old[:1] * beyond
    whole = zip(actual, old, new, strict=False)  # if `new` has fewer layers, the first ones are kept
    return tuple(_edited(*parts, f"{place}.{layer}") for layer, parts in enumerate(whole))


def _same(a: Any, b: Any) -> bool:
    """Whether two values or configs are equal; floats up to a relative difference of 1e-9."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    if type(a) is not type(b):
        return bool(a == b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a == b)


def _with_scales(part: Any) -> Any:
    """The tree with the default scale of every attention filled in."""
    if isinstance(part, tuple):
        return tuple(_with_scales(each) for each in part)
    if isinstance(part, Attention.Config) and part.scale is None:
        return replace(part, scale=part.d_head**-0.5)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(
        part, **{field.name: _with_scales(getattr(part, field.name)) for field in fields(part) if field.init}
    )
