"""A small model with a fused and a tied weight, its rows, and a checkpoint for it."""

import torch
from torch import nn

from hooked_lm.weights import Row, expand

N, H, M, V, LAYERS = 3, 4, 6, 10, 2


class Attention(nn.Module):
    def __init__(self, device):
        super().__init__()
        for name in "QKV":
            setattr(self, f"W_{name}", nn.Parameter(torch.randn(N, M, H, device=device)))
        self.register_buffer("scale", torch.zeros(1, device=device))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


class Model(nn.Module):
    def __init__(self, device="meta"):
        super().__init__()
        self.W_E = nn.Parameter(torch.randn(V, M, device=device))
        self.W_U = nn.Parameter(torch.randn(M, V, device=device), requires_grad=False)
        self.blocks = nn.ModuleList(Attention(device) for _ in range(LAYERS))


def rows():
    return expand(
        [
            Row("t.wte.weight", "W_E"),
            Row("lm_head.weight", "W_U", "v m -> m v", tied="t.wte.weight"),
            Row("t.h.{l}.qkv", "blocks.{l}.W_{qkv}", "m (qkv n h) -> n m h", qkv="QKV"),
            Row("t.h.{l}.scale", "blocks.{l}.scale"),
        ],
        l=LAYERS,
    )


def tensors(dtype=torch.float32):
    out = {"t.wte.weight": torch.randn(V, M).to(dtype)}
    for layer in range(LAYERS):
        out[f"t.h.{layer}.qkv"] = torch.randn(M, 3 * N * H).to(dtype)
        out[f"t.h.{layer}.scale"] = torch.randn(1).to(dtype)
    return out


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
