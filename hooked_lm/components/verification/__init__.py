"""Identities between the sites of each component, and its weights that read and write the stream.

One file for each mechanism. When a function of this package is first asked for, they are imported, and register themselves.
Those of a family's own mechanisms are in its package, which imports them.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooked_lm.components.verification.registry import identities as identities
    from hooked_lm.components.verification.registry import input_weights as input_weights
    from hooked_lm.components.verification.registry import is_known as is_known
    from hooked_lm.components.verification.registry import output_from_sites as output_from_sites
    from hooked_lm.components.verification.registry import output_weights as output_weights
    from hooked_lm.components.verification.registry import weights_after_norms as weights_after_norms

__all__ = [
    "identities",
    "input_weights",
    "is_known",
    "output_from_sites",
    "output_weights",
    "weights_after_norms",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {file.name: import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)}
    globals().update({function: getattr(modules["registry"], function) for function in __all__})
    return globals()[name]
