"""Identities of attention that bounds queries and keys after their norms."""

import torch
from torch import Tensor

from hooked_lm.components.verification.attention import projected_heads
from hooked_lm.components.verification.registry import add_bias
from hooked_lm.families.decoders.olmoe.clipped import NormThenClipAttention


@projected_heads.register
def _(attn: NormThenClipAttention, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Queries, keys or values of an input, before they are bounded."""
    return add_bias(torch.einsum("bpm,nmh->bpnh", x, W), b)
