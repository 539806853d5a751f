"""Applies a change of flat names to a tree that has parts without flat names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from hooked_lm.components.attention.multihead import Attention

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Sizes of several parts of a tree, and those that every part has under the same name.
SIZES = ("d_model", "n_heads", "d_head", "d_mlp")
FOLLOWING = ("d_model", "n_heads", "eps")


@dataclass(frozen=True)
class Change:
    """The values of flat names before and after a change."""

    before: Mapping[str, object]
    after: Mapping[str, object]

    @cached_property
    def sizes(self) -> dict[str, object]:
        """The sizes that change, with the values before."""
        return {name: self.before[name] for name in SIZES if self.before.get(name) != self.after.get(name)}

    def followed(self, name: str, value: object) -> Any:
        """The value of a field `name` that flat names do not describe; fields of `FOLLOWING` in it follow."""
        if name in FOLLOWING and _same(value, self.before[name]):
            return self.after[name]
        if isinstance(value, tuple):
            return tuple(self.followed("", each) for each in value)
        if not _is_config(value):
            return value
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        parts = {name: self.followed(name, part) for name, part in own.items()}
        return value if all(parts[name] is own[name] for name in own) else replace(value, **parts)


def edited(tree: object, old: object, new: object, before: Mapping[str, object], after: Mapping[str, object]) -> Any:
    """Applies a change of flat names to `tree`: the values `before` and `after` it, and the trees built from them.

    Where `old` and `new` differ, `tree` is changed in the same way. In parts that flat names do not describe, fields of
    `FOLLOWING` follow, and all else is kept. Raises ValueError, with the path, if a changed part of `tree` differs from
    `old`, or if a part that is kept has a size that changes.

    >>> from hooked_lm.components.norms.norm import RMSNorm
    >>> small = {"d_model": 8, "n_heads": 2, "eps": 1e-05}
    >>> large = {"d_model": 8, "n_heads": 2, "eps": 0.1}
    >>> edited(
    ...     RMSNorm.Config(8, offset=1.0),
    ...     RMSNorm.Config(8),
    ...     RMSNorm.Config(8, eps=0.1),
    ...     small,
    ...     large,
    ... )
    RMSNorm.Config(d_model=8, eps=0.1, weight=True, offset=1.0, ...)
    """
    return _edited(_normalised(tree), old, new, "", Change(before, after))


def _edited(actual: object, old: object, new: object, place: str, change: Change) -> Any:
    if old is None and new is None:
        _check_sizes(actual, place, change.sizes)
    # nothing changed, or `tree` lacks the part
    if _same(old, new) or (actual is None and old is not None and new is not None):
        return change.followed("", actual)
    if _same(actual, old):
        return new
    if isinstance(actual, tuple) and isinstance(old, tuple) and isinstance(new, tuple):
        return _edited_layers(actual, old, new, place, change)
    if _is_config(actual) and _is_config(old) and _is_config(new) and type(old) in (type(actual), type(new)):
        # parts of other kinds may have some fields of the same names
        into = new if type(actual) is type(old) else actual
        parts = {field.name: getattr(into, field.name) for field in fields(into)}
        described = parts.keys() & {field.name for field in fields(old)} & {field.name for field in fields(new)}
        for name in parts:
            if name in described:
                parts[name] = _edited(
                    getattr(actual, name), getattr(old, name), getattr(new, name), f"{place}.{name}", change
                )
            elif into is actual:
                _check_sizes(parts[name], f"{place}.{name}", change.sizes)
                parts[name] = change.followed(name, parts[name])
        return type(into)(**parts)
    raise ValueError(f"the tree has {actual!r} at {place.lstrip('.')}, where flat names describe {old!r}")


def _is_config(part: object) -> "TypeGuard[DataclassInstance]":
    return is_dataclass(part) and not isinstance(part, type)


def _check_sizes(part: object, place: str, sizes: Mapping[str, object], name: str = "") -> None:
    """Raises ValueError if a part that flat names do not describe has one of the sizes that change."""
    if _is_config(part):
        for field in fields(part):
            _check_sizes(getattr(part, field.name), f"{place}.{field.name}", sizes, field.name)
    elif isinstance(part, tuple):
        for each in part:
            _check_sizes(each, place, sizes, name)
    elif type(part) is int and part in sizes.values() and name.startswith(("d_", "dim", "n_heads")):
        if name in FOLLOWING and sizes.get(name) == part:
            return
        raise ValueError(f"flat names do not describe {place.lstrip('.')}, which would keep {part}")


def _edited_layers(
    actual: tuple[Any, ...], old: tuple[Any, ...], new: tuple[Any, ...], place: str, change: Change
) -> tuple[Any, ...]:
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
    return tuple(_edited(*parts, f"{place}.{layer}", change) for layer, parts in enumerate(whole))


def _same(a: object, b: object) -> bool:
    """Whether two values or configs are equal; floats up to a relative difference of 1e-9."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    if type(a) is not type(b):
        return bool(a == b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if _is_config(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a == b)


def _normalised(part: object) -> Any:
    """The tree with the default scale of every attention filled in, and None for as many key and value heads as heads."""
    if isinstance(part, tuple):
        return tuple(_normalised(each) for each in part)
    if isinstance(part, Attention.Config):
        scale = part.d_head**-0.5 if part.scale is None else part.scale
        return replace(part, scale=scale, n_key_value_heads=None if part.n_kv == part.n_heads else part.n_kv)
    if not _is_config(part):
        return part
    return replace(part, **{field.name: _normalised(getattr(part, field.name)) for field in fields(part) if field.init})
