"""Checks every annotated call of a package: types by beartype, shapes by jaxtyping.

Beartype alone checks what has no shapes in its annotations, and the rest within a table of sizes: jaxtyping's own decorator
would check each argument twice, and bind it in Python besides. It lies beside `conftest.py`, which needs it before it can import
anything of `tests`.
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

with_shapes = jaxtyping.jaxtyped
# a float may be an int (PEP 484), as for type checkers
by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError, is_pep484_tower=True))
inner: dict[CodeType, tuple[dict[str, Any], Any]] = {}  # annotations and checks of functions in functions


def check_annotations_of(package: str) -> None:
    """From now on modules of the package are imported with checks: to be called before its first import."""
    jaxtyping.jaxtyped = checked
    jaxtyping.install_import_hook(package, "beartype.beartype")


def checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(made: Any) -> Any:
        if is_dataclass(made) and "__init__" in vars(made):
            made.__init__ = in_a_table_of_sizes(made.__init__)
            return made
        if not inspect.isfunction(made) or inspect.isgeneratorfunction(made):
            return with_shapes(made, typechecker=typechecker)
        kinds = made.__annotations__.values()
        if not kinds or (jaxtyping.config.jaxtyping_disable and "<locals>" in made.__qualname__):
            return made
        if any(isinstance(kind, str) or "jaxtyping" in repr(kind) or "ForwardRef" in repr(kind) for kind in kinds):
            return in_a_table_of_sizes(made)
        return strict(made)

    return decorate


def in_a_table_of_sizes(made: Any) -> Any:
    """The function, whose calls are checked: the name of an axis has one size in all arguments and in what is returned."""
    checks, table, config = strict(made), with_shapes("context"), jaxtyping.config

    def call(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return made(*args, **kwargs)
        with table:
            return checks(*args, **kwargs)

    # fingerprints see through the wrappers of jaxtyping
    return wraps(made)(FunctionType(call.__code__, {"__name__": "jaxtyping"}, made.__name__, None, call.__closure__))


def strict(made: Any) -> Any:
    """The function with beartype's checks. A function in a function is made anew in each call, but its checks only once."""
    if "<locals>" not in made.__qualname__:
        return by_beartype(without_quotes(made, made.__closure__))
    kinds, checks = inner.get(made.__code__, (None, None))
    if kinds != made.__annotations__:
        checks = by_beartype(without_quotes(made, tuple(CellType() for _ in made.__closure__ or ())))
        inner[made.__code__] = made.__annotations__, checks
    fixed = {name: made if x is checks.__wrapped__ else x for name, x in (checks.__kwdefaults__ or {}).items()}
    if made not in fixed.values():  # there is nothing to check
        return made
    again = FunctionType(checks.__code__, checks.__globals__, made.__name__)
    again.__kwdefaults__ = fixed
    return wraps(made)(again)


def without_quotes(made: Any, closure: tuple[CellType, ...] | None) -> FunctionType:
    """A copy of the function, in whose annotations names in quotes are the types; or anything, if they are for type checkers."""
    copy = FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = made.__kwdefaults__, made.__qualname__
    copy.__annotations__ = {name: resolved(kind, made.__globals__) for name, kind in made.__annotations__.items()}
    return copy


def resolved(kind: Any, names: dict[str, Any]) -> Any:
    """The type that an annotation means."""
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"kind": kind}), names, include_extras=True)["kind"]
    except NameError:
        return Any
