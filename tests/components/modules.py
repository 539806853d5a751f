"""All modules that define components: those of the package, and those of families."""

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from hooked_lm import components, families


@cache
def modules() -> list[ModuleType]:
    """Each of them, imported."""
    packages = [*pkgutil.walk_packages(components.__path__, f"{components.__name__}.")]
    packages += pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
    return [import_module(module.name) for module in packages]
