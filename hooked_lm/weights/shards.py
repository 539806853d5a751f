"""A checkpoint on disk as a mapping from names to tensors.

`open_checkpoint` reads names and headers only. Tensors are private memory maps: a look-up costs no memory
and reads nothing, the pages come in when somebody computes with them, an edit copies the page it touches
and never reaches the file. Each tensor has a storage of its own bytes, so pickling one does not drag its
file along.

The maps need the file to stay as it is. To save over a checkpoint that a model was loaded from, write to
another name in that directory and `os.replace` it: opening the file for writing would pull the pages from
under the model.
"""

import json
import os
import zipfile
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


class Checkpoint(Mapping[str, Tensor]):
    """Names -> tensors of one or several files; made by `open_checkpoint`.

    A name looked up again comes in a map of its own (safetensors and zipped pickles): the two tensors have
    equal values and share no memory, so a tied weight can become two parameters that are edited and trained
    apart.
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

    def __contains__(self, name: object) -> bool:  # the one that Mapping provides would look the tensor up
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
    """Open a checkpoint: a directory, a file of tensors, or the index of a sharded one.

    In a directory the first of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and
    `pytorch_model.bin.index.json` counts. Files other than safetensors are loaded with `weights_only=True`:
    what would have to run code to be loaded is refused.

    Args:
        path: the directory or file.
        mmap: map the files privately; False copies each tensor into memory when it is looked up.

    Raises:
        ValueError: nothing to load there; a file is truncated, damaged or refused; the index names a shard
            or tensor that is missing; a tensor is in two files.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from hooked_lm.weights.shards import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"wte.weight": torch.ones(5, 3)}, f"{folder}/model.safetensors")
    ...     checkpoint = open_checkpoint(folder)
    ...     list(checkpoint), checkpoint.shape("wte.weight"), checkpoint["wte.weight"].sum().item()
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
    """The shards an index names, checked against what it says of them."""
    try:
        home = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
        shards = {name: _beside(index, shard) for name, shard in home.items()}
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
    """A JSON object in which no key stands twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted(name for name in entries if names.count(name) > 1)
        raise ValueError(f"named twice: {', '.join(twice)}")
    return entries


def _read(path: Path) -> Mapping[str, Tensor]:
    return _Safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


class _Safetensors(Mapping[str, Tensor]):
    """One safetensors file: look-ups are views of one private map, each a storage of its own bytes."""

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
    """A torch pickle that holds tensors by name and nothing else."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(
            f"{path} was refused: it is damaged, or holds more than tensors and would run code when loaded "
            f"(only weights_only=True is allowed; convert it to safetensors where you trust it): {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected tensors by name, got a {type(loaded).__name__}")
    others = [repr(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"{path}: expected tensors by name, but {', '.join(others[:5])} are not tensors")
    return {name: tensor.detach() for name, tensor in loaded.items()}
