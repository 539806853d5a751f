"""A shard on disk: a safetensors file written in pieces, and the record that makes it valid."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooked_lm.files import unfinished_path
from hooked_lm.shards.records import commit

CODES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip

Layout = Mapping[str, tuple[torch.dtype, list[int]]]


def shard_path(folder: Path, shard: int) -> Path:
    """The file of a shard's tensors."""
    return folder / f"shard-{shard:06d}.safetensors"


class ShardFile:
    """A safetensors file of known layout that is filled in pieces, in any order.

    It has a temporary name until `commit`. Raises OSError if the disk has no space.
    """

    def __init__(self, folder: Path, shard: int, layout: Layout) -> None:
        self.folder, self.shard = folder, shard
        self.path = unfinished_path(shard_path(folder, shard))
        header = header_of(layout)
        self.starts = {name: of["data_offsets"][0] for name, of in header.items()}
        self.row_bytes = {
            name: dtype.itemsize * torch.Size(shape[1:]).numel() for name, (dtype, shape) in layout.items()
        }
        at = max((of["data_offsets"][1] for of in header.values()), default=0)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.begin = 8 + len(text)
        self.size = self.begin + at
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._write(0, len(text).to_bytes(8, "little") + text)
            self._reserve()
        except BaseException:
            self.discard()
            raise

    def _reserve(self) -> None:
        """Takes the space on disk, so that a full disk is seen before anything is computed."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file, 0, self.size)
            else:
                os.truncate(self.file, self.size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no space for shard {self.shard} of {self.size / 2**20:.1f} MiB in {self.folder} "
                f"({os.strerror(error.errno or 0)}); what is complete is kept: make space and run the same command again",
            ) from None

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Writes rows of a tensor, from a row on."""
        if values.numel():
            data = values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
            self._write(self.begin + self.starts[name] + row * self.row_bytes[name], data)

    def _write(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self.file, view, at)
            view, at = view[written:], at + written

    def commit(self, record: dict[str, Any]) -> dict[str, Any]:
        """Makes the shard and its record valid, and returns the record.

        Raises ValueError if the shard exists with other bytes.
        """
        os.close(self.file)
        self.file = -1
        return commit(self.path, shard_path(self.folder, self.shard), record)

    def discard(self) -> None:
        """Removes the unfinished file."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self.path.unlink(missing_ok=True)


def header_of(layout: Layout) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: the type, shape and place of each tensor, those of large numbers first."""
    header: dict[str, dict[str, Any]] = {}
    at = 0
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        size = dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def checked_begin(path: Path, layout: Layout) -> int:
    """The byte of a shard at which its tensors begin. Raises ValueError for a file that has not exactly this layout."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except (ValueError, AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error})") from None
    if header != header_of(layout):
        raise ValueError(f"{path} is damaged: its tensors have other names, types, shapes or places than the plan says")
    return 8 + length
