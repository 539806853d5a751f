"""What identifies tensors and the weights of a model: hashes of their bytes."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hooked_lm.models.weights.weight_scope import scoped_values


def tensor_digest(value: Tensor) -> bytes:
    """A hash of the numbers of a tensor, on any device and in any layout. A tensor on "meta" has none."""
    if value.is_meta:
        return b""
    plain = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").digest()


def weights_digest(model: nn.Module) -> str:
    """A hash of the names, types, shapes and numbers of a model's parameters and buffers, as they are under open adapters."""
    whole = hashlib.sha256()
    for name, tensor in _weights(model):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor_digest(tensor))
    return whole.hexdigest()


def sampled_digest(model: nn.Module, n: int = 1024) -> str:
    """A hash as `weights_digest`, of at most `n` evenly spaced numbers of each tensor: quick for many gigabytes, too."""
    whole = hashlib.sha256()
    for name, tensor in _weights(model):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.layout != torch.strided or tensor.is_meta:
            whole.update(tensor_digest(tensor))
            continue
        places = torch.linspace(0, max(tensor.numel() - 1, 0), min(n, tensor.numel()), dtype=torch.float64).long()
        index = torch.unravel_index(places, tensor.shape) if tensor.ndim else ()
        whole.update(tensor_digest(tensor.detach()[tuple(axis.to(tensor.device) for axis in index)]))
    return whole.hexdigest()


@torch.no_grad()
def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, with the values that they have in this context, and the buffers."""
    inside = dict(scoped_values(model))
    for name, weight in model.named_parameters():
        yield name, inside.get(name, weight)
    yield from model.named_buffers()
