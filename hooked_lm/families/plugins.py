"""Families of other packages: entry points of the group `hooked_lm.families`, each a model type and the module of its family.

The module has what one of ours has, and `MODEL_CLASS` if its models are of another class than `HookedTransformer`. It is
imported when its model type is asked for, or listed. A model type that we have ourselves stays ours.
"""

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

GROUP = "hooked_lm.families"
DEFAULT = "HookedTransformer"
NEEDS = {"config": "function", "rows": "function", "PREFIX": "str", "IGNORED": "tuple"}


def model_types() -> set[str]:
    """The model types of which other packages say that they have a family, working or not.

    >>> "gpt2" in model_types()
    False
    """
    return {entry.name for entry in entry_points(group=GROUP)}


def plugin(model_type: str, classes: Collection[str]) -> ModuleType | None:
    """The module of a family of another package, whose model class is one of `classes`; None if no package has one.

    Raises ValueError, naming the package, for a family that cannot be imported or is incomplete, and if several packages have
    one of that name.

    >>> plugin("gpt2", ["HookedTransformer"]) is None
    True
    """
    entries = list(entry_points(group=GROUP, name=model_type))
    if not entries:
        return None
    if len(entries) > 1:
        raise ValueError(
            f"several packages have a family {model_type!r}: {', '.join(map(package, entries))}; uninstall all but one"
        )
    return _imported(entries[0], classes)


def model_class(module: ModuleType) -> str:
    """The name of the model class of a family of another package.

    >>> import types
    >>> model_class(types.ModuleType("their_family"))
    'HookedTransformer'
    """
    return getattr(module, "MODEL_CLASS", DEFAULT)


def listed(ours: Collection[str], classes: Collection[str]) -> list[tuple[str, str, str, str | None]]:
    """The model type, the package and the model class of each family of another package, and why it cannot be used, or None.

    >>> listed(["gpt2"], ["HookedTransformer"])
    []
    """
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, package(entry))):
        name, problem = (
            "",
            f"hooked_lm has a family {entry.name!r} itself, which is used" if entry.name in ours else None,
        )
        try:
            module = None if problem else plugin(entry.name, classes)
            name = "" if module is None else model_class(module)
        except ValueError as error:
            problem = str(error)
        found.append((entry.name, package(entry), name, problem))
    return found


def package(entry: EntryPoint) -> str:
    """The package that an entry point is of, with its version, and the module that it names."""
    dist = entry.dist
    return entry.value if dist is None else f"{dist.name} {dist.version} ({entry.value})"


def _imported(entry: EntryPoint, classes: Collection[str]) -> ModuleType:
    of = f"the family {entry.name!r} of {package(entry)}"
    try:
        module = entry.load()
    except Exception as error:  # whatever code of others raises
        raise ValueError(f"{of} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(module, ModuleType):
        raise ValueError(f"{of} must be a module, got a {type(module).__name__}")
    if lacking := [
        f"{name} (a {kind})" for name, kind in NEEDS.items() if type(getattr(module, name, None)).__name__ != kind
    ]:
        raise ValueError(f"{of} lacks {', '.join(lacking)}: docs/new-architecture.md says what a family has")
    if model_class(module) not in classes:
        raise ValueError(f"{of} has MODEL_CLASS={model_class(module)!r}; it must be one of {', '.join(classes)}")
    return module
