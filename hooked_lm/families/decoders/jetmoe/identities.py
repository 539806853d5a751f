"""Identities of attention whose heads a router chooses."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.verification.attention import gated
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention


@identities.register
def _(
    attn: RoutedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the router."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)
    yield "ln1.normalized * w + b -> router_logits", lambda: (attn.router_logits(get_input()), at("hook_router_logits"))
    for index, name in enumerate(("expert_weights", "expert_indices")):

        def chosen(index: int = index, name: str = name) -> tuple[Tensor, Tensor]:
            return attn.choice(at("hook_router_logits"))[index], at(f"hook_{name}")

        yield f"router(router_logits) == {name}", chosen


@gated.register
def _(attn: RoutedAttention, at: Sites, z: Tensor) -> Tensor:
    """Times the weights of the chosen heads."""
    return z * attn.of_heads(at("hook_expert_weights"), at("hook_expert_indices"))
