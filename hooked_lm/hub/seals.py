"""Seals: hashes of what `save` wrote, by which a changed file, or one of another model, is found when the model is loaded.

The weights are not read in full, which would take as long as copying them: their seal covers the names, types, shapes and sizes
of all tensors, and the first and last bytes of each. A model loads as fast as without one.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

ENDS = 64  # bytes at each end of a tensor

Json = object


def seal_of_json(value: Json) -> str:
    """A hash of a value that is written as JSON, the same before and after."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value))).encode()).hexdigest()


def seal_of_file(path: Path) -> str:
    """A hash of a whole file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def seal_of_weights(path: Path) -> str:
    """A hash of the header of a safetensors file, and of both ends of each tensor."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        whole.update(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                for start in (begin, max(begin, end - ENDS)):
                    file.seek(8 + length + start)
                    whole.update(file.read(min(ENDS, end - start)))
    return whole.hexdigest()


def check(seals: Mapping[str, str], folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError for a file that is missing, or is not what was sealed; `files` that have no seal are not checked."""
    for name in files:
        if name not in seals:
            continue
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: model.save wrote it; save the model again")
        seal = seal_of_weights if name.endswith(".safetensors") else seal_of_file
        if seal(path) != seals[name]:
            raise ValueError(
                f"{path} is not the file that model.save wrote: it was changed, or is that of another model. Put the right one "
                "there, or save the model again; to change a model, load it, change it and save it"
            )
