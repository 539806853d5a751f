"""The shim: this package under the import name `transformer_lens`, so that tools and notebooks written for it run unmodified.

`shim/` contains a package of that name, whose modules import the public names from hooked_lm, and the package metadata from
which tools read a version. `install` puts `shim/` on the import path. `python -m hooked_lm.compat script.py ...` and
`python -m hooked_lm.compat -m module ...` run a program with the shim.
"""

import sys
from importlib import reload
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hooked_lm.models.config import defaults

__all__ = ["NAME", "SHIM", "install", "uninstall"]

NAME = "transformer_lens"
"""The name under which the shim can be imported."""
SHIM = Path(__file__).parent / "shim"
"""The folder that `install` puts on the import path."""


def install(*, shadow: bool = False) -> None:
    """Puts the shim on the import path, so that `import transformer_lens` finds this package; a second call changes nothing.

    Raises RuntimeError if a `transformer_lens` is installed, unless `shadow=True` puts the shim before it, or if it is already
    imported, because classes of both packages would then be mixed.

    >>> from hooked_lm import HookedTransformer, compat
    >>> compat.install()
    >>> import transformer_lens
    >>> transformer_lens.HookedTransformer is HookedTransformer
    True
    >>> compat.uninstall()
    """
    if (imported := sys.modules.get(NAME)) is not None and not _is_shim(imported.__file__):
        raise RuntimeError(
            f"{NAME} is already imported from {imported.__file__}: call hooked_lm.compat.install before the first import"
        )
    if str(SHIM) in sys.path:
        return
    found = find_spec(NAME)
    if found is not None and not shadow:
        raise RuntimeError(
            f"{NAME} {_installed_version()} is installed and would be found instead: uninstall it, or call "
            "hooked_lm.compat.install(shadow=True), or run python -m hooked_lm.compat --shadow ..."
        )
    sys.path.insert(0 if shadow else len(sys.path), str(SHIM))


def uninstall() -> None:
    """Removes the shim from the import path. Imported objects keep working; the next import does not find the shim."""
    sys.path[:] = [path for path in sys.path if path != str(SHIM)]
    reload(defaults)  # to those of this package
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == NAME and _is_shim(getattr(module, "__file__", None)):
            del sys.modules[name]


def _is_shim(file: str | None) -> bool:
    return file is not None and SHIM in Path(file).parents


def _installed_version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "(of unknown version)"
