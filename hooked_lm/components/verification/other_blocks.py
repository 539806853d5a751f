"""Blocks with mixers, per-layer embeddings, shortcuts and convolutions."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.components.blocks.adapter import AdapterPostNormBlock
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.conv import ConvPostNormBlock
from hooked_lm.components.blocks.deep_norm import DeepNormPart, weighted
from hooked_lm.components.blocks.hybrid import HybridBlock
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock, MixerPart
from hooked_lm.components.blocks.mlp_only import MLPOnlyBlock
from hooked_lm.components.blocks.per_layer import PerLayerBlock, PerLayerEmbed, PerLayerGate
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.blocks.shared import RepeatedEmbed, SharedBlock
from hooked_lm.components.blocks.shortcut import ShortcutEnd, ShortcutStart
from hooked_lm.components.experts.hash_moe import RepeatedIds
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.components.verification.blocks import attn_identities, in_stream_identities, mlp_identities
from hooked_lm.components.verification.moe import with_identity
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Sites,
    common_input_weights,
    identities,
    is_known,
    norm_identity,
    norm_output,
    output_from_sites,
    scaled_output,
    sum_of,
    weights_after_norms,
    within,
)


def mixer_identities(block: MixerPart, at: Sites) -> Iterator[Identity]:
    """Identities from the stream before the mixer to the output of the mixer."""

    def resid() -> Tensor:
        return at("hook_resid_pre")

    def get_input() -> Tensor:
        return norm_output(block, "ln1", at, resid).to(block.mixer_dtype(resid()))

    yield from norm_identity(block, "ln1", at, resid)
    if is_known(block.mixer):
        yield from identities(block.mixer, within(at, "mixer"), get_input)
        yield (
            "y -> mixer_out, normed and scaled",
            lambda: (scaled_output(block, "mixer", "ln1_post", at), at("hook_mixer_out")),
        )


@identities.register
def _(block: MixerBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + mixer_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_mixer_out"], "hook_resid_post")
    yield from mixer_identities(block, at)


@weights_after_norms.register
def _(block: MixerBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.mixer))]


@identities.register
def _(block: MixerMLPBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + mixer_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_mixer_out"], "hook_resid_mid")
    yield "resid_mid + mlp_out == resid_post", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_resid_post")
    yield from mixer_identities(block, at)
    yield from mlp_identities(block, at, "hook_resid_mid")


@weights_after_norms.register
def _(block: MixerMLPBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.mixer)), ("ln2", common_input_weights(block.mlp))]


@identities.register
def _(block: HybridBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield (
        "resid_pre + attn_out + mixer_out == resid_mid",
        sum_of(at, ["hook_resid_pre", "hook_attn_out", "hook_mixer_out"], "hook_resid_mid"),
    )
    yield "resid_mid + mlp_out == resid_post", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_resid_post")
    yield from attn_identities(block, at, shift)
    yield from mixer_identities(block, at)
    yield from mlp_identities(block, at, "hook_resid_mid")


@weights_after_norms.register
def _(block: HybridBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.attn, block.mixer)), ("ln2", common_input_weights(block.mlp))]


@identities.register
def _(module: RepeatedEmbed, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens, with the embedding `embed()`."""
    yield "embed == per_layer.out", lambda: (embed()[:, :, None].expand_as(at("hook_out")), at("hook_out"))


