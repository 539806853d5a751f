"""A checkpoint on disk as a mapping from names to tensors.

`open_checkpoint` reads names and headers only. Tensors are private memory maps: a look-up allocates no memory and reads nothing,
pages are read at their first use, and an edit copies the page and never changes the file. The storage of a tensor holds its
bytes only, so a pickle of one tensor does not contain the whole file.

The file must not change while it is mapped. To overwrite a checkpoint from which a model was loaded, write a new file into
the same directory and rename it with `os.replace`. Opening the file for writing would change the model.
"""

import json
import os
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WHOLE_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Headers(Mapping[str, Tensor]):
    """Names -> tensors, whose shapes and dtypes are known without a look-up."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""


class Checkpoint(Headers):
    """Names -> tensors of one or several files; made by `open_checkpoint`.

    The second look-up of a name maps the file again (safetensors and zipped pickles): the two tensors have equal values and
    share no memory, so a tied weight can become two independent parameters.
    """

    def __init__(self, files: Mapping[Path, Mapping[str, Tensor]], *, mmap: bool = True):
        self._files, self._mmap = dict(files), mmap
        self._home: dict[str, Path] = {}
        self._given: set[str] = set()
        for path, tensors in self._files.items():
            for name in tensors:
                if name in self._home:
                    raise ValueError(f"the tensor {name!r} is in two files: {self._home[name]} and {path}")
                self._home[name] = path

    def __getitem__(self, name: str) -> Tensor:
        path = self._home[name]
        tensors = _read(path) if name in self._given else self._files[path]
        self._given.add(name)
        tensor = tensors[name]
        aligned = tensor.data_ptr() % tensor.element_size() == 0
        return tensor if self._mmap and aligned else tensor.clone(memory_format=torch.preserve_format)

    @property
    def where(self) -> str:
        """The files, for messages."""
        return ", ".join(map(str, self._files))

    def __contains__(self, name: object) -> bool:  # that of Mapping would look the tensor up
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._files[self._home[name]][name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return self._files[self._home[name]][name].dtype


def open_checkpoint(path: str | os.PathLike[str], *, mmap: bool = True) -> Checkpoint:
    """Opens a checkpoint: a directory, a file of tensors, or the index of a sharded one.

    In a directory, the first that exists of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and
    `pytorch_model.bin.index.json` is opened. Files other than safetensors are loaded with `weights_only=True`: a file that
    would run code is refused.

    Args:
        path: the directory or file.
        mmap: map the files; False copies each tensor into memory when it is looked up.

    Raises:
        ValueError: there is no checkpoint; a file is truncated, damaged or refused; the index names a shard
            or tensor that is missing; a tensor is in two files.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from hooked_lm.weights.shards import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"wte.weight": torch.ones(5, 3)}, f"{folder}/model.safetensors")
    ...     checkpoint = open_checkpoint(folder)
    ...     (
    ...         list(checkpoint),
    ...         checkpoint.shape("wte.weight"),
    ...         checkpoint["wte.weight"].sum().item(),
    ...     )
    (['wte.weight'], (5, 3), 15.0)
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in WHOLE_OR_INDEX if (path / name).is_file()]
        if not found:
            there = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
            raise ValueError(f"no checkpoint in {path}: expected one of {', '.join(WHOLE_OR_INDEX)}; found {there}")
        path = found[0]
    elif not path.is_file():
        raise ValueError(f"no checkpoint at {path}: there is no such file or directory")
    if path.suffix == ".json":
        return _open_index(path, mmap)
    return Checkpoint({path: _read(path)}, mmap=mmap)


def _open_index(index: Path, mmap: bool) -> Checkpoint:
    """The shards that an index names. Their contents must agree with the index."""
    try:
        home = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
        shards = {name: _beside(index, shard) for name, shard in home.items()}
        if not shards:
            raise ValueError("its weight_map names no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not the index of a checkpoint: {error}") from error
    for name, path in shards.items():
        if not path.is_file():
            raise ValueError(f"{index} names the shard {path.name} (for {name!r}), which is missing")
    checkpoint = Checkpoint({path: _read(path) for path in dict.fromkeys(shards.values())}, mmap=mmap)
    for name, path in shards.items():
        if name not in checkpoint or checkpoint.file(name) != path:
            where = f"it is in {checkpoint.file(name).name}" if name in checkpoint else "no shard has it"
            raise ValueError(f"{index} says that {path.name} holds {name!r}, but {where}")
    return checkpoint


def _beside(index: Path, shard: str) -> Path:
    if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts or Path(shard).is_absolute():
        raise ValueError(f"the shard {shard!r} lies outside the checkpoint's directory")
    return index.parent / shard


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted(name for name in entries if names.count(name) > 1)
        raise ValueError(f"duplicate names: {', '.join(twice)}")
    return entries


def _read(path: Path) -> Mapping[str, Tensor]:
    return _Safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


class _Safetensors(Mapping[str, Tensor]):
    """One safetensors file, mapped once. The storage of each tensor holds its bytes only."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
            self._names = dict.fromkeys(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            return self._file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self._path}: the tensor {name!r} cannot be read: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch pickle, which must be a dictionary of tensors."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(
            f"{path} was refused: it is damaged, or holds other objects than tensors and would run code when loaded "
            f"(it is loaded with weights_only=True; if you trust the file, convert it to safetensors): {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected tensors by name, got a {type(loaded).__name__}")
    others = [repr(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"{path}: expected tensors by name, but {', '.join(others[:5])} are not tensors")
    return {name: tensor.detach() for name, tensor in loaded.items()}
