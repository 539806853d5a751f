"""Blocks with mixers, per-layer embeddings and convolutions."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.blocks.conv import ConvPostNormBlock
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock, MixerPart
from hooked_lm.components.blocks.per_layer import PerLayerBlock, PerLayerEmbed, PerLayerGate
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.norm import norm_of
from hooked_lm.components.verification.blocks import attn_identities, mlp_identities
from hooked_lm.components.verification.registry import (
    Identity,
    Read,
    Reader,
    Sites,
    added,
    below,
    identities,
    input_weights,
    is_known,
    norm_identity,
    norm_readers,
    normed,
    output_from_sites,
    output_weights,
    readers_of,
    sum_of,
)


def mixer_identities(block: MixerPart, at: Sites) -> Iterator[Identity]:
    """Identities from the stream before the mixer to the output of the mixer."""

    def resid() -> Tensor:
        return at("hook_resid_pre")

    def read() -> Tensor:
        return normed(block.ln1, below(at, "ln1"), resid).to(block.mixer_dtype(resid()))

    yield from norm_identity("ln1", block.ln1, below(at, "ln1"), resid)
    if is_known(block.mixer):
        yield from identities(block.mixer, below(at, "mixer"), read)
        yield (
            "y -> mixer_out, normed and scaled",
            lambda: (
                added(
                    output_from_sites(block.mixer, below(at, "mixer")),
                    norm_of(block, "ln1_post"),
                    block.cfg.residual_scale,
                ),
                at("hook_mixer_out"),
            ),
        )


@identities.register
def _(block: MixerBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + mixer_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_mixer_out"], "hook_resid_post")
    yield from mixer_identities(block, at)


@norm_readers.register
def _(block: MixerBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.mixer))]


@identities.register
def _(block: MixerMLPBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + mixer_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_mixer_out"], "hook_resid_mid")
    yield "resid_mid + mlp_out == resid_post", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_resid_post")
    yield from mixer_identities(block, at)
    yield from mlp_identities(block, at, "hook_resid_mid")


@norm_readers.register
def _(block: MixerMLPBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.mixer)), ("ln2", readers_of(block.mlp))]


@identities.register
def _(module: PerLayerEmbed, at: Sites, embed: Read, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens, with the embedding `embed()`."""
    norm_at = below(at, "norm")

    def projected() -> Tensor:
        return module.projected(embed())

    yield from norm_identity("per_layer.norm", module.norm, norm_at, projected)
    yield (
        "(normalized * w + W_E[token]) / sqrt(2) == per_layer.out",
        lambda: ((normed(module.norm, norm_at, projected) + module.rows(tokens)) * 2**-0.5, at("hook_out")),
    )


@identities.register
def _(gate: PerLayerGate, at: Sites, read: Read, given: Read) -> Iterator[Identity]:
    """Identities between the sites of a run with inputs `read()` and `given()`."""
    yield "resid_mid + mlp_out -> per_layer.pre", lambda: (read() @ gate.W_gate, at("hook_pre"))
    yield "act(pre) * given == per_layer.post", lambda: (gate.act(at("hook_pre")) * given(), at("hook_post"))


@output_from_sites.register
def _(gate: PerLayerGate, at: Sites) -> Tensor:
    """The output, from the input of `W_out`."""
    return at("hook_post") @ gate.W_out


@input_weights.register
def _(gate: PerLayerGate) -> list[Reader]:
    """The weight that reads the stream."""
    return [(gate, "W_gate", "")]


@output_weights.register
def _(gate: PerLayerGate) -> list[Tensor]:
    """The weight that writes the output."""
    return [gate.W_out]


@identities.register
def _(block: PerLayerBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
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
    given = below(at, "per_layer")
    yield from identities(block.per_layer, given, before_gate, lambda: at("hook_per_layer_in"))
    yield (
        "per_layer.post -> per_layer_out, normed",
        lambda: (
            added(output_from_sites(block.per_layer, given), norm_of(block, "per_layer_post"), 1.0),
            at("hook_per_layer_out"),
        ),
    )
    yield (
        "(resid_mid + mlp_out + per_layer_out) * scale == resid_post",
        lambda: ((before_gate() + at("hook_per_layer_out")) * block.scale, at("hook_resid_post")),
    )


@identities.register
def _(block: ConvPostNormBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for name, pair in identities.dispatch(PostNormBlock)(block, at, shift):
        if not name.endswith("== normalized_resid_post"):
            yield name, pair

    def summed() -> tuple[Tensor, Tensor]:
        left = normed(block.ln2, below(at, "ln2"), lambda: at("hook_resid_post"))
        return left + at("hook_conv_out"), at("hook_resid_conv")

    def stands_in_stream() -> tuple[Tensor, Tensor]:
        made = normed(block.ln3, below(at, "ln3"), lambda: at("hook_resid_conv"))
        return made, at("hook_normalized_resid_post")

    yield "conv(resid_pre) == conv_pre", lambda: (block.convolved(at("hook_resid_pre")), at("hook_conv_pre"))
    yield "act(conv_pre) == conv_out", lambda: (block.conv_act(at("hook_conv_pre")), at("hook_conv_out"))
    yield "ln2(resid_post) + conv_out == resid_conv", summed
    yield from norm_identity("ln3", block.ln3, below(at, "ln3"), lambda: at("hook_resid_conv"))
    yield "ln3(resid_conv) == normalized_resid_post", stands_in_stream
