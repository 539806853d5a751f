"""Identities of RWKV's mixers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
    Sites,
    identities,
    input_weights,
    output_from_sites,
    output_weights,
)
from hooked_lm.families.decoders.rwkv.channel_mix import ChannelMix
from hooked_lm.families.decoders.rwkv.token_shift import previous
from hooked_lm.families.decoders.rwkv.wkv import WKV


def shifted(mixer: WKV | ChannelMix, at: Sites, get_input: LazyTensor, sites: dict[str, str]) -> Iterator[Identity]:
    """The identities of the token shift, and of the projections at `sites` from it."""

    def projected(name: str, site: str) -> Pair:
        return lambda: (mixer.projected(get_input(), at("hook_prev"), name), at(site))

    yield "stream of the previous token == prev", lambda: (previous(get_input())[0], at("hook_prev"))
    for name, site in sites.items():
        yield f"stream, prev -> {site.removeprefix('hook_')}", projected(name, site)


@identities.register
def _(mixer: WKV, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""

    def averaged() -> tuple[Tensor, Tensor]:
        """As one softmax over all tokens up to each."""
        k, v, n_pos = upcast(at("hook_k")), upcast(at("hook_v")), at("hook_k").shape[1]
        pos = torch.arange(n_pos, device=k.device)
        ages = (pos[:, None] - pos - 1)[..., None]
        past = k[:, None] - ages * upcast(mixer.decay).exp()
        weights = torch.where(ages < 0, k[:, None] + upcast(mixer.bonus), past).masked_fill(ages < -1, float("-inf"))
        return (weights.softmax(2) * v[:, None]).sum(2), at("hook_y")

    yield from shifted(mixer, at, get_input, {"K": "hook_k", "V": "hook_v", "R": "hook_r"})
    yield "the average of v with weights exp(k), by age == y", averaged


@identities.register
def _(mixer: ChannelMix, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""
    yield from shifted(mixer, at, get_input, {"in": "hook_pre", "gate": "hook_gate"})
    yield "act(pre) == post", lambda: (mixer.act(at("hook_pre")), at("hook_post"))


@output_from_sites.register
def _(mixer: WKV, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.output(at("hook_y"), at("hook_r"))


@output_from_sites.register
def _(mixer: ChannelMix, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return mixer.output(at("hook_post"), at("hook_gate"))


@input_weights.register(WKV)
@input_weights.register(ChannelMix)
def _(mixer: WKV | ChannelMix) -> list[InputWeight]:
    """None: the first token mixes its input with zero, in which no norm could be folded."""
    return []


@output_weights.register
def _(mixer: ChannelMix) -> list[Tensor]:
    """None: the gate is between the weights and the output."""
    return []
