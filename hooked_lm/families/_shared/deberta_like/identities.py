"""Identities of a block with a convolution of its input."""

from collections.abc import Iterator

from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.families._shared.deberta_like.conv import ConvPostNormBlock


@identities.register
def _(block: ConvPostNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of its wiring, and those of the convolution."""
    yield from wired_identities(block, at, block.wiring(), shift)
    yield "conv(resid_pre) == conv_pre", lambda: (block.convolved(at("hook_resid_pre")), at("hook_conv_pre"))
    yield "act(conv_pre) == conv_out", lambda: (block.conv_act(at("hook_conv_pre")), at("hook_conv_out"))
