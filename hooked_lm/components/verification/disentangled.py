"""Disentangled attention."""

from collections.abc import Iterator

from hooked_lm.components.attention.disentangled import DisentangledAttention
from hooked_lm.components.verification.attention import mixing_identities, products, projection_identities
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
)


@identities.register
def _(
    attn: DisentangledAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from projection_identities(attn, at, get_input)
    terms = ["hook_c2p"] * attn.cfg.c2p + ["hook_p2c"] * attn.cfg.p2c
    yield "q k^T * scale + c2p + p2c == attn_scores, where a key is real", products(attn.scale, at, terms)
    yield from mixing_identities(attn, at)
