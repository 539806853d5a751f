"""Finds what a program uses of the library and what does not exist, without running it.

Imports are followed, then attributes and the arguments of calls, as far as classes and return annotations say what a value is.
"""

import ast
import functools
import importlib
import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

LIBRARY = "hooked_lm"


@dataclass(frozen=True)
class Instance:
    """A value of a class of the library."""

    of: type


class Names(ast.NodeVisitor):
    """Visits a program; methods return what is known of an expression: an object, an `Instance`, a list of these, or None."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.problems: list[str] = []
        self.n_checked = 0

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            if _is_ours(name.name):
                module = self._imported(name.name)
                self.known[name.asname or LIBRARY] = module if name.asname else importlib.import_module(LIBRARY)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _is_ours(node.module or ""):
            module = self._imported(node.module or "")
            for name in node.names:
                known = getattr(module, name.name, None) or self._imported(f"{node.module}.{name.name}")
                self.known[name.asname or name.name] = known

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.known
        hidden = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        self.known = {name: value for name, value in outside.items() if name not in hidden}
        self.generic_visit(node)
        self.known = {name: value for name, value in outside.items() if name != node.name}

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self._assign(target, value)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Store):  # by a loop, whose elements nobody knows
            self.known.pop(node.id, None)
        return self.known.get(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._member(self.visit(node.value), node.attr)

    def visit_Call(self, node: ast.Call) -> Any:
        called = self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if not callable(called):
            return None
        if not any(isinstance(argument, ast.Starred) for argument in node.args):
            self._bind(called, len(node.args), [keyword.arg for keyword in node.keywords])
        return Instance(called) if inspect.isclass(called) else _returned(called)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = value
        elif isinstance(target, ast.Tuple):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else [None] * len(target.elts)
            for part, found in zip(target.elts, parts, strict=True):
                self._assign(part, found)
        else:
            self.visit(target)

    def _imported(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self.problems.append(str(error))
            return None

    def _member(self, owner: Any, name: str) -> Any:
        """What is known of an attribute of a module, a class or an instance."""
        if owner is None or isinstance(owner, list) or inspect.isroutine(owner):
            return None
        self.n_checked += 1
        if not isinstance(owner, Instance):
            if not hasattr(owner, name):
                self.problems.append(f"{owner.__name__}.{name}")
            return getattr(owner, name, None)
        if hasattr(owner.of, name):
            return _of_instance(owner, name)
        if name not in _attributes(owner.of):
            self.problems.append(f"{owner.of.__name__}().{name}")
        return None

    def _bind(self, called: Any, n_positional: int, keywords: list[str | None]) -> None:
        try:
            signature = inspect.signature(called)
        except ValueError:  # a class that is written in C
            return
        named = dict.fromkeys(name for name in keywords if name)
        bind = signature.bind if len(named) == len(keywords) else signature.bind_partial  # with `**options`
        try:
            bind(*[None] * n_positional, **named)
        except TypeError as error:
            self.problems.append(f"{called.__qualname__}: {error}")


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == LIBRARY


@functools.cache
def _attributes(of: type) -> frozenset[str]:
    """Names that instances of a class may have besides those of the class: annotated ones, and those that its methods mention."""
    found: set[str] = set()
    for base in (base for base in of.__mro__ if _is_ours(base.__module__)):
        found |= inspect.get_annotations(base).keys()
        for method in filter(inspect.isfunction, vars(base).values()):
            found.update(inspect.unwrap(method).__code__.co_names)
    return frozenset(found)


def _of_instance(owner: Instance, name: str) -> Any:
    found = inspect.getattr_static(owner.of, name)
    if isinstance(found, property):
        return _returned(types.MethodType(found.fget, owner)) if found.fget else None
    if isinstance(found, classmethod | staticmethod):
        return getattr(owner.of, name)
    return types.MethodType(found, owner) if inspect.isfunction(found) else None


def _returned(function: Any) -> Any:
    """What a function returns, as far as its annotation names classes of the library."""
    try:
        annotation = typing.get_type_hints(function).get("return")
    except (AttributeError, NameError, TypeError):  # names that are imported for type checkers alone
        return None
    if typing.get_origin(annotation) is tuple:
        return [_instance(part, function) for part in typing.get_args(annotation)]
    return _instance(annotation, function)


def _instance(annotation: Any, function: Any) -> Instance | None:
    owner = getattr(function, "__self__", None)
    if isinstance(annotation, typing.TypeVar) or getattr(annotation, "__name__", "") == "Self":
        annotation = owner.of if isinstance(owner, Instance) else owner
    ours = inspect.isclass(annotation) and _is_ours(annotation.__module__)
    return Instance(annotation) if ours else None
