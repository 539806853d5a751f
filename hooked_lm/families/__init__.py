"""The supported architectures: one file per `model_type`, in a folder per model class; a package for a family with mechanisms
that no other has.

A family defines `config(hf)`, which translates a checkpoint's config into a tree of component configs, and `rows(tree)`,
which maps the checkpoint's tensors to parameters. `PREFIX` is the prefix that the tensor names of a base model (without
heads) lack. `IGNORED` holds globs of tensors that are not loaded. Optional: `RENAMED`, regular expressions of old tensor names
and their replacements; `NO_EFFECT`, globs of config fields that do not change the forward pass; `PREPENDS_BOS`, False if BOS is
prepended only on request; `adjusted_to_tensors(tree, tensors)`, which corrects the tree according to the tensors;
`text_names(hf)`, regular expressions of tensor names that differ on text alone: their replacements, and None for a part that only
images use; `JOINED`, tensors that files have in parts, and the names of the parts; `cuts(tree, shapes)`, of files that cut such
tensors elsewhere: the names of the parts, and the rows of all of them together that belong to each name.

Other packages add families, which are found by entry points (`plugins`).
"""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hooked_lm.families import plugins

# folder -> model class in `hooked_lm.pretrained`
OF_TEXT = {
    "decoders": "HookedTransformer",
    "encoders": "HookedEncoder",
    "encoder_decoders": "HookedEncoderDecoder",
}
VISION_ENCODERS, VISION_LANGUAGES, DUAL_ENCODERS = (
    {"vision_encoders": "HookedVisionEncoder"},
    {"vision_languages": "HookedVisionLanguage"},
    {"dual_encoders": "HookedDualEncoder"},
)
CLASSES = OF_TEXT | VISION_ENCODERS | VISION_LANGUAGES | DUAL_ENCODERS


def supported(*classes: str) -> list[str]:
    """The model types that can be loaded as one of these classes; by default those of text alone.

    >>> (
    ...     "llama" in supported(),
    ...     "vit" in supported(),
    ...     "vit" in supported("HookedVisionEncoder"),
    ... )
    (True, False, True)
    """
    return list(_folders(classes or tuple(OF_TEXT.values())))


def is_supported(model_type: str, *classes: str) -> bool:
    """Whether a model type can be loaded as one of these classes, by a family of this package or of another one.

    Raises ValueError if the family of another package is broken.

    >>> is_supported("llama"), is_supported("vit"), is_supported("no_such_type")
    (True, False, False)
    """
    classes = classes or tuple(OF_TEXT.values())
    return model_type in _folders(classes) or _plugin(model_type, classes) is not None


def model_class(model_type: str) -> str:
    """The name of the model class of a family of text, without importing torch or a family of this package.

    >>> model_class("gpt2")
    'HookedTransformer'
    """
    classes = tuple(OF_TEXT.values())
    if (folder := _folders(classes).get(model_type)) is not None:
        return CLASSES[folder]
    return plugins.model_class(family(model_type))


def model_classes() -> dict[str, list[str]]:
    """The names of the model classes that each supported model type can be loaded as, without importing torch.

    >>> model_classes()["llava"]
    ['HookedVisionLanguage']
    """
    found = dict[str, list[str]]()
    for name in CLASSES.values():
        for model_type in supported(name):
            found.setdefault(model_type, []).append(name)
    return dict(sorted(found.items()))


def of_other_packages() -> list[tuple[str, str, str, str | None]]:
    """The model type, the package and the model class of each family of another package, and why it cannot be used, or None.

    >>> of_other_packages()
    []
    """
    return plugins.listed(_folders(tuple(CLASSES.values())), tuple(CLASSES.values()))


def family(model_type: str, *classes: str) -> ModuleType:
    """The module of a model type that can be loaded as one of these classes, by default one of text alone.

    Raises ValueError, listing the supported types, for an unknown one, and naming the package if that of another one is broken.

    >>> family("gpt2").PREFIX
    'transformer.'
    """
    folder = _folders(classes or tuple(OF_TEXT.values())).get(model_type)
    if folder is not None:
        return import_module(f"{__name__}.{folder}.{model_type}")
    if (module := _plugin(model_type, classes or tuple(OF_TEXT.values()))) is None:
        as_class = f" as a {' or '.join(classes)}" if classes else ""
        raise ValueError(
            f"model_type {model_type!r} is not supported{as_class}; supported are {', '.join(supported(*classes))}. To hook a "
            "model by the names of its modules, without conversion, use hooked_lm.hooks.wrap(model)"
        )
    return module


def _plugin(model_type: str, classes: tuple[str, ...]) -> ModuleType | None:
    """The family of another package, of one of these classes, unless this one has a family of that name, of whatever class."""
    if model_type in _folders(tuple(CLASSES.values())):
        return None
    module = plugins.plugin(model_type, tuple(CLASSES.values()))
    return module if module is None or plugins.model_class(module) in classes else None


@cache
def _folders(classes: tuple[str, ...]) -> dict[str, str]:
    """Model type -> its folder, of the families of these classes."""
    here, folders = Path(__path__[0]), [folder for folder, name in CLASSES.items() if name in classes]
    found = {module.name: folder for folder in folders for module in pkgutil.iter_modules([str(here / folder)])}
    return dict(sorted(found.items()))
