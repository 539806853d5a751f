"""The architectures, one short file per `model_type` of a checkpoint, named after it.

A family is data: `config(hf)` reads a checkpoint's config into the tree of our components, `rows(tree)` says which
tensor of theirs is which weight of ours. Optional: `PREFIX`, which a checkpoint of the base model leaves out of its
names; `IGNORED`, globs of tensors that hold no weights; `RENAMED`, regular expressions of old names and what these are now;
`NO_EFFECT`, fields that change nothing here; `PREPENDS_BOS`, False where text begins with BOS only if a call says so;
`MODEL_TYPE`, where that is no name of a file ("openai-gpt" is in `openai_gpt.py`).
"""

import pkgutil
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


def supported() -> list[str]:
    """The model types that can be loaded, as a checkpoint's config writes them."""
    return list(_files())


def model_class(model_type: str) -> str:
    """The name of the class that a family's checkpoints become, read off its file: nothing heavy is imported.

    >>> model_class("gpt2")
    'HookedTransformer'
    """
    kind = re.search(r"^def config\(.*?\) -> (\w+)Config:", _source(_files()[model_type]), re.MULTILINE | re.DOTALL)
    if kind is None:
        raise ValueError(f"the family {model_type!r} does not say what its config(hf) returns")
    return "HookedTransformer" if kind[1] == "Decoder" else f"Hooked{kind[1]}"


def family(model_type: str) -> ModuleType:
    """The file of a model type; raises ValueError, listing the supported ones, if there is none.

    >>> family("gpt2").PREFIX
    'transformer.'
    """
    if model_type not in _files():
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(supported())}. To hook a model "
            "as it is, by the names of its own modules, use hooked_lm.hooks.wrap(model)"
        )
    return import_module(f"{__name__}.{_files()[model_type]}")


@cache
def _files() -> dict[str, str]:
    """Model type -> name of its file."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    stated = {name: re.search(r'^MODEL_TYPE = "(.+)"$', _source(name), re.MULTILINE) for name in names}
    return {name if found is None else found[1]: name for name, found in stated.items()}


def _source(name: str) -> str:
    return Path(__path__[0], f"{name}.py").read_text(encoding="utf-8")
