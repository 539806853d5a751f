"""State-space mixers."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.ssm.decayed_sum import decayed_updates, read_by_queries
from hooked_lm.components.ssm.delta_net import AbstractDeltaNet
from hooked_lm.components.ssm.delta_rule import delta_states
from hooked_lm.components.ssm.lightning import LightningAttention
from hooked_lm.components.ssm.mamba import AbstractMamba
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.components.ssm.mixer import Mixer
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.components.ssm.scan import step_by_step
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
    norm_identity,
    norm_output,
    output_from_sites,
)


def input_identities(mixer: Mixer, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """The identities of the input projections."""
    yield "stream -> x", lambda: (mixer.projected(get_input(), "x"), at("hook_x"))
    yield "stream -> gate", lambda: (mixer.projected(get_input(), "gate"), at("hook_gate"))


@output_from_sites.register
def _(mixer: Mixer, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.output(at("hook_y"), at("hook_gate"))


@identities.register
def _(mixer: AbstractMamba, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def by_steps() -> tuple[Tensor, Tensor]:
        u, dt, B, C = (upcast(at(f"hook_{name}")) for name in ("conv", "dt", "B", "C"))
        states = step_by_step(*mixer.discretized(u, dt, B))
        return mixer.read(states, C) + upcast(mixer.D) * u, at("hook_y")

    def low() -> Tensor:
        return mixer.selected(at("hook_conv"), mixer.W_dt_down)

    yield from input_identities(mixer, at, get_input)
    yield "act(conv(x)) == conv", lambda: (mixer.act(mixer.conv(at("hook_x"))[0]), at("hook_conv"))
    yield "conv -> dt", lambda: (mixer.step_size(norm_output(mixer, "dt_norm", at, low)), at("hook_dt"))
    yield from norm_identity(mixer, "dt_norm", at, low)
    for name, weight in (("B", mixer.W_B), ("C", mixer.W_C)):
        yield from normed_projection(mixer, name, weight, at)
    yield "the recurrence of conv, dt, B, C == y", by_steps


def normed_projection(mixer: AbstractMamba, name: str, weight: Tensor, at: Sites) -> Iterator[Identity]:
    """The identities of B or C, which a norm may follow."""

    def projected() -> Tensor:
        return mixer.selected(at("hook_conv"), weight)

    norm = f"{name}_norm"
    yield f"conv -> {name}", lambda: (norm_output(mixer, norm, at, projected), at(f"hook_{name}"))
    yield from norm_identity(mixer, norm, at, projected)


@identities.register
def _(mixer: Mamba2, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def conv() -> tuple[Tensor, ...]:
        return mixer.convolved(at("hook_x"), get_input())

    def by_steps() -> tuple[Tensor, Tensor]:
        u, dt, B, C = (upcast(at(f"hook_{name}")) for name in ("conv", "dt", "B", "C"))
        u = u.unflatten(-1, (mixer.cfg.n_heads, -1))
        states = step_by_step(*decayed_updates(*mixer.inputs(u, dt, B)))
        return read_by_queries(states, C) + upcast(mixer.D)[:, None] * u, at("hook_y")

    yield from input_identities(mixer, at, get_input)
    yield "stream -> dt", lambda: (mixer.step_size(get_input()), at("hook_dt"))
    yield "act(conv(x)) == conv", lambda: (conv()[0], at("hook_conv"))
    yield "act(conv(stream W_B)) == B", lambda: (conv()[1], at("hook_B"))
    yield "act(conv(stream W_C)) == C", lambda: (conv()[2], at("hook_C"))
    yield "the recurrence of conv, dt, B, C == y", by_steps
    yield from norm_identity(mixer, "norm", at, lambda: mixer.norm_input(at("hook_y"), at("hook_gate")))


@output_from_sites.register
def _(mixer: Mamba2, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    gate = at("hook_gate")
    return mixer.to_stream(norm_output(mixer, "norm", at, lambda: mixer.norm_input(at("hook_y"), gate)), gate)


@identities.register
def _(mixer: RGLRU, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def by_steps() -> tuple[Tensor, Tensor]:
        u, i, a = at("hook_conv"), at("hook_i"), at("hook_a")
        first = (torch.arange(u.shape[1], device=u.device) == 0)[None, :, None]
        return step_by_step(*mixer.discretized(u, i, a, first)), at("hook_y")

    yield from input_identities(mixer, at, get_input)
    yield "conv(x) == conv", lambda: (mixer.conv(at("hook_x"))[0], at("hook_conv"))
    yield "conv -> r", lambda: (mixer.gate(at("hook_conv"), mixer.W_r, mixer.b_r), at("hook_r"))
    yield "conv -> i", lambda: (mixer.gate(at("hook_conv"), mixer.W_i, mixer.b_i), at("hook_i"))
    yield "r -> a", lambda: (mixer.decay(at("hook_r")), at("hook_a"))
    yield "the recurrence of conv, i, a == y", by_steps


@identities.register
def _(mixer: AbstractDeltaNet, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def convolved(name: str) -> tuple[Tensor, Tensor]:
        q, k, v, _ = mixer.convolved(at("hook_q"), at("hook_k"), at("hook_v"))
        return {"q": q, "k": k, "v": v}[name], at(f"hook_conv_{name}")

    def projected(name: str) -> tuple[Tensor, Tensor]:
        return mixer.projected(get_input(), name.upper()), at(f"hook_{name}")

    def by_steps() -> tuple[Tensor, Tensor]:
        q, inputs = mixer.rule_inputs(*(at(f"hook_{name}") for name in ("conv_q", "conv_k", "conv_v", "g", "beta")))
        return (delta_states(inputs, None).states @ q[..., None])[..., 0], at("hook_z")

    for name in ("q", "k", "v"):
        yield f"stream -> {name}", partial(projected, name)
        yield f"act(conv({name})) == conv_{name}", partial(convolved, name)
    yield "stream -> g", lambda: (mixer.log_decay(get_input()), at("hook_g"))
    yield "stream -> beta", lambda: (mixer.written_share(get_input()), at("hook_beta"))
    yield "stream -> gate", lambda: (mixer.gate(get_input()), at("hook_gate"))
    yield "the gated delta rule of conv_q, conv_k, conv_v, g, beta == z", by_steps
    yield from norm_identity(mixer, "norm", at, lambda: at("hook_z"))


@output_from_sites.register
def _(mixer: AbstractDeltaNet, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.written(mixer.norm.apply_weights(at("norm.hook_normalized")), at("hook_gate"))


@identities.register
def _(mixer: LightningAttention, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def projected(name: str) -> tuple[Tensor, Tensor]:
        return mixer.projected(get_input(), name.upper()), at(f"hook_{name}")

    def by_steps() -> tuple[Tensor, Tensor]:
        states = step_by_step(*decayed_updates(*mixer.inputs(at("hook_k"), at("hook_v"))))
        return read_by_queries(states, upcast(at("hook_q"))), at("hook_z")

    for name in ("q", "k", "v"):
        yield f"act(stream W) == {name}", partial(projected, name)
    yield "stream -> gate", lambda: (get_input() @ mixer.W_gate, at("hook_gate"))
    yield "the recurrence of q, k, v == z", by_steps
    yield from norm_identity(mixer, "norm", at, lambda: at("hook_z").flatten(2))


@output_from_sites.register
def _(mixer: LightningAttention, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.written(mixer.norm.apply_weights(at("norm.hook_normalized")), at("hook_gate"))
