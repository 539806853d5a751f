"""Mixtures of experts."""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.experts.moe import AbstractMoE, InputWeightedMoE
from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Pair,
    Sites,
    add_bias,
    identities,
    output_from_sites,
    within,
)


@identities.register
def _(moe: AbstractMoE, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from identities_of_parts(moe, at, get_input, get_input, get_input)


def identities_of_parts(
    moe: AbstractMoE, at: Sites, router: LazyTensor, experts: LazyTensor, shared: LazyTensor
) -> Iterator[Identity]:
    """The same, for separate inputs of router, experts and shared expert."""
    yield (
        "ln2.normalized * w + b -> router_logits",
        lambda: (add_bias(upcast(router()) @ upcast(moe.W_router), moe.b_router), at("hook_router_logits")),
    )
    yield from choice_identities(moe, at)
    of_experts = [dict(_identities_of(moe, e, at, experts)) for e in range(len(moe.experts))]
    for name in of_experts[0]:
        yield f"experts: {name}", _together([of_expert[name] for of_expert in of_experts])
    if moe.shared is not None:
        for name, pair in identities(moe.shared, within(at, "shared"), shared):
            yield f"shared: {name}", pair
    if moe.cfg.shared_gate:
        yield (
            "sigmoid(ln2.normalized -> gate) == shared_gate",
            lambda: (moe.shared_gate(shared()), at("hook_shared_gate")),
        )


@singledispatch
def choice_identities(moe: AbstractMoE, at: Sites) -> Iterator[Identity]:
    """The identities of the choice of experts."""
    yield (
        "router(router_logits) == expert_weights",
        lambda: (moe.choice(at("hook_router_logits"))[0], at("hook_expert_weights")),
    )
    yield (
        "router(router_logits) == expert_indices",
        lambda: (moe.choice(at("hook_router_logits"))[1], at("hook_expert_indices")),
    )


def _identities_of(moe: AbstractMoE, e: int, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    def sent() -> Tensor:
        x = get_input()[_positions(e, at).unbind(-1)]
        return x * _weights(e, at) if isinstance(moe, InputWeightedMoE) else x

    expert: Any = moe.experts[e]
    yield from identities(expert, within(at, f"experts.{e}"), sent)


def _positions(e: int, at: Sites) -> Int[Tensor, "routed 2"]:
    return at(f"experts.{e}.hook_routed_positions").long()


def _weights(e: int, at: Sites) -> Float[Tensor, "routed 1"]:
    return at("hook_expert_weights")[at("hook_expert_indices") == e][:, None]


def with_identity(moe: AbstractMoE, at: Sites, get_input: LazyTensor) -> Tensor:
    """The output of a mixture with choices whose output is its input."""
    weight = moe.identity_weight(at("hook_expert_weights"), at("hook_expert_indices"))
    return output_from_sites(moe, at) + (get_input() * weight).to(moe.W_router.dtype)


@output_from_sites.register
def _(moe: AbstractMoE, at: Sites) -> Tensor:
    """The output, from the inputs of the experts' `W_out`."""
    out = mix_from_sites(moe, at)
    if moe.shared is not None:
        shared = output_from_sites(moe.shared, within(at, "shared"))
        out = out + (shared * at("hook_shared_gate") if moe.cfg.shared_gate else shared)
    return add_bias(out * moe.cfg.out_scale, moe.b_out)


def mix_from_sites(moe: AbstractMoE, at: Sites) -> Tensor:
    """The weighted sum of the outputs of the chosen experts."""
    weights = at("hook_expert_weights")
    out = weights.new_zeros(*weights.shape[:2], moe.cfg.d_model)
    experts: list[Any] = list(moe.experts)
    for e, expert in enumerate(experts):
        made = output_from_sites(expert, within(at, f"experts.{e}"))
        made = made if isinstance(moe, InputWeightedMoE) else made * _weights(e, at)
        out.index_put_(_positions(e, at).unbind(-1), made.to(out.dtype), accumulate=True)
    return out


def _together(pairs: list[Pair]) -> Pair:
    """The pairs of all experts as one pair."""

    def flat(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    def pair() -> tuple[Tensor, Tensor]:
        left, right = zip(*(pair() for pair in pairs), strict=True)
        return flat(left), flat(right)

    return pair
