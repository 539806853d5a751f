"""Identities of a norm with a gate."""

from collections.abc import Iterator

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.verification.registry import Identity, Sites, norm_identities
from hooked_lm.families.decoders.axk2.gated_norm import LowRankGatedNorm


@norm_identities.register
def _(norm: LowRankGatedNorm, at: Sites) -> Iterator[Identity]:
    """The identity of the gate."""
    yield (
        "normalized * w -> gate",
        lambda: (norm.gate(RMSNorm.apply_weights(norm, at("hook_normalized"))), at("hook_gate")),
    )