@identities.register
def _(module: RepeatedIds, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens."""
    yield "tokens == per_layer.out", lambda: (tokens[:, :, None, None].expand_as(at("hook_out")), at("hook_out"))


@identities.register
def _(block: SharedBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""

    def wide() -> Tensor:
        return torch.cat([at("hook_resid_pre"), at("hook_per_layer_in")], -1)

    def attn_input() -> Tensor:
        return norm_output(block, "ln1", at, wide)

    def attn_out() -> Tensor:
        return at("hook_attn_mixed")

    def mixer_stream() -> Tensor:
        return at("hook_resid_pre") + at("hook_shared_out")

    yield "resid_pre + mixer_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_mixer_out"], "hook_resid_post")
    yield from norm_identity(block, "ln1", at, wide)
    yield from norm_identity(block, "ln2", at, attn_out)
    yield from norm_identity(block, "ln3", at, mixer_stream)
    yield "transformed W_shared == shared_out", lambda: (at("hook_transformed") @ block.W_shared, at("hook_shared_out"))
    inputs = {
        "attn": (attn_input, attn_input),
        "mlp": (lambda: norm_output(block, "ln2", at, attn_out),),
        "mixer": (lambda: norm_output(block, "ln3", at, mixer_stream),),
    }
    for part, out in {"attn": "hook_attn_mixed", "mlp": "hook_transformed", "mixer": "hook_mixer_out"}.items():
        module = getattr(block, part)
        if is_known(module):
            yield from identities(module, within(at, part), *inputs[part])
            yield f"{part} == {out}", partial(_output_and_site, module, at, part, out)


def _output_and_site(module: nn.Module, at: Sites, part: str, site: str) -> tuple[Tensor, Tensor]:
    """The output of a part of a block from its sites, and the value at its site."""
    return output_from_sites(module, within(at, part)), at(site)


@weights_after_norms.register
def _(block: SharedBlock) -> list[tuple[str, list[InputWeight]]]:
    """The norm before the mixer; those of the shared transformer belong to several blocks."""
    return [("ln3", common_input_weights(block.mixer))]


@identities.register
def _(block: MLPOnlyBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + mlp_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_mlp_out"], "hook_resid_post")
    yield from mlp_identities(block, at, "hook_resid_pre")


@weights_after_norms.register
def _(block: MLPOnlyBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln2", common_input_weights(block.mlp))]


@identities.register
def _(module: PerLayerEmbed, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens, with the embedding `embed()`."""

    def projected() -> Tensor:
        return module.projected(embed())

    yield from norm_identity(module, "norm", at, projected, label="per_layer.norm")
    yield (
        "(normalized * w + W_E[token]) / sqrt(2) == per_layer.out",
        lambda: ((norm_output(module, "norm", at, projected) + module.rows(tokens)) * 2**-0.5, at("hook_out")),
    )


@identities.register
def _(gate: PerLayerGate, at: Sites, get_input: LazyTensor, embedded: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with inputs `get_input()` and `embedded()`."""
    yield "x W_gate == per_layer.pre", lambda: (get_input() @ gate.W_gate, at("hook_pre"))
    yield "act(pre) * per_layer_in == per_layer.post", lambda: (gate.act(at("hook_pre")) * embedded(), at("hook_post"))


@output_from_sites.register
def _(gate: PerLayerGate, at: Sites) -> Tensor:
    """The output, from the input of `W_out`."""
    return at("hook_post") @ gate.W_out


@identities.register
def _(block: ShortcutStart, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield from identities.dispatch(PreNormBlock)(block, at, shift)
    sites = within(at, "shortcut")

    def get_input() -> Tensor:
        return norm_output(block, "ln2", at, lambda: at("hook_resid_mid"))

    for name, pair in identities(block.shortcut, sites, get_input):
        yield f"shortcut: {name}", pair
    yield (
        "shortcut: post, and ln2.normalized of identity experts -> out",
        lambda: (with_identity(block.shortcut, sites, get_input), sites("hook_out")),
    )


@weights_after_norms.register
def _(block: ShortcutStart) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it; identity experts are no weights."""
    after_ln2 = [] if block.cfg.shortcut.n_identity else common_input_weights(block.mlp, block.shortcut)
    return [("ln1", common_input_weights(block.attn)), ("ln2", after_ln2)]


@identities.register
def _(block: ShortcutEnd, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for name, pair in identities.dispatch(PreNormBlock)(block, at, shift):
        if not name.startswith("post -> mlp_out"):
            yield name, pair
    yield (
        "post -> mlp_out, with shortcut_out",
        lambda: (
            output_from_sites(block.mlp, within(at, "mlp")) + at("hook_shortcut_out"),
            at("hook_mlp_out"),
        ),
    )


@identities.register
def _(block: PerLayerBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_mid")

    def before_gate() -> Tensor:
        return at("hook_resid_mid") + at("hook_mlp_out")

    if block.cfg.per_layer is None:
        yield (
            "(resid_mid + mlp_out) * scale == resid_post",
            lambda: (before_gate() * block.scale, at("hook_resid_post")),
        )
        return
    sites = within(at, "per_layer")
    yield from identities(block.per_layer, sites, before_gate, lambda: at("hook_per_layer_in"))
    yield (
        "per_layer.post -> per_layer_out, normed",
        lambda: (
            norm_unhooked(norm_of(block, "per_layer_post"), output_from_sites(block.per_layer, sites)),
            at("hook_per_layer_out"),
        ),
    )
    yield (
        "(resid_mid + mlp_out + per_layer_out) * scale == resid_post",
        lambda: ((before_gate() + at("hook_per_layer_out")) * block.scale, at("hook_resid_post")),
    )


@identities.register
def _(block: ConvPostNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for name, pair in identities.dispatch(PostNormBlock)(block, at, shift):
        if not name.endswith("== normalized_resid_post"):
            yield name, pair

    def summed() -> tuple[Tensor, Tensor]:
        left = norm_output(block, "ln2", at, lambda: at("hook_resid_post"))
        return left + at("hook_conv_out"), at("hook_resid_conv")

    yield "conv(resid_pre) == conv_pre", lambda: (block.convolved(at("hook_resid_pre")), at("hook_conv_pre"))
    yield "act(conv_pre) == conv_out", lambda: (block.conv_act(at("hook_conv_pre")), at("hook_conv_out"))
    yield "ln2(resid_post) + conv_out == resid_conv", summed
    yield from in_stream_identities(block, "ln3", "resid_conv", at, result="normalized_resid_post")


@identities.register
def _(block: DeepNormPart, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    part = "mixer" if isinstance(block, MixerPart) else "attn"
    before = {"mid": ("resid_pre", f"{part}_out"), "post": ("normalized_resid_mid", "mlp_out")}
    weights = {"mid": block.cfg.mid_weights, "post": block.cfg.post_weights}

    def summed(place: str) -> tuple[Tensor, Tensor]:
        stream, out = (at(f"hook_{name}") for name in before[place])
        return weighted(weights[place], stream, out), at(f"hook_resid_{place}")

    for place, (stream, out) in before.items():
        yield f"a {stream} + b {out} == resid_{place}", partial(summed, place)
    yield from in_stream_identities(block, "ln1", "resid_mid", at)
    yield from in_stream_identities(block, "ln2", "resid_post", at)
    for name, stream in ((part, "resid_pre"), ("mlp", "normalized_resid_mid")):
        if is_known(module := getattr(block, name)):
            yield from identities(module, within(at, name), partial(at, f"hook_{stream}"))
            yield f"{name} -> {name}_out", partial(_sublayer_output, block, name, at)


def _sublayer_output(block: DeepNormPart, name: str, at: Sites) -> tuple[Tensor, Tensor]:
    return output_from_sites(getattr(block, name), within(at, name)), at(f"hook_{name}_out")


@weights_after_norms.register
def _(block: DeepNormPart) -> list[tuple[str, list[InputWeight]]]:
    """None: the output of each norm is the stream."""
    return []


@identities.register
def _(block: AdapterPostNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for name, pair in identities.dispatch(PostNormBlock)(block, at, shift):
        if not name.endswith("== resid_post"):
            yield name, pair
    base = "adapter_in" if block.cfg.adds_normalized else "resid_mlp"
    yield (
        "normalized_resid_mid + mlp_out == resid_mlp",
        sum_of(at, ["hook_normalized_resid_mid", "hook_mlp_out"], "hook_resid_mlp"),
    )
    if block.cfg.adapter_ln is not None:
        yield from norm_identity(block, "adapter_ln", at, lambda: at("hook_resid_mlp"))
    yield "norm(resid_mlp) == adapter_in", lambda: (adapter_input(block, at), at("hook_adapter_in"))
    yield from identities(block.adapter, within(at, "adapter"), lambda: at("hook_adapter_in"))
    yield (
        "post -> adapter_out",
        lambda: (output_from_sites(block.adapter, within(at, "adapter")), at("hook_adapter_out")),
    )
    yield f"{base} + adapter_out == resid_post", sum_of(at, [f"hook_{base}", "hook_adapter_out"], "hook_resid_post")


def adapter_input(block: AdapterPostNormBlock, at: Sites) -> Tensor:
    """The normalised value that the adapter reads."""
    resid = at("hook_resid_mlp")
    if block.cfg.adapter_ln is None:
        return block.adapter_norm(resid)
    return norm_output(block, "adapter_ln", at, lambda: resid)
