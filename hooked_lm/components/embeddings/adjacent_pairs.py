"""Rotation of pairs of adjacent features."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotated_pairs(
    x: Float[Tensor, "batch pos head d"],
    cos: Float[Tensor, "#batch pos 1 half"],
    sin: Float[Tensor, "#batch pos 1 half"],
) -> Float[Tensor, "batch pos head half 2"]:
    """Rotated pairs of adjacent features: a product of complex numbers, which the compiler needs in parts."""
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos.to(x.dtype), sin.to(x.dtype)
    if torch.compiler.is_compiling():
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.view_as_real(torch.complex(a, b) * torch.complex(cos, sin))
