"""Files of results: tensors and metadata in one safetensors file, written atomically."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hooked_lm.files import names_the_file, no_such, replacing

__all__ = ["kind_of", "names_the_file", "read", "write"]

PREFIX = "hooked_lm."  # of the formats in headers
# Types under the names of earlier versions.
FORMER = {"hooked_lm.Measures": "hooked_lm.MetricScores", "hooked_lm.Trained": "hooked_lm.TrainedDictionary"}
NAMES = "tensors"  # the names of a file's tensors, in its header


def write(path: str | Path, format: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Writes tensors, and metadata as JSON; an existing file is kept until the new one is complete.

    Raises OSError as `hooked_lm.files.writable`, and if the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    facts = {**metadata, NAMES: list(tensors)}
    header = {"format": format, **{name: json.dumps(value) for name, value in facts.items()}}
    with replacing(path) as unfinished:
        try:
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, unfinished, header)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from None


def read(path: str | Path, format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The content of a file that `write` wrote in this format.

    Raises ValueError for any other file, with the type that it holds.
    """
    with _opened(path) as file:
        header = file.metadata() or {}
        if (found := _format(header)) != format:
            wanted = format.removeprefix(PREFIX)
            if not found.startswith(PREFIX):
                raise ValueError(f"{path} is not a file of type {wanted}: its header names no type of this package")
            holds = f"{path} holds type {found.removeprefix(PREFIX)}, not {wanted}"
            raise ValueError(f"{holds}; hooked_lm.load(path) loads any type")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    facts = {name: _parsed(path, name, value) for name, value in header.items() if name != "format"}
    names = facts.pop(NAMES, list(tensors))
    if not isinstance(names, list) or {*map(str, names)} != tensors.keys():
        raise ValueError(f"{path} is damaged: it has the tensors {', '.join(tensors)}, and its header says {names}")
    return tensors, facts


def kind_of(path: str | Path) -> str:
    """The type in the header of a file that `write` wrote, such as "Circuit". Raises ValueError for any other file."""
    with _opened(path) as file:
        format = _format(file.metadata() or {})
    if not format.startswith(PREFIX):
        raise ValueError(f"{path} was not saved by this package: its header names no type of it")
    return format.removeprefix(PREFIX)


def _format(header: Mapping[str, str]) -> str:
    """The format that a header names, under its present name."""
    found = header.get("format", "")
    return FORMER.get(found, found)


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """A safetensors file, open; ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise IsADirectoryError(f"cannot read {path}: it is a folder; name a file in it")
    if not Path(path).exists():
        raise no_such("file", path)
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def _parsed(path: str | Path, name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {name!r} in its header is not JSON that can be read ({error})") from None
