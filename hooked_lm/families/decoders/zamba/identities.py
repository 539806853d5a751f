"""Identities of blocks that share a transformer."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.blocks.wiring import Sublayer, Wiring
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.families.decoders.zamba.shared import RepeatedEmbed, SharedBlock

WIDE = "[resid_pre, per_layer_in]"  # the stream and the embedding of the tokens, side by side


@identities.register
def _(block: SharedBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run: those of the layer's own wiring, and of the transformer that blocks share."""

    def with_wide(name: str) -> Tensor:
        return torch.cat([at("hook_resid_pre"), at("hook_per_layer_in")], -1) if name == WIDE else at(name)

    attn = Sublayer("attn", WIDE, "hook_attn_mixed", "ln1")
    mlp = Sublayer("mlp", attn.writes, "hook_transformed", "ln2")
    yield from wired_identities(block, at, block.wiring(), shift)
    yield from wired_identities(block, with_wide, Wiring((attn, mlp)))
    yield "transformed W_shared == shared_out", lambda: (at("hook_transformed") @ block.W_shared, at("hook_shared_out"))


@identities.register
def _(module: RepeatedEmbed, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens, with the embedding `embed()`."""
    yield "embed == per_layer.out", lambda: (embed()[:, :, None].expand_as(at("hook_out")), at("hook_out"))
