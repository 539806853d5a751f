"""The shim: this package under the import name `transformer_lens`, so that tools and notebooks written for it run unmodified.

`shim/` holds a package of that name whose files only say where each public name is found here, and the metadata by which tools
ask for a version. `install` puts `shim/` on the import path, and from there Python's own import does everything.
`python -m hooked_lm.compat script.py ...` and `python -m hooked_lm.compat -m module ...` run a whole program under it.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hooked_lm.models.config import defaults

__all__ = ["NAME", "SHIM", "install", "uninstall"]

NAME = "transformer_lens"
SHIM = Path(__file__).parent / "shim"


def install(*, shadow: bool = False) -> None:
    """Puts the shim on the import path, so that `import transformer_lens` finds this package; a second call changes nothing.

    Raises RuntimeError if a `transformer_lens` is installed (with `shadow=True` ours comes first instead), or already imported
    from elsewhere, since then some classes would be theirs and some ours.

    >>> from hooked_lm import HookedTransformer, compat
    >>> compat.install()
    >>> import transformer_lens
    >>> transformer_lens.HookedTransformer is HookedTransformer
    True
    >>> compat.uninstall()
    """
    if (imported := sys.modules.get(NAME)) is not None and not _is_shim(imported.__file__):
        raise RuntimeError(
            f"{NAME} is already imported from {imported.__file__}: call hooked_lm.compat.install before whatever imports it"
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
    """Removes the shim from the import path. What was imported keeps working; the next import looks elsewhere."""
    sys.path[:] = [path for path in sys.path if path != str(SHIM)]
    defaults.fused_attention = "auto"
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
