"""Do the sites of an encoder-decoder mean what they promise? The identities of both sides, of one run."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.components.blocks.cross import PostNormCrossBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embed import soft_capped
from hooked_lm.components.norm import norm_of
from hooked_lm.components.verification import identities as component_identities
from hooked_lm.components.verification.registry import Identity, Pair, Read, Sites, below, norm_identity, normed
from hooked_lm.models.verification.verify import Verification, checked, drawn_tokens


@torch.no_grad()
def verify(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | None = None,
    decoder_tokens: Int[Tensor, "batch target_pos"] | None = None,
) -> Verification:
    """Check the identities between the sites of both sides on one run, over random tokens unless given.

    Errors and tolerances are those of `hooked_lm.models.verification.verify`; an identity of layers names its side.
    """
    cfg = model.cfg
    tokens = drawn_tokens(cfg) if tokens is None else tokens
    decoder_tokens = drawn_tokens(cfg, cfg.d_vocab_out, most=9, seed=1) if decoder_tokens is None else decoder_tokens
    inputs = tokens.to(model.device), decoder_tokens.to(model.device)
    return checked(model, inputs, lambda at, logits: _identities(model, at, logits))


def _identities(model: Any, at: Sites, logits: Tensor) -> Iterator[Identity]:
    def source() -> Tensor:
        return at("hook_encoder_out")

    def encoded() -> Tensor:
        return _left_by(model, "encoder", at)

    def decoded() -> Tensor:
        return _left_by(model, "decoder", at)

    yield from _side_identities(model, "encoder", at)
    yield "encoder_final_ln(resid_post) == encoder_out", lambda: (encoded(), source())
    yield from _side_identities(model, "decoder", at, source)

    def predicted() -> tuple[Tensor, Tensor]:
        return soft_capped(model.unembed.unhooked(decoded()), model.tree.unembed.soft_cap), logits

    yield "unembed(decoder_final_ln(resid_post)) == logits", predicted


def _side_identities(model: Any, side: str, at: Sites, *source: Read) -> Iterator[Identity]:
    """What the blocks of a side say of themselves, that each reads what the one before leaves, and the final norm."""
    blocks = getattr(model, side)
    for layer, block in enumerate(blocks):
        for name, pair in component_identities(block, below(at, f"{side}.{layer}"), *source):
            yield f"{side}: {name}", pair
    for layer, block in enumerate(blocks[:-1]):
        left, then = last_site(side, block, layer), f"{side}.{layer + 1}.hook_resid_pre"
        yield f"{side}: resid_post == next resid_pre", _same(at, left, then)
    name, last = f"{side}_final_ln", last_site(side, blocks[-1], len(blocks) - 1)
    yield from norm_identity(name, norm_of(model, name), below(at, name), lambda: at(last))


def _left_by(model: Any, side: str, at: Sites) -> Tensor:
    """What the layers of a side leave, after the final norm."""
    name, blocks = f"{side}_final_ln", getattr(model, side)
    last = last_site(side, blocks[-1], len(blocks) - 1)
    return normed(norm_of(model, name), below(at, name), lambda: at(last))


def _same(at: Sites, left: str, right: str) -> Pair:
    return lambda: (at(left), at(right))


def last_site(side: str, block: nn.Module, layer: int) -> str:
    """Where the stream that a block leaves is seen."""
    stands_in_stream = isinstance(block, (PostNormBlock, PostNormCrossBlock))
    return f"{side}.{layer}.hook_" + ("normalized_" if stands_in_stream else "") + "resid_post"
