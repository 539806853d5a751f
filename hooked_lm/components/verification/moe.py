"""Mixtures of experts."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.experts.hash_moe import HashMoE
from hooked_lm.components.experts.moe import InputWeightedMoE, MoE
from hooked_lm.components.experts.normed_moe import NormedMoE
from hooked_lm.components.experts.router_state import RouterStateMoE
from hooked_lm.components.norms.norm import norm_unhooked, upcast
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
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


@identities.register
def _(moe: MoE, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from identities_of_parts(moe, at, get_input, get_input, get_input)


def identities_of_parts(
    moe: MoE, at: Sites, router: LazyTensor, experts: LazyTensor, shared: LazyTensor
) -> Iterator[Identity]:
    """The same, for separate inputs of router, experts and shared expert."""
    yield (
        "ln2.normalized * w + b -> router_logits",
        lambda: (add_bias(upcast(router()) @ upcast(moe.W_router), moe.b_router), at("hook_router_logits")),
    )
    if isinstance(moe, HashMoE):
        yield (
            "weights of expert_indices == expert_weights",
            lambda: (moe.weigh(at("hook_router_logits"), at("hook_expert_indices")), at("hook_expert_weights")),
        )
    else:
        yield (
            "router(router_logits) == expert_weights",
            lambda: (moe.choice(at("hook_router_logits"))[0], at("hook_expert_weights")),
        )
        yield (
            "router(router_logits) == expert_indices",
            lambda: (moe.choice(at("hook_router_logits"))[1], at("hook_expert_indices")),
        )
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


def _identities_of(moe: MoE, e: int, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    def sent() -> Tensor:
        x = get_input()[_positions(e, at).unbind(-1)]
        return x * _weights(e, at) if isinstance(moe, InputWeightedMoE) else x

    expert: Any = moe.experts[e]
    yield from identities(expert, within(at, f"experts.{e}"), sent)


def _positions(e: int, at: Sites) -> Int[Tensor, "routed 2"]:
    return at(f"experts.{e}.hook_routed_positions").long()


def _weights(e: int, at: Sites) -> Float[Tensor, "routed 1"]:
    return at("hook_expert_weights")[at("hook_expert_indices") == e][:, None]


def with_identity(moe: MoE, at: Sites, get_input: LazyTensor) -> Tensor:
    """The output of a mixture with choices whose output is its input."""
    weight = moe.identity_weight(at("hook_expert_weights"), at("hook_expert_indices"))
    return output_from_sites(moe, at) + (get_input() * weight).to(moe.W_router.dtype)


@output_from_sites.register
def _(moe: MoE, at: Sites) -> Tensor:
    """The output, from the inputs of the experts' `W_out`."""
    out = mix_from_sites(moe, at)
    if moe.shared is not None:
        shared = output_from_sites(moe.shared, within(at, "shared"))
        out = out + (shared * at("hook_shared_gate") if moe.cfg.shared_gate else shared)
    return add_bias(out * moe.cfg.out_scale, moe.b_out)


def mix_from_sites(moe: MoE, at: Sites) -> Tensor:
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
