"""A wrong keyword argument is answered with the right one: by each public function, constructor and method."""

from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import Parameter, isclass, isfunction, signature
from types import ModuleType

import pytest

import hooked_lm
from hooked_lm import analysis
from hooked_lm.keywords import BY_NAME

MODULES = [value for name in hooked_lm.__all__ if isinstance(value := getattr(hooked_lm, name), ModuleType)]
MODULES += [import_module(f"hooked_lm.{name}") for name in ("analysis.circuits", "interventions.dictionaries")]
MODULES += [hooked_lm, analysis.metrics]


def public_callables(module: ModuleType) -> Iterator[tuple[str, Callable[..., object], int]]:
    """The functions of a module, and the constructors and methods of its classes, with how many arguments are bound."""
    for name in module.__all__:
        value = getattr(module, name)
        if isfunction(value):
            yield name, value, 0
        elif isclass(value) and value.__module__.startswith("hooked_lm") and not issubclass(value, BaseException):
            for base in value.__mro__:
                if base.__module__.startswith("hooked_lm"):
                    yield from (
                        (
                            f"{name}.{key}",
                            getattr(member, "__func__", member),
                            int(not isinstance(member, staticmethod)),
                        )
                        for key, member in list(vars(base).items())
                        if isfunction(getattr(member, "__func__", member)) and (key == "__init__" or key[0] != "_")
                    )


def misspelt(name: str) -> Iterator[str]:
    """In the singular or else in the plural, and without a letter in the middle."""
    yield name.removesuffix("s") if name.endswith("s") else f"{name}s"
    if len(name) > 4:
        yield name[: len(name) // 2] + name[len(name) // 2 + 1 :]


def without_answer(name: str, function: Callable[..., object], n_bound: int) -> Iterator[str]:
    """The misspelt keywords which are not answered with the name that is meant."""
    parameters = list(signature(function).parameters.values())[n_bound:]
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return  # which takes any name, and checks it itself, or passes it on
    if vars(function).get("_answers") is False:  # at each site
        return
    known = {each.name for each in parameters if each.kind in BY_NAME}
    for meant in known:
        for wrong in {*misspelt(meant)} - known:
            try:
                function(*[None] * n_bound, **{wrong: None})
                found = "no error"
            except TypeError as error:
                found = str(error)
            if f"has no argument '{wrong}'; did you mean" not in found or f"'{meant}'" not in found:
                yield f"{name}({wrong}=): {found}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.every_parameter
def test_a_misspelt_keyword_is_answered_by_everything_public(module: ModuleType) -> None:
    assert not [line for each in public_callables(module) for line in without_answer(*each)]
