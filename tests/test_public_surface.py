"""The public surface is frozen: `public_surface.txt` lists every public name with its signature.

A change of it is deliberate: `python -m tests.test_public_surface` writes the file anew, and its diff says what users see.
"""

import difflib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import hooked_lm
from hooked_lm import engine, patching
from hooked_lm.engine.experiment import Experiment
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.decoder_methods import DecoderMethods

FILE = Path(__file__).with_name("public_surface.txt")
REWRITE = "if this is meant, `python -m tests.test_public_surface` writes tests/public_surface.txt anew"


class _Named(str):
    """A function that is a default, shown without its address."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, default: object) -> object:
        return cls(default.__name__) if isinstance(default, FunctionType) else default


def called(function: Callable[..., object]) -> str:
    """The arguments of a function with their defaults; of types, a checker says more than a text."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin
        return "(...)"
    bare = [
        each.replace(annotation=each.empty, default=_Named.of(each.default)) for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def described(name: str, value: object) -> str:
    """A line of a public name: a function with its arguments, a class with those of its construction."""
    if isinstance(value, (classmethod, staticmethod)):
        return f"{name}{called(value.__func__)}, a {type(value).__name__}"
    if inspect.isclass(value) and value.__name__ != name:
        return f"{name} = {value.__name__}"
    if inspect.isclass(value):
        return f"class {name}" if issubclass(value, BaseException) else f"class {name}{called(value)}"
    return f"{name}{called(value)}" if isinstance(value, FunctionType) else name


def members(kind: type, module: str = "hooked_lm") -> dict[str, str]:
    """The public methods, properties and attributes that a class has from this package, or a module of it, as lines."""
    return {
        name: described(name, value)
        for base in reversed(kind.__mro__)
        if base.__module__.startswith(module)
        for name, value in vars(base).items()
        if not name.startswith("_")
    }


def sections() -> Iterator[tuple[str, list[str]]]:
    """Headings with the lines below them: the package, its public modules, the classes of models, the engine."""
    yield "hooked_lm", [described(name, getattr(hooked_lm, name)) for name in hooked_lm.__all__]
    modules = [value for name in hooked_lm.__all__ if isinstance(value := getattr(hooked_lm, name), ModuleType)]
    for module in modules:
        yield module.__name__, [described(name, getattr(module, name)) for name in sorted(module.__all__)]
    public = [value for name in hooked_lm.__all__ if inspect.isclass(value := getattr(hooked_lm, name))]
    models = {kind.__name__: kind for kind in public if issubclass(kind, HookedRootModule)}
    of_all = set.intersection(*({*members(kind).items()} for kind in models.values()))
    yield "every hooked model", [line for _, line in of_all]
    for name, kind in models.items():
        yield f"class {name}", [line for item in members(kind).items() if item not in of_all for line in item[1:]]
    for found in pkgutil.iter_modules(engine.__path__, "hooked_lm.engine."):
        yield found.name, list(_of_engine(import_module(found.name)))


def _of_engine(module: ModuleType) -> Iterator[str]:
    """The public functions and classes that a module of the engine defines."""
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and callable(value):
            yield described(name, value)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                yield from (f"{name}.{line}" for line in members(value, module.__name__).values())


def surface() -> str:
    """The whole surface as a text."""
    wrapped = (
        (heading, [textwrap.fill(line, 120, subsequent_indent="    ") for line in sorted(lines)])
        for heading, lines in sections()
    )
    return "\n".join("\n".join([f"# {heading}", *lines, ""]) for heading, lines in wrapped)


def difference(frozen: str, found: str) -> str:
    """The lines that went and came, each below its heading; empty if there are none."""
    lines = difflib.unified_diff(frozen.splitlines(), found.splitlines(), "frozen", "found", lineterm="", n=1)
    return "\n".join(lines)


def test_the_public_surface_is_the_frozen_one() -> None:
    changed = difference(FILE.read_text(encoding="utf-8"), surface())
    assert not changed, f"the public surface has changed:\n{changed}\n{REWRITE}"


@pytest.mark.parametrize(
    ("owner", "name", "line"),
    [
        (patching, "sweep", "sweep(model, corrupted, clean=None, *, metric=None,"),
        (DecoderMethods, "compiled", "compiled(self, taps=None, edits=None, backend='auto')"),
        (Experiment, "run", "Experiment.run(self, cells, title='patching', progress=None)"),
    ],
    ids=["a function", "a method of models", "a method of the engine"],
)
def test_another_signature_is_shown(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, line: str) -> None:
    monkeypatch.setattr(owner, name, lambda this, that: None)
    changed = difference(FILE.read_text(encoding="utf-8"), surface()).splitlines()
    assert any(each.startswith(f"-{line}") for each in changed)
    assert any(each.startswith("+") and each.endswith(f"{name}(this, that)") for each in changed)


if __name__ == "__main__":
    text = surface()
    print(difference(FILE.read_text(encoding="utf-8") if FILE.exists() else "", text))
    FILE.write_text(text, encoding="utf-8")
