"""Blocks between several residual streams."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.blocks.altup import AltUpBlock, Laurel
from hooked_lm.components.blocks.hyper import HashHyperBlock, HyperBlock, written
from hooked_lm.components.hyper_connection import HyperConnection, mixed, weighted_sum
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.components.verification.blocks import attn_identities, mlp_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    common_input_weights,
    identities,
    input_weights,
    norm_identity,
    norm_output,
    output_from_sites,
    sum_of,
    weights_after_norms,
    within,
)


@identities.register
def _(laurel: Laurel, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def projected() -> Tensor:
        return at("hook_pre") @ laurel.W_out

    yield "x W_in == laurel.pre", lambda: (get_input() @ laurel.W_in, at("hook_pre"))
    yield from norm_identity(laurel, "norm", at, projected, label="laurel.norm")


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


def _per_layer_identities(block: AltUpBlock, at: Sites) -> Iterator[Identity]:
    """Identities of the per-layer embedding."""

    def out() -> tuple[Tensor, Tensor]:
        written = output_from_sites(block.per_layer, within(at, "per_layer"))
        return norm_unhooked(norm_of(block, "per_layer_post"), written), at("hook_per_layer_out")

    def added() -> tuple[Tensor, Tensor]:
        others = at("hook_corrected")[:, :, 1:] + at("hook_per_layer_out")[:, :, None]
        return torch.cat([at("hook_corrected")[:, :, :1], others], 2), at("hook_streams_post")

    yield from identities(
        block.per_layer,
        within(at, "per_layer"),
        lambda: block.gate_input(at("hook_corrected")),
        lambda: at("hook_per_layer_in"),
    )
    yield "per_layer.post -> per_layer_out, normed", out
    yield "corrected + per_layer_out (not in the first stream) == streams_post", added


@identities.register
def _(block: AltUpBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    active = block.cfg.altup.active

    def prediction() -> Tensor:
        return at("hook_predicted")[:, :, active]

    def get_input() -> Tensor:
        return norm_output(block, "ln1", at, prediction)

    def mid() -> tuple[Tensor, Tensor]:
        return (prediction() + at("hook_attn_out") + at("hook_laurel_out")) / 2**0.5, at("hook_resid_mid")

    def laurel_out() -> tuple[Tensor, Tensor]:
        return get_input() + output_from_sites(block.laurel, within(at, "laurel")), at("hook_laurel_out")

    yield from _around_identities(block, at, active)
    yield from attn_identities(block, lambda name: prediction() if name == "hook_resid_pre" else at(name), shift)
    yield from identities(block.laurel, within(at, "laurel"), get_input)
    yield "ln1(active of predicted) + laurel == laurel_out", laurel_out
    yield "(active of predicted + attn_out + laurel_out) / sqrt(2) == resid_mid", mid
    yield from mlp_identities(block, at, "hook_resid_mid")
    yield "resid_mid + mlp_out == activated", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_activated")
    yield from _per_layer_identities(block, at)


@weights_after_norms.register
def _(block: AltUpBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it; the output of `ln1` is itself in the stream."""
    return [("ln1", []), ("ln2", common_input_weights(block.mlp))]


def _connection_identities(block: HyperBlock, part: str, streams: str, at: Sites) -> Iterator[Identity]:
    """Identities of what a sublayer reads from the streams at a site."""
    connection, of_connection = getattr(block, part), within(at, part)
    for name in ("read", "write") if connection.cfg.mix is None else ("read", "write", "mix"):

        def weights(name: str = name) -> tuple[Tensor, Tensor]:
            return getattr(connection, name)(at(f"hook_{streams}")), of_connection(f"hook_{name}")

        yield f"{part}: gate of {streams} == {name}", weights
    yield (
        f"{part}: sum of read * {streams} == out",
        lambda: (weighted_sum(at(f"hook_{streams}"), of_connection("hook_read")), of_connection("hook_out")),
    )


def _written_identity(block: HyperBlock, part: str, out: str, before: str, after: str, at: Sites) -> Identity:
    connection: HyperConnection = getattr(block, part)

    def pair() -> tuple[Tensor, Tensor]:
        kept = (
            at(f"hook_{before}") if connection.cfg.mix is None else mixed(at(f"hook_{before}"), at(f"{part}.hook_mix"))
        )
        return written(kept, at(f"hook_{out}"), at(f"{part}.hook_write")), at(f"hook_{after}")

    return f"{before}{'' if connection.cfg.mix is None else ', mixed,'} + write * {out} == {after}", pair


@identities.register
def _(block: HyperBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for place in ("pre", "mid", "post"):

        def means(place: str = place) -> tuple[Tensor, Tensor]:
            return at(f"hook_streams_{place}").mean(2), at(f"hook_resid_{place}")

        yield f"mean of streams_{place} == resid_{place}", means
    if block.cfg.first:
        yield (
            "streams_pre are copies",
            lambda: (at("hook_streams_pre")[:, :, :1].expand_as(at("hook_streams_pre")), at("hook_streams_pre")),
        )
    yield from _connection_identities(block, "attn_hc", "streams_pre", at)
    read = {"hook_resid_pre": "attn_hc.hook_out"}
    yield from attn_identities(block, lambda name: at(read.get(name, name)), shift)
    yield _written_identity(block, "attn_hc", "attn_out", "streams_pre", "streams_mid", at)
    yield from _connection_identities(block, "mlp_hc", "streams_mid", at)
    yield from mlp_identities(block, at, "mlp_hc.hook_out")
    yield _written_identity(block, "mlp_hc", "mlp_out", "streams_mid", "streams_post", at)
    if isinstance(block, HashHyperBlock):
        yield (
            "experts of per_layer_in == expert_indices",
            lambda: (block.mlp.experts_of_token[at("hook_per_layer_in")[..., 0]], at("mlp.hook_expert_indices")),
        )


@weights_after_norms.register
def _(block: HyperBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the streams and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.attn)), ("ln2", common_input_weights(block.mlp))]
