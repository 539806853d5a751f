"""`python -m hooked_lm.compat [--shadow] script.py args...` or `... -m module args...`: runs a program with the shim."""

import os
import runpy
import sys
from pathlib import Path

from hooked_lm.compat import SHIM, install

USAGE = "usage: python -m hooked_lm.compat [--shadow] (script.py | -m module) [args ...]"


def main(arguments: list[str]) -> None:
    """Runs a script or a module like Python, with the shim of `transformer_lens`, also in its child processes."""
    shadow = arguments[:1] == ["--shadow"]
    arguments = arguments[shadow:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if arguments in (["-h"], ["--help"]) and not as_module:
        print(USAGE)
        return
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    if not as_module:
        _check_script(Path(arguments[0]))
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
    install(shadow=shadow)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _check_script(path: Path) -> None:
    """Exits with a message for a file that is missing or is a notebook."""
    if not path.is_file():
        sys.exit(f"error: no such file: '{path}'")
    if path.suffix == ".ipynb":
        sys.exit(
            f"error: '{path}' is a notebook: call `from hooked_lm import compat; compat.install()` in its first cell, and run "
            "it as usual"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
