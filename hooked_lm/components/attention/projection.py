"""The weights of queries, keys and values, [head, d_model, d_head]: in memory each is one matrix [head * d_head, d_model]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.components.axes import axes_of


def projection(n_heads: int, d_model: int, d_head: int) -> nn.Parameter:
    """A new weight, without values."""
    return nn.Parameter(torch.empty(n_heads, d_head, d_model).transpose(1, 2))


def add_projections(attn: nn.Module, cfg: Any, d_source: int, values: bool = True, suffix: str = "") -> None:
    """Adds the weights of queries, and those of keys and values of a source of width `d_source`, with their biases.

    Their names are "W_Q" and so on, with a suffix. Raises ValueError if heads cannot share key/value heads evenly.
    """
    if cfg.n_heads % cfg.n_kv:
        raise ValueError(f"{cfg.n_heads} heads cannot share {cfg.n_kv} key/value heads evenly")
    sizes = {"Q": (cfg.n_heads, cfg.d_model), "K": (cfg.n_kv, d_source), "V": (cfg.n_kv, d_source)}
    for name, (n_heads, width) in sizes.items():
        if name != "V" or values:
            attn.register_parameter(f"W_{name}{suffix}", projection(n_heads, width, cfg.d_head))
            bias = nn.Parameter(torch.zeros(n_heads, cfg.d_head)) if cfg.qkv_bias else None
            attn.register_parameter(f"b_{name}{suffix}", bias)


def make_contiguous(attn: nn.Module, keep: Callable[[Tensor], Tensor] | None = None) -> None:
    """Copies projections that are not one matrix in memory, such as slices of a fused weight, which every run would have to copy.

    Packed ones have no values in memory, and stay. `keep` says where a copy is, None: in memory.
    """
    for name, weight in attn.named_parameters(recurse=False):
        axes = axes_of(attn, name)
        is_projection = (
            axes is not None and len(axes.names) == 3 and axes.inputs == (1,) and not hasattr(weight, "packed")
        )
        if is_projection and weight.stride(0) != weight.shape[2] * weight.stride(2):
            matrix = weight.data.transpose(1, 2).contiguous()
            weight.data = (matrix if keep is None else keep(matrix)).transpose(1, 2)
