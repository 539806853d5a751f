"""The architectures: one short file per `model_type`, named after it, in the folder of the class that its checkpoints become.

A family is data: `config(hf)` translates a checkpoint's config into a config tree of our components, and `rows(tree)` lists
the tensor of the checkpoint for each of our weights. `PREFIX` is what the tensor names of a base model lack. `IGNORED` are
globs of tensors that hold no weights. Optional: `RENAMED`, regular expressions of old names and their replacements;
`NO_EFFECT`, globs of fields that change nothing here; `PREPENDS_BOS`, False where text begins with BOS only on request;
`fitted(tree, tensors)`, the tree where the tensors have the last word.
"""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

# folder -> the class in `hooked_lm.pretrained` that the checkpoints become
CLASSES = {
    "decoders": "HookedTransformer",
    "encoders": "HookedEncoder",
    "encoder_decoders": "HookedEncoderDecoder",
}


def supported() -> list[str]:
    """The model types that can be loaded."""
    return list(_folders())


def model_class(model_type: str) -> str:
    """The name of the class that a family's checkpoints become; this imports neither torch nor the family.

    >>> model_class("gpt2")
    'HookedTransformer'
    """
    return CLASSES[_folders()[model_type]]


def family(model_type: str) -> ModuleType:
    """The file of a model type. Raises ValueError, which lists the supported ones, if there is none.

    >>> family("gpt2").PREFIX
    'transformer.'
    """
    folder = _folders().get(model_type)
    if folder is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(supported())}. To hook a model "
            "as it is, by the names of its own modules, use hooked_lm.hooks.wrap(model)"
        )
    return import_module(f"{__name__}.{folder}.{model_type}")


@cache
def _folders() -> dict[str, str]:
    """Model type -> its folder."""
    here = Path(__path__[0])
    found = {module.name: folder for folder in CLASSES for module in pkgutil.iter_modules([str(here / folder)])}
    return dict(sorted(found.items()))
