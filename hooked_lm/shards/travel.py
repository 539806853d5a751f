"""Brings a large object to processes that start."""

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import reduction
from tempfile import TemporaryFile
from typing import Protocol, runtime_checkable


@runtime_checkable
class Descriptor(Protocol):
    """The descriptor of a file on its way to another process."""

    def detach(self) -> int:
        """The descriptor in the process that receives it."""


class ByFile(ExitStack):
    """An argument of processes that start: it arrives as the object itself, and the weights of a model stay shared.

    A process that starts another one writes the arguments into a pipe and waits until they are read. A pipe holds little: if the
    other process dies before it reads, that wait has no end. So a file holds the object, and the pipe its descriptor. The files
    are closed at the end of the `with` block. Windows has no such descriptors; there the object goes through the pipe.
    """

    def __init__(self, content: object) -> None:
        super().__init__()
        self.content = content

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        if not hasattr(reduction, "DupFd"):
            return same, (self.content,)
        file = self.enter_context(TemporaryFile())  # noqa: SIM115 (closed at the end of the block)
        reduction.ForkingPickler(file, pickle.HIGHEST_PROTOCOL).dump(self.content)
        file.seek(0)
        return received, (reduction.DupFd(file.fileno()),)


def same(content: object) -> object:
    """The object, which was in the pipe."""
    return content


def received(descriptor: Descriptor) -> object:
    """The object in the process that starts."""
    with open(descriptor.detach(), "rb") as file:
        return pickle.load(file)
