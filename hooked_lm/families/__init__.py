"""The supported architectures: one file per `model_type`, in a folder per model class.

A family defines `config(hf)`, which translates a checkpoint's config into a tree of component configs, and `rows(tree)`,
which maps the checkpoint's tensors to parameters. `PREFIX` is the prefix that the tensor names of a base model (without
heads) lack. `IGNORED` holds globs of tensors that are not loaded. Optional: `RENAMED`, regular expressions of old tensor names
and their replacements; `NO_EFFECT`, globs of config fields that do not change the forward pass; `PREPENDS_BOS`, False if BOS is
prepended only on request; `fitted(tree, tensors)`, which corrects the tree according to the tensors; `text_names(hf)`, regular
expressions of tensor names that differ on text alone: their replacements, and None for a part that only images use; `JOINED`,
tensors that files have in parts, and the names of the parts.
"""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

# folder -> model class in `hooked_lm.pretrained`
CLASSES = {
    "decoders": "HookedTransformer",
    "encoders": "HookedEncoder",
    "encoder_decoders": "HookedEncoderDecoder",
}


def supported() -> list[str]:
    """The model types that can be loaded."""
    return list(_folders())


def model_class(model_type: str) -> str:
    """The name of the model class of a family, without importing torch or the family.

    >>> model_class("gpt2")
    'HookedTransformer'
    """
    return CLASSES[_folders()[model_type]]


def family(model_type: str) -> ModuleType:
    """The module of a model type. Raises ValueError, listing the supported types, for an unknown one.

    >>> family("gpt2").PREFIX
    'transformer.'
    """
    folder = _folders().get(model_type)
    if folder is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(supported())}. To hook a model "
            "by the names of its modules, without conversion, use hooked_lm.hooks.wrap(model)"
        )
    return import_module(f"{__name__}.{folder}.{model_type}")


@cache
def _folders() -> dict[str, str]:
    """Model type -> its folder."""
    here = Path(__path__[0])
    found = {module.name: folder for folder in CLASSES for module in pkgutil.iter_modules([str(here / folder)])}
    return dict(sorted(found.items()))
