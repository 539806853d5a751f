"""What identifies tensors and the weights of a model: hashes of their bytes."""

import hashlib

import torch
from torch import Tensor, nn


def tensor_digest(value: Tensor) -> bytes:
    """A hash of the numbers of a tensor, on any device and in any layout. A tensor on "meta" has none."""
    if value.is_meta:
        return b""
    plain = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").digest()


def weights_digest(model: nn.Module) -> str:
    """A hash of the names, types, shapes and numbers of a model's parameters and buffers."""
    whole = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor_digest(tensor))
    return whole.hexdigest()
