"""Blocks with cross attention."""

from collections.abc import Iterator

from torch import Tensor, nn

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.blocks.cross import CrossPart, PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.verification.blocks import attn_identities, attn_out_identity
from hooked_lm.components.verification.registry import (
    Identity,
    Pair,
    Read,
    Reader,
    Sites,
    below,
    identities,
    is_known,
    norm_identity,
    norm_readers,
    normed,
    output_from_sites,
    readers_of,
)


def written_identities(
    block: CrossPart, at: Sites, read_cross: Read, read_mlp: Read, read_source: Read | None
) -> Iterator[Identity]:
    """Identities in cross attention and the MLP, and from there to their terms of the stream."""
    if isinstance(block.cross_attn, CrossAttention):
        for name, pair in identities(block.cross_attn, below(at, "cross_attn"), read_cross, read_source):
            yield f"cross attention: {name}", pair
        yield (
            "cross attention: sum of results + b_O == cross_attn_out",
            lambda: (
                block.scaled(output_from_sites(block.cross_attn, below(at, "cross_attn"))),
                at("hook_cross_attn_out"),
            ),
        )
    if is_known(block.mlp):
        yield from identities(block.mlp, below(at, "mlp"), read_mlp)
        yield (
            "post -> mlp_out",
            lambda: (block.scaled(output_from_sites(block.mlp, below(at, "mlp"))), at("hook_mlp_out")),
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
def _(block: PreNormCrossBlock, at: Sites, read_source: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `read_source()`."""
    yield from _sums(at, "resid_pre", "resid_mid", "resid_mid_cross")
    yield from attn_identities(block, at)
    reads = {}
    for name, site in (("ln2", "hook_resid_mid"), ("ln3", "hook_resid_mid_cross")):

        def resid(site: str = site) -> Tensor:
            return at(site)

        def read(name: str = name, resid: Read = resid) -> Tensor:
            return normed(getattr(block, name), below(at, name), resid)

        reads[name] = read
        yield from norm_identity(name, getattr(block, name), below(at, name), resid)
    yield from written_identities(block, at, reads["ln2"], reads["ln3"], read_source)


@norm_readers.register
def _(block: PreNormCrossBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.attn)), ("ln2", readers_of(block.cross_attn)), ("ln3", readers_of(block.mlp))]


@identities.register
def _(block: PostNormCrossBlock, at: Sites, read_source: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `read_source()`."""
    yield from _sums(at, "resid_pre", "normalized_resid_mid", "normalized_resid_mid_cross")
    for name, site in (("ln1", "resid_mid"), ("ln2", "resid_mid_cross"), ("ln3", "resid_post")):
        norm = getattr(block, name)

        def resid(site: str = site) -> Tensor:
            return at(f"hook_{site}")

        def in_stream(
            norm: nn.Module = norm, name: str = name, site: str = site, resid: Read = resid
        ) -> tuple[Tensor, Tensor]:
            return normed(norm, below(at, name), resid), at(f"hook_normalized_{site}")

        yield from norm_identity(name, norm, below(at, name), resid)
        yield f"{name}({site}) == normalized_{site}", in_stream
    if is_known(block.attn):
        yield from identities(block.attn, below(at, "attn"), lambda: at("hook_resid_pre"))
        yield from attn_out_identity(block, at)
    read_cross, read_mlp = "hook_normalized_resid_mid", "hook_normalized_resid_mid_cross"
    yield from written_identities(block, at, lambda: at(read_cross), lambda: at(read_mlp), read_source)


@norm_readers.register
def _(block: PostNormCrossBlock) -> list[tuple[str, list[Reader]]]:
    """None: the output of each norm is the stream."""
    return []
