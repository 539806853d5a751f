"""Identities of attention to the keys of an earlier layer, and of experts between norms."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.norms.norm import norm_unhooked
from hooked_lm.components.verification.attention import mixing_identities, same_lengths
from hooked_lm.components.verification.moe import identities_of_parts, mix_from_sites
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
    output_from_sites,
    output_weights,
    within,
)
from hooked_lm.families.decoders.gemma4_text.normed_moe import NormedMoE
from hooked_lm.families.decoders.gemma4_text.shared_kv import SharedKVAttention


@identities.register
def _(moe: NormedMoE, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def through(name: str) -> Tensor:
        return norm_output(moe, name, at, get_input)

    for name in ("ln_router", "ln_experts", "ln_shared"):
        yield from norm_identity(moe, name, at, get_input)
    yield from identities_of_parts(
        moe,
        at,
        lambda: through("ln_router") * moe.cfg.d_model**-0.5,
        lambda: through("ln_experts"),
        lambda: through("ln_shared"),
    )


@output_from_sites.register
def _(moe: NormedMoE, at: Sites) -> Tensor:
    """The output, from the inputs of `W_out` of the MLP and the experts."""
    assert moe.shared is not None
    shared = norm_unhooked(moe.ln_shared_post, output_from_sites(moe.shared, within(at, "shared")))
    return shared + norm_unhooked(moe.ln_experts_post, mix_from_sites(moe, at))


@input_weights.register
def _(moe: NormedMoE) -> list[InputWeight]:
    """None: norms are between the stream and all weights."""
    return []


@output_weights.register
def _(moe: NormedMoE) -> list[Tensor]:
    """None: norms are between all weights and the output."""
    return []


@identities.register
def _(
    attn: SharedKVAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield (
        "ln1.normalized * w + b -> q",
        lambda: (add_bias(torch.einsum("bpm,nmh->bpnh", get_input(), attn.W_Q), attn.b_Q), at("hook_q")),
    )

    def q() -> Tensor:
        return norm_output(attn, "q_norm", at, lambda: at("hook_q"))

    yield "rotary(q) keeps lengths", same_lengths(attn.cfg.rotary, q, lambda: at("hook_rot_q"))
    yield from mixing_identities(attn, at)
