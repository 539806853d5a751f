"""The pages of the API reference: one for each public module, with every name in its `__all__`."""

import inspect
import re
from functools import cache
from importlib import import_module
from typing import Any

import griffe

GROUPS = {
    "Models": ["hooked_lm", "hooked_lm.hooks", "hooked_lm.pretrained", "hooked_lm.hub", "hooked_lm.weights"],
    "Experiments": [
        "hooked_lm.patching",
        "hooked_lm.analysis",
        "hooked_lm.analysis.metrics",
        "hooked_lm.analysis.circuits",
        "hooked_lm.analysis.rankings",
        "hooked_lm.interventions",
        "hooked_lm.interventions.dictionaries",
        "hooked_lm.reports.circuit",
        "hooked_lm.planted",
        "hooked_lm.planted.rasp",
    ],
    "Data": ["hooked_lm.results", "hooked_lm.harvest", "hooked_lm.studies", "hooked_lm.shards", "hooked_lm.parallel"],
    "Tools": [
        "hooked_lm.viz",
        "hooked_lm.utils",
        "hooked_lm.compat",
        "hooked_lm.demo.corpus",
        "hooked_lm.demo.tasks",
        "hooked_lm.demo.shapes",
        "hooked_lm.demo.experiment",
    ],
}
MODULES = [module for group in GROUPS.values() for module in group]
PROMPTED = re.compile(r"(?:^[ \t]*>>> .*\n?)(?:^[ \t]*\S.*\n?)*", flags=re.M)


@cache
def source() -> Any:
    """The package as griffe reads it, without running it."""
    return griffe.load("hooked_lm", resolve_aliases=True, extensions=griffe.load_extensions(Examples))


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`; without one, the functions and classes that the module defines."""
    found = import_module(module)
    if hasattr(found, "__all__"):
        return [name for name in found.__all__ if not name.startswith("__")]
    own = {name: value for name, value in vars(found).items() if getattr(value, "__module__", "") == module}
    return [name for name in own if not name.startswith("_")]


def is_module(module: str, name: str) -> bool:
    """Whether a public name of a module is itself a module, which has a page of its own."""
    return f"{module}.{name}" in MODULES or hasattr(getattr(import_module(module), name), "__path__")


def described(module: str, name: str) -> Any:
    """A public name as griffe describes it; where a submodule has the same name, by the place where it is defined."""
    found = source()[f"{module}.{name}".removeprefix("hooked_lm.")]
    if found.is_module:
        value = getattr(import_module(module), name)
        found = source()[f"{value.__module__}.{value.__qualname__}".removeprefix("hooked_lm.")]
    return found.final_target if found.is_alias else found


def address(module: str, name: str) -> str:
    """The path under which a public name is on its page."""
    shadowed = source()[f"{module}.{name}".removeprefix("hooked_lm.")].is_module
    return described(module, name).canonical_path if shadowed else f"{module}.{name}"


def undocumented() -> list[str]:
    """The public names without a docstring."""
    names = [(module, name) for module in MODULES for name in public_names(module) if not is_module(module, name)]
    return [f"{module}.{name}" for module, name in names if not described(module, name).has_docstring]


@cache
def made_functions() -> dict[str, str]:
    """Public functions that a call makes, whose docstrings can be read only at run time: name -> signature and docstring."""
    found = {}
    for module in MODULES:
        for name in public_names(module):
            value = getattr(import_module(module), name)
            if inspect.isfunction(value) and value.__doc__ and value.__code__.co_name != name:
                found[name] = f"`{name}{inspect.signature(value)}`\n\n{inspect.getdoc(value)}"
    return found


@cache
def homes() -> dict[str, str]:
    """The canonical path of each public object -> the page's name for it, `module.name`, of the first module that has it."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name in public_names(module):
            if not is_module(module, name):
                found.setdefault(described(module, name).canonical_path, address(module, name))
    return found


def page(module: str) -> str:
    """The Markdown of a module's page."""
    found = import_module(module)
    lines = [f"# `{module}`", "", found.__doc__ or "", ""]
    elsewhere = []
    for name in sorted(public_names(module), key=str.lower):
        path = f"{module}.{name}"
        if is_module(module, name):
            elsewhere.append(f"[`{path}`]({path}.md)" if path in MODULES else f"`{path}`")
            continue
        home = homes()[described(module, name).canonical_path]
        if home != address(module, name):
            elsewhere.append(f"[`{path}`][{home}]")
        else:
            lines += [f"::: {home}", ""]
    if elsewhere:
        lines += ["## Names with another page", "", ", ".join(elsewhere), ""]
    return "\n".join(lines)


class Examples(griffe.Extension):
    """Puts the examples of docstrings, which begin with `>>>`, into code blocks."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, or sets it if the object is made by a call."""
        made = obj.is_attribute and not obj.has_docstring and obj.name in made_functions()
        if made:
            obj.docstring = griffe.Docstring(made_functions()[obj.name], parent=obj)
        if obj.docstring and ">>>" in obj.docstring.value:
            text = PROMPTED.sub(lambda found: f"```pycon\n{found.group().rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
