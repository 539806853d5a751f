"""Identities of attention to the sums of blocks of tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.verification.attention import all_keys
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    input_weights,
    norm_identity,
    norm_output,
)
from hooked_lm.families.encoder_decoders.longt5.transient_global import TransientGlobalAttention


@identities.register
def _(
    attn: TransientGlobalAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the blocks of a text without padding."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)

    def summed() -> tuple[Tensor, Tensor]:
        x, shown = get_input(), at("hook_block_sum")
        size, n_blocks = attn.cfg.block_size, shown.shape[1]
        sums = [x[:, i * size : (i + 1) * size if i < n_blocks - 1 else None].sum(1) for i in range(n_blocks)]
        return torch.stack(sums, 1) if sums else shown, shown

    yield "sum of the inputs of a block == block_sum", summed
    yield from norm_identity(attn, "global_norm", at, lambda: at("hook_block_sum"))
    for name, W, b in (("k", attn.W_K, attn.b_K), ("v", attn.W_V, attn.b_V)):

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            x = norm_output(attn, "global_norm", at, lambda: at("hook_block_sum"))
            return add_bias(torch.einsum("bgm,nmh->bgnh", x, W), b), at(f"hook_{name}_global")

        yield f"global_norm -> {name}_global", projected


@input_weights.register
def _(attn: TransientGlobalAttention) -> list[InputWeight]:
    """None: a norm cannot be folded, since sums of its outputs are normalised too."""
    return []


@all_keys.register
def _(attn: TransientGlobalAttention, at: Sites, name: str, axis: int) -> Tensor:
    """The value at a site, with that of the blocks of tokens."""
    return torch.cat([at(f"hook_{name}"), at(f"hook_{name}_global")], axis)
