"""The weights of queries, keys and values, [head, d_model, d_head]: in memory each is one matrix [head * d_head, d_model]."""

import torch
from torch import nn

NAMES = ("W_Q", "W_K", "W_V", "W_UQ", "W_UK", "W_UV", "W_gate")


def projection(n_heads: int, d_model: int, d_head: int) -> nn.Parameter:
    """A new weight, without values."""
    return nn.Parameter(torch.empty(n_heads, d_head, d_model).transpose(1, 2))


def make_contiguous(attn: nn.Module) -> None:
    """Copies weights that are not one matrix in memory, such as slices of a fused weight, which every run would have to copy."""
    for name, weight in attn.named_parameters(recurse=False):
        if name in NAMES and weight.stride(0) != weight.shape[2] * weight.stride(2):
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
