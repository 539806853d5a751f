"""The command `hooked-lm`, a module for each command. Each imports what it needs when it runs, so that `--help` is fast."""

from importlib import import_module
from pkgutil import iter_modules

from hooked_lm.cli.command import EXAMPLES, app

__all__ = ["EXAMPLES", "app"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
