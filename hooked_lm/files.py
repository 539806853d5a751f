"""Atomic writing of files, under a temporary name in the same folder and then renamed; errors of reading that name the file."""

import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = [
    "made_folder",
    "names_the_file",
    "no_such",
    "remove_leftovers",
    "replacing",
    "unfinished_path",
    "writable",
    "writable_folder",
]

UNFINISHED = ".unfinished"
OF_DAMAGE = (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
P = ParamSpec("P")
R = TypeVar("R")


def writable(path: str | os.PathLike[str]) -> Path:
    """The file that a path means, with links resolved.

    Raises OSError with the reason if it cannot be written: FileNotFoundError if the folder does not exist, IsADirectoryError if
    the path is a folder, PermissionError if the file is read-only.
    """
    if not os.fspath(path):
        raise ValueError("cannot write a file whose path is empty: name a file")
    try:
        target = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise OSError(f"cannot write {path}: {error}") from None
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {target.parent}")
    if target.exists():
        if not target.is_file():
            raise OSError(f"cannot write {path}: it is not a regular file")
        if not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
            raise PermissionError(f"cannot write {path}: the file is read-only; choose another, or make it writable")
    _try(target, path)
    return target


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a path means; it may not exist yet, and is not made.

    Raises OSError with the reason if it cannot be made: NotADirectoryError if the path, or a part of it, is a file.

    >>> writable_folder("a/folder/of/results")
    PosixPath('a/folder/of/results')
    """
    if not os.fspath(path):
        raise ValueError("cannot write to a folder whose path is empty: name a folder, such as '.'")
    folder = Path(path)
    if folder.is_dir():
        return folder
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise NotADirectoryError(f"cannot write {path}: {there} is no folder")
    _try(there / "trial", path)
    return folder


def made_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a path, made with those above it if it does not exist. Raises OSError as `writable_folder`."""
    folder = writable_folder(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"cannot write {path}: the folder cannot be made ({error.strerror})") from None
    return folder


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` after the block. If the block fails, an existing file is kept.

    For a link the file that it points to is replaced. Raises OSError as `writable`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as unfinished:
    ...         _ = unfinished.write_text("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    target = writable(path)
    unfinished = unfinished_path(target)
    try:
        yield unfinished
        if target.exists():
            shutil.copymode(target, unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _try(target: Path, path: str | os.PathLike[str]) -> None:
    """Raises OSError unless a file can be created in the folder of a file. `path` is what was given."""
    trial = unfinished_path(target)
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise type(error)(f"cannot write {path}: no file can be created in {target.parent}") from None


def unfinished_path(path: Path) -> Path:
    """A temporary path in the folder of a file, which says what machine, process and thread write it."""
    writer = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    return path.with_name(f"{path.name[:140]}.{writer}{UNFINISHED}")


def remove_leftovers(folder: Path) -> None:
    """Removes unfinished files of processes of this machine that were killed."""
    own = re.compile(rf".*\.{re.escape(socket.gethostname())}-(\d+)-\d+{re.escape(UNFINISHED)}", re.DOTALL)
    for path in folder.glob(f"*{UNFINISHED}"):
        writer = own.fullmatch(path.name)
        if writer is not None and not _is_running(int(writer[1])):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def no_such(what: str, path: str | os.PathLike[str]) -> FileNotFoundError:
    """The error for a path at which nothing is, with the whole path if it was relative.

    >>> no_such("file", "/results/sweep")
    FileNotFoundError('no such file: /results/sweep')
    """
    whole = "" if os.path.isabs(path) else f" ({os.path.abspath(path)})"
    return FileNotFoundError(f"no such {what}: {os.fspath(path)}{whole}")


def names_the_file(load: Callable[P, R]) -> Callable[P, R]:
    """Decorates what loads the file at `path`: whatever is wrong with its content is a ValueError that names the file.

    FileNotFoundError if there is no such file or folder.
    """
    arguments = signature(load)

    @wraps(load)
    def loads(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return load(*args, **kwargs)
        except (*OF_DAMAGE, FileNotFoundError) as error:
            path = str(arguments.bind(*args, **kwargs).arguments["path"])
            if not os.path.exists(path):
                raise no_such("file", path) from None
            if isinstance(error, FileNotFoundError) or (isinstance(error, ValueError) and path in str(error)):
                raise
            raise ValueError(f"{path} is damaged, or from another version: {type(error).__name__}: {error}") from error

    return loads
