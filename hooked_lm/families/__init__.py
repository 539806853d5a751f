"""The architectures, one short file per `model_type` of a checkpoint, named after it.

A family is data: `config(hf)` reads a checkpoint's config into the tree of our components, `rows(tree)` says which
tensor of theirs is which weight of ours. Optional: `PREFIX`, which a checkpoint of the base model leaves out of its
names; `IGNORED`, globs of tensors that hold no weights; `NO_EFFECT`, fields that change nothing here.
"""

import pkgutil
from importlib import import_module
from types import ModuleType


def supported() -> list[str]:
    """The model types that can be loaded."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def family(model_type: str) -> ModuleType:
    """The file of a model type; raises ValueError, listing the supported ones, if there is none.

    >>> family("gpt2").PREFIX
    'transformer.'
    """
    name = model_type.replace("-", "_")
    if name not in supported():
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(supported())}. To hook a model "
            "as it is, by the names of its own modules, use hooked_lm.hooks.wrap(model)"
        )
    return import_module(f"{__name__}.{name}")
