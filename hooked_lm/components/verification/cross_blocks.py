"""Blocks with cross attention."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.blocks.cross import CrossPart, PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.verification.blocks import attn_identities, attn_out_identity, in_stream_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
    Sites,
    common_input_weights,
    identities,
    is_known,
    norm_identity,
    norm_output,
    scaled_output,
    weights_after_norms,
    within,
)


def written_identities(
    block: CrossPart, at: Sites, cross_input: LazyTensor, mlp_input: LazyTensor, source: LazyTensor | None
) -> Iterator[Identity]:
    """Identities in cross attention and the MLP, and from there to their terms of the stream."""
    if isinstance(block.cross_attn, CrossAttention):
        for name, pair in identities(block.cross_attn, within(at, "cross_attn"), cross_input, source):
            yield f"cross attention: {name}", pair
        yield (
            "cross attention: sum of results + b_O == cross_attn_out",
            lambda: (scaled_output(block, "cross_attn", "ln2_post", at), at("hook_cross_attn_out")),
        )
    if is_known(block.mlp):
        yield from identities(block.mlp, within(at, "mlp"), mlp_input)
        yield (
            "post -> mlp_out",
            lambda: (scaled_output(block, "mlp", "ln3_post", at), at("hook_mlp_out")),
        )


def _sums(at: Sites, before_attn: str, before_cross: str, before_mlp: str) -> Iterator[Identity]:
    """The stream after a sublayer is the stream before it plus the output."""
    for before, out, after in (
        (before_attn, "attn_out", "resid_mid"),
        (before_cross, "cross_attn_out", "resid_mid_cross"),
        (before_mlp, "mlp_out", "resid_post"),
    ):
        yield f"{before} + {out} == {after}", _sum(at, before, out, after)


def _sum(at: Sites, before: str, out: str, after: str) -> Pair:
    return lambda: (at(f"hook_{before}") + at(f"hook_{out}"), at(f"hook_{after}"))


@identities.register
def _(block: PreNormCrossBlock, at: Sites, source: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `source()`."""
    yield from _sums(at, "resid_pre", "resid_mid", "resid_mid_cross")
    yield from attn_identities(block, at)
    inputs = {}
    for name, site in (("ln2", "hook_resid_mid"), ("ln3", "hook_resid_mid_cross")):

        def resid(site: str = site) -> Tensor:
            return at(site)

        def get_input(name: str = name, resid: LazyTensor = resid) -> Tensor:
            return norm_output(block, name, at, resid)

        inputs[name] = get_input
        yield from norm_identity(block, name, at, resid)
    yield from written_identities(block, at, inputs["ln2"], inputs["ln3"], source)


@weights_after_norms.register
def _(block: PreNormCrossBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [
        ("ln1", common_input_weights(block.attn)),
        ("ln2", common_input_weights(block.cross_attn)),
        ("ln3", common_input_weights(block.mlp)),
    ]


@identities.register
def _(block: PostNormCrossBlock, at: Sites, source: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `source()`."""
    yield from _sums(at, "resid_pre", "normalized_resid_mid", "normalized_resid_mid_cross")
    for norm, site in (("ln1", "resid_mid"), ("ln2", "resid_mid_cross"), ("ln3", "resid_post")):
        yield from in_stream_identities(block, norm, site, at)
    if is_known(block.attn):
        yield from identities(block.attn, within(at, "attn"), lambda: at("hook_resid_pre"))
        yield from attn_out_identity(block, at)
    cross_input, mlp_input = "hook_normalized_resid_mid", "hook_normalized_resid_mid_cross"
    yield from written_identities(block, at, lambda: at(cross_input), lambda: at(mlp_input), source)


@weights_after_norms.register
def _(block: PostNormCrossBlock) -> list[tuple[str, list[InputWeight]]]:
    """None: the output of each norm is the stream."""
    return []
