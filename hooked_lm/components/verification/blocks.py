"""Blocks of attention and an MLP."""

from collections.abc import Iterator

from torch import Tensor, nn

from hooked_lm.components.blocks.attention_only import AttentionOnlyBlock
from hooked_lm.components.blocks.block import AttentionPart, MLPPart, PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.norm import norm_of
from hooked_lm.components.verification.registry import (
    Identity,
    Read,
    Reader,
    Sites,
    added,
    below,
    identities,
    is_known,
    norm_identity,
    norm_readers,
    normed,
    output_from_sites,
    readers_of,
    sum_of,
)


def attn_identities(block: AttentionPart, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities from the stream before attention to the output of attention.

    `shift()` is added to the input of queries and keys (the position embedding of a shortformer model).
    """

    def resid() -> Tensor:
        return at("hook_resid_pre")

    def read() -> Tensor:
        return normed(block.ln1, below(at, "ln1"), resid)

    yield from norm_identity("ln1", block.ln1, below(at, "ln1"), resid)
    both = read if shift is None else lambda: read() + shift()
    if is_known(block.attn):
        yield from identities(block.attn, below(at, "attn"), both, read)
        yield from attn_out_identity(block, at)


def attn_out_identity(block: AttentionPart, at: Sites) -> Iterator[Identity]:
    """Identity from the output of attention to its term of the stream."""
    yield (
        "sum of results + b_O, normed and scaled == attn_out",
        lambda: (
            added(
                output_from_sites(block.attn, below(at, "attn")), norm_of(block, "ln1_post"), block.cfg.residual_scale
            ),
            at("hook_attn_out"),
        ),
    )


def mlp_identities(block: MLPPart, at: Sites, stream: str) -> Iterator[Identity]:
    """Identities from the stream before the MLP, at this site, to the output of the MLP."""
    norm, norm_at = getattr(block, block.mlp_norm), below(at, block.mlp_norm)

    def resid() -> Tensor:
        return at(stream)

    def read() -> Tensor:
        return normed(norm, norm_at, resid)

    if block.mlp_norm == "ln2":
        yield from norm_identity("ln2", norm, norm_at, resid)
    if is_known(block.mlp):
        yield from identities(block.mlp, below(at, "mlp"), read)
        yield from mlp_out_identity(block, at)


def mlp_out_identity(block: MLPPart, at: Sites) -> Iterator[Identity]:
    """Identity from the output of the MLP to its term of the stream."""
    yield (
        "post -> mlp_out, normed and scaled",
        lambda: (
            added(output_from_sites(block.mlp, below(at, "mlp")), norm_of(block, "ln2_post"), block.cfg.residual_scale),
            at("hook_mlp_out"),
        ),
    )


@identities.register
def _(block: AttentionOnlyBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_post")
    yield from attn_identities(block, at, shift)


@norm_readers.register
def _(block: AttentionOnlyBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.attn))]


@identities.register
def _(block: PreNormBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield "resid_mid + mlp_out == resid_post", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_resid_post")
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_mid")


@norm_readers.register
def _(block: PreNormBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.attn)), ("ln2", readers_of(block.mlp))]


@identities.register
def _(block: PostNormBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield (
        "normalized_resid_mid + mlp_out == resid_post",
        sum_of(at, ["hook_normalized_resid_mid", "hook_mlp_out"], "hook_resid_post"),
    )
    for norm, name, site in ((block.ln1, "ln1", "resid_mid"), (block.ln2, "ln2", "resid_post")):

        def summed(site: str = site) -> Tensor:
            return at(f"hook_{site}")

        def stands_in_stream(norm: nn.Module = norm, name: str = name, site: str = site) -> tuple[Tensor, Tensor]:
            return normed(norm, below(at, name), lambda: at(f"hook_{site}")), at(f"hook_normalized_{site}")

        yield from norm_identity(name, norm, below(at, name), summed)
        yield f"{name}({site}) == normalized_{site}", stands_in_stream
    if is_known(block.attn):

        def read() -> Tensor:
            return at("hook_resid_pre")

        both = read if shift is None else lambda: read() + shift()
        yield from identities(block.attn, below(at, "attn"), both, read)
        yield from attn_out_identity(block, at)
    if is_known(block.mlp):
        yield from identities(block.mlp, below(at, "mlp"), lambda: at("hook_normalized_resid_mid"))
        yield from mlp_out_identity(block, at)


@norm_readers.register
def _(block: PostNormBlock) -> list[tuple[str, list[Reader]]]:
    """None: the output of each norm is the stream."""
    return []


@identities.register
def _(block: ParallelBlock, at: Sites, shift: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield (
        "resid_pre + attn_out + mlp_out == resid_post",
        sum_of(at, ["hook_resid_pre", "hook_attn_out", "hook_mlp_out"], "hook_resid_post"),
    )
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_pre")


@norm_readers.register
def _(block: ParallelBlock) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights, with the weights that read it."""
    return [("ln1", readers_of(block.attn)), ("ln2", readers_of(block.mlp))]


@norm_readers.register
def _(block: SharedNormBlock) -> list[tuple[str, list[Reader]]]:
    """The one norm, with the weights of attention and MLP that read it."""
    return [("ln1", readers_of(block.attn, block.mlp))]
