"""Identities of attention after convolutions, and of a router with a state."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hooked_lm.components.attention.multihead import Attention, project
from hooked_lm.components.context import Context
from hooked_lm.components.verification.moe import identities_of_parts
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    identities,
    input_weights,
    norm_identity,
    norm_output,
)
from hooked_lm.families.decoders.zaya.convolutional import ConvolutionalAttention
from hooked_lm.families.decoders.zaya.router_state import RouterStateMoE


@identities.register
def _(
    attn: ConvolutionalAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention after the convolutions, and those of what is convolved and delayed."""

    def values() -> Tensor:
        return project((value_input or get_input)(), attn.W_V, None)

    def convolved(part: int) -> Tensor:
        heads = torch.cat([at("hook_q_proj"), at("hook_k_proj"), values()], 2)
        return attn.split(attn.convolved(heads, Context(heads.shape[1], heads.device)))[part]

    for name, W, b in (("q_proj", attn.W_Q, attn.b_Q), ("k_proj", attn.W_K, attn.b_K)):
        made = partial(project, W=W, b=b)
        yield f"ln1.normalized * w + b -> {name}", partial(_made_and_site, at, name, made, get_input)
    yield "conv(q_proj) + mean == q", lambda: (convolved(0), at("hook_q"))
    yield "conv(k_proj) + mean == k", lambda: (convolved(1), at("hook_k"))
    yield (
        "ln1.normalized of the token or the one before * w + b -> v",
        lambda: (attn.with_bias(convolved(2)), at("hook_v")),
    )
    for name, pair in identities.dispatch(Attention)(attn, at, get_input, value_input):
        if not name.startswith("ln1.normalized"):
            yield name, pair


def _made_and_site(
    at: Sites, name: str, make: Callable[[Tensor], Tensor], get_input: LazyTensor
) -> tuple[Tensor, Tensor]:
    return make(get_input()), at(f"hook_{name}")


@input_weights.register
def _(attn: ConvolutionalAttention) -> list[InputWeight]:
    """None: the values of the first token have a bias where others have a projection."""
    return []


@identities.register
def _(moe: RouterStateMoE, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def state() -> Tensor:
        return at("hook_router_state")

    def logits() -> tuple[Tensor, Tensor]:
        return moe.logits(norm_output(moe, "router_ln", at, state)), at("hook_router_logits")

    previous = partial(at, "hook_prev_state") if moe.cfg.reads_previous else lambda: None
    yield "x W_down + b_down + prev * w_prev == router_state", lambda: (moe.state(get_input(), previous()), state())
    yield from norm_identity(moe, "router_ln", at, state)
    yield "mlp(norm(router_state)) == router_logits", logits
    for name, pair in identities_of_parts(moe, at, get_input, get_input, get_input):
        if not name.endswith("-> router_logits"):
            yield name, pair
