"""Optional packages: imported when they are first used, with an error that says how to install what is missing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["lazy_import", "quiet_torchao", "require_extra"]


def require_extra(module: str, extra: str) -> ModuleType:
    """The module, which the extra `extra` of this package installs.

    Raises ImportError with the line for pip if it is not installed.

    >>> require_extra("json", "viz").dumps(1)
    '1'
    >>> require_extra("no_such_package.part", "viz")
    Traceback (most recent call last):
    ImportError: this needs the package no_such_package: pip install 'hooked-lm[viz]'
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f"this needs the package {package}: pip install 'hooked-lm[{extra}]'", name=package) from None


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Keeps torchao from logging, when it is imported, which kernels it has none for here; errors are logged as before."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class _Later(ModuleType):
    """A module that is imported when one of its names is first used."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(module)
        self.__dict__["_extra"] = extra

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(require_extra(self.__name__, self._extra), name)


def lazy_import(module: str, extra: str) -> Any:
    """A stand-in for `import module`, which imports it when one of its names is first used; raises as `require_extra`.

    >>> lazy_import("json", "viz").dumps(1)
    '1'
    """
    return _Later(module, extra)
