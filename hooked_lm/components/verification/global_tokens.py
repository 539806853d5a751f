"""Attention with global tokens: a stream of their own, every token of a window, or the sums of blocks of tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.global_tokens import WindowAttention, every_third
from hooked_lm.components.attention.multihead import project
from hooked_lm.components.verification.attention import mixing_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities


@identities.register
def _(
    attn: WindowAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()` in which every third token is global."""
    for name in ("q", "k", "v", "q_global", "k_global", "v_global"):

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            kind = name[0].upper() + name[1:]
            return project(get_input(), getattr(attn, f"W_{kind}"), getattr(attn, f"b_{kind}")), at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected

    def of_row(local: Tensor, of_global: Tensor, dim: int) -> Tensor:
        shape = [-1 if axis == dim else 1 for axis in range(4)]
        return torch.where(every_third(local.shape[dim]).to(local.device).view(shape), of_global, local)

    def scores() -> tuple[Tensor, Tensor]:
        found = at("hook_attn_scores")
        kinds = [torch.einsum("bqnh,bknh->bnqk", at(f"hook_q{x}"), at(f"hook_k{x}")) for x in ("", "_global")]
        return (of_row(kinds[0], kinds[1], 2) * attn.scale)[found.isfinite()], found[found.isfinite()]

    def mixed() -> tuple[Tensor, Tensor]:
        kinds = [torch.einsum("bnqk,bknh->bqnh", at("hook_pattern"), at(f"hook_v{x}")) for x in ("", "_global")]
        return of_row(kinds[0], kinds[1], 1), at("hook_z")

    yield "q k^T * scale, of global tokens q_global k_global^T * scale == attn_scores", scores
    yield "pattern @ v, of global tokens pattern @ v_global == z", mixed
    rest = ("softmax(attn_scores) == pattern", "z @ W_O == result")
    yield from ((name, pair) for name, pair in mixing_identities(attn, at) if name in rest)
