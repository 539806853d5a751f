"""Files of Jacobian lenses in the layout in which they are published: {layer: [d_model, d_model]}, and the number of prompts.

A file of `torch.save` is read with `weights_only`, which runs nothing. A safetensors file has the same tensors as "J.0", "J.1",
..., and the numbers in its header.
"""

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.files import no_such, replacing

NAME = re.compile(r"J\.(\d+)")
Matrices = Mapping[int, Float[Tensor, "d_model d_model"]]


@dataclass(frozen=True)
class PublishedLens:
    """The contents of such a file: matrices by layer, in fp32, the number of prompts, and what else it says."""

    matrices: Matrices
    n_prompts: int
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def d_model(self) -> int:
        """The width of the stream."""
        return len(next(iter(self.matrices.values())))

    @property
    def target(self) -> int | None:
        """The layer to which the Jacobians lead, if the file says so."""
        return self.metadata.get("target_layer")


def write(path: str | Path, matrices: Matrices, n_prompts: int, metadata: dict[str, Any]) -> None:
    """Writes a file: safetensors if it is called so, else by `torch.save`."""
    size = len(next(iter(matrices.values())))
    facts = {"n_prompts": n_prompts, "source_layers": sorted(matrices), "d_model": size, "metadata": metadata}
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import save_file

        tensors = {f"J.{layer}": matrix.contiguous() for layer, matrix in matrices.items()}
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, {name: json.dumps(value) for name, value in facts.items()})
        return
    with replacing(path) as unfinished:
        torch.save({"J": {layer: matrix.clone() for layer, matrix in matrices.items()}, **facts}, unfinished)


def read(path: str | Path) -> PublishedLens:
    """Reads a file of either kind, or the sums of an unfinished fit. Raises ValueError for anything else."""
    if not Path(path).exists():
        raise no_such("file", path)
    found = _safetensors(path) if Path(path).suffix == ".safetensors" else _unpickled(path)
    matrices, n = found.get("J"), found.get("n_prompts", 0)
    if matrices is None and "jacobian_sum" in found:
        n = int(found.get("n_done", 0))
        if n < 1:
            raise ValueError(f"{path} has sums of {n} prompts: nothing was fitted yet")
        matrices = {layer: total.float() / n for layer, total in found["jacobian_sum"].items()}
    if not isinstance(matrices, dict) or not matrices or not all(_is_square(matrix) for matrix in matrices.values()):
        raise ValueError(f"{path} holds no Jacobian lens: 'J', the matrices [d_model, d_model] by layer")
    if len({matrix.shape for matrix in matrices.values()}) > 1:
        raise ValueError(
            f"{path} is damaged: its matrices have the shapes {[list(J.shape) for J in matrices.values()]}"
        )
    metadata = dict(found.get("metadata") or {})
    metadata |= {"target_layer": found["target_layer"]} if "target_layer" in found else {}
    return PublishedLens({int(layer): matrices[layer].float() for layer in sorted(matrices)}, int(n), metadata)


def is_published(path: str | Path) -> bool:
    """Whether a file is in the published layout, by its ending or by what it calls its tensors, and is none of `save`."""
    if Path(path).suffix != ".safetensors":
        return Path(path).suffix in (".pt", ".pth")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return any(NAME.fullmatch(name) for name in file.keys())  # noqa: SIM118
    except SafetensorError:
        return False


def _is_square(matrix: object) -> bool:
    return isinstance(matrix, Tensor) and matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]


def _unpickled(path: str | Path) -> dict[str, Any]:
    """The contents of a file of `torch.save`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of pickles, all of which are refused or harmless
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} is no file of tensors and numbers, so it is not opened: {reason}") from None
    return found if isinstance(found, dict) else {}


def _safetensors(path: str | Path) -> dict[str, Any]:
    """The contents of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = {name: json.loads(value) for name, value in (file.metadata() or {}).items() if name != "format"}
            named = {match[1]: file.get_tensor(name) for name in file.keys() if (match := NAME.fullmatch(name))}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file of a Jacobian lens: {error}") from None
    return {**header, "J": {int(layer): matrix for layer, matrix in named.items()}}
