"""Identities of attention with weights of groups of dimensions."""

from collections.abc import Iterator

from hooked_lm.components.verification.attention import mixing_identities, projection_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.families.encoders.squeezebert.grouped import GroupedAttention


@identities.register
def _(
    attn: GroupedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`, by the whole matrices."""
    yield from projection_identities(attn, at, get_input)
    yield from mixing_identities(attn, at, lambda: at("hook_q"), lambda: at("hook_k"))
