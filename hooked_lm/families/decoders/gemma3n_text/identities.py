"""Identities of alternating updates."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.blocks.wiring import MID, Sublayer, Sum, Wiring, added, attn_step, mlp_step
from hooked_lm.components.verification.blocks import weights_of, wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    identities,
    input_weights,
    norm_identity,
    norm_output,
    output_from_sites,
    weights_after_norms,
)
from hooked_lm.families.decoders.gemma3n_text.altup import AltUpBlock, Laurel


@identities.register
def _(laurel: Laurel, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def projected() -> Tensor:
        return at("hook_pre") @ laurel.W_out

    yield "x W_in == pre", lambda: (get_input() @ laurel.W_in, at("hook_pre"))
    yield from norm_identity(laurel, "norm", at, projected)


@output_from_sites.register
def _(laurel: Laurel, at: Sites) -> Tensor:
    """What the branch adds to its input, from the site of its norm."""
    return norm_output(laurel, "norm", at, lambda: at("hook_pre") @ laurel.W_out)


@input_weights.register
def _(laurel: Laurel) -> list[InputWeight]:
    """None that a norm could be folded into, as the input is itself part of the output."""
    return []


def _around_identities(block: AltUpBlock, at: Sites, active: int) -> Iterator[Identity]:
    """Identities of prediction and correction."""
    altup = block.altup

    def streams() -> Tensor:
        return at("hook_streams_pre")

    def predicted() -> Tensor:
        return at("hook_predict_coefs") @ streams() + streams()

    def corrected() -> Tensor:
        change = at("hook_activated") - at("hook_predicted")[:, :, active]
        return at("hook_predicted") + at("hook_correct_coefs")[..., None] * change[:, :, None]

    if block.cfg.split is not None:
        yield "split(embed) == streams_pre", lambda: (block.split(streams()[:, :, 0]), streams())
    yield "active of streams_pre == resid_pre", lambda: (streams()[:, :, active], at("hook_resid_pre"))
    yield (
        "gates(resid_pre) W_predict == predict_coefs",
        lambda: (altup.predict_coefs(at("hook_resid_pre")), at("hook_predict_coefs")),
    )
    yield "streams_pre + predict_coefs @ streams_pre == predicted", lambda: (predicted(), at("hook_predicted"))
    yield (
        "1 + gates(activated) W_correct == correct_coefs",
        lambda: (altup.correct_coefs(at("hook_activated")), at("hook_correct_coefs")),
    )
    yield (
        "predicted + correct_coefs * (activated - active of predicted) == corrected",
        lambda: (corrected(), at("hook_corrected")),
    )
    yield (
        "active of streams_post == resid_post",
        lambda: (at("hook_streams_post")[:, :, active], at("hook_resid_post")),
    )


ACTIVE, NORMALIZED, OF_GATE = "active of predicted", "ln1(active of predicted)", "gate's input"  # values without a site


def _layer(block: AltUpBlock) -> Wiring:
    """What the layer does with the prediction of the active stream."""
    attn, mlp, half = attn_step(block, ACTIVE), mlp_step(block), 0.5**0.5
    laurel = Sublayer("laurel", ACTIVE, "branch", "ln1")
    laurel_out = Sum("hook_laurel_out", NORMALIZED, (laurel.writes,))
    mid = Sum(MID, ACTIVE, (attn.writes, laurel_out.gives), weights=(half, half))
    gate = Sublayer("per_layer", OF_GATE, "hook_per_layer_out", post="per_layer_post", beside=("hook_per_layer_in",))
    return Wiring((attn, laurel, laurel_out, mid, mlp, added("hook_activated", mlp), gate))


@identities.register
def _(block: AltUpBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    active = block.cfg.altup.active

    def prediction() -> Tensor:
        return at("hook_predicted")[:, :, active]

    def after() -> tuple[Tensor, Tensor]:
        others = at("hook_corrected")[:, :, 1:] + at("hook_per_layer_out")[:, :, None]
        return torch.cat([at("hook_corrected")[:, :, :1], others], 2), at("hook_streams_post")

    made = {
        ACTIVE: prediction,
        NORMALIZED: lambda: norm_output(block, "ln1", at, prediction),
        OF_GATE: lambda: block.gate_input(at("hook_corrected")),
    }
    yield from _around_identities(block, at, active)
    yield from wired_identities(block, lambda name: made[name]() if name in made else at(name), _layer(block), shift)
    yield "corrected + per_layer_out (not in the first stream) == streams_post", after


@weights_after_norms.register
def _(block: AltUpBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it; the output of `ln1` is itself in the stream."""
    return weights_of(block, _layer(block))
