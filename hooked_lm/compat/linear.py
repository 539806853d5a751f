"""Linear maps of MLPs and of heads."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["batch_addmm", "clamp_qkv", "complex_attn_linear", "simple_attn_linear", "vanilla_addmm"]


def vanilla_addmm(
    input: Float[Tensor, "*any"], mat1: Float[Tensor, "m n"], mat2: Float[Tensor, "n o"]
) -> Float[Tensor, "m o"]:
    """`input + mat1 mat2`, where `input` may be a row."""
    return torch.addmm(input, mat1, mat2)


def batch_addmm(
    bias: Float[Tensor, "*any"], weight: Float[Tensor, "d_in d_out"], x: Float[Tensor, "*batch d_in"]
) -> Float[Tensor, "*batch d_out"]:
    """`x weight + bias`, for any leading axes."""
    return vanilla_addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


def simple_attn_linear(
    input: Float[Tensor, "batch pos d_model"],
    w: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"],
) -> Float[Tensor, "batch pos head d_head"]:
    """The queries, keys or values of all heads, from one input."""
    w, b = w.to(input.device), b.to(input.device)
    return batch_addmm(b.flatten(), w.transpose(0, 1).flatten(1), input).unflatten(-1, b.shape)


def complex_attn_linear(
    input: Float[Tensor, "batch pos head d_model"],
    w: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"],
) -> Float[Tensor, "batch pos head d_head"]:
    """The queries, keys or values of all heads, from one input for each head."""
    return torch.einsum("bphm,hmd->bphd", input, w) + b


def clamp_qkv(q: Tensor, k: Tensor, v: Tensor, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the tensors, clamped to `-clip` and `clip`."""
    return q.clamp(-clip, clip), k.clamp(-clip, clip), v.clamp(-clip, clip)
