"""Identities of self-attention and cross attention in one softmax."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.components.verification.attention import head_identities, mixed, result_identity, score_identity, scored
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    input_weights,
    within,
)
from hooked_lm.families.encoder_decoders.t5gemma2.merged import MergedAttention, MergedBlock


@identities.register
def _(
    attn: MergedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`; those with the source are the block's."""
    yield from head_identities(attn, at, get_input, value_input)
    yield from score_identity(attn, at, lambda: scored(attn, "q", at), lambda: scored(attn, "k", at))
    yield result_identity(attn, at)


@input_weights.register
def _(attn: MergedAttention) -> list[InputWeight]:
    """None that a norm can be folded into: the encoder's output is multiplied by the weights of keys and values too."""
    return []


@identities.register
def _(block: MergedBlock, at: Sites, source: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `source()`."""
    yield from wired_identities(block, at, block.wiring())
    assert isinstance(block.attn, MergedAttention), "the attention of a MergedBlock"
    attn, own, of_source = block.attn, within(at, "attn"), within(at, "cross_attn")
    for name, (W, b) in {"k": (attn.W_K, attn.b_K), "v": attn.value_weights}.items():

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            return add_bias(torch.einsum("bpm,nmh->bpnh", source(), W), b), of_source(f"hook_{name}")

        yield f"encoder's output -> cross_attn.{name}", projected

    def keys() -> Tensor:
        return norm_unhooked(norm_of(attn, "k_norm"), of_source("hook_k"))

    def patterns() -> tuple[Tensor, Tensor]:
        scores = torch.cat([own("hook_attn_scores"), of_source("hook_attn_scores")], -1)
        return softmax(scores, attn.sinks), torch.cat([own("hook_pattern"), of_source("hook_pattern")], -1)

    for name, pair in score_identity(attn, of_source, lambda: scored(attn, "q", own), keys):
        yield f"cross_attn: {name}", pair
    yield "softmax of own scores and those of the source == patterns", patterns
    yield (
        "cross_attn: pattern @ v == z",
        lambda: (mixed(of_source("hook_pattern"), of_source("hook_v")), of_source("hook_z")),
    )
    yield (
        "pattern @ v + cross_attn.z == z",
        lambda: (mixed(own("hook_pattern"), own("hook_v")) + of_source("hook_z"), own("hook_z")),
    )
