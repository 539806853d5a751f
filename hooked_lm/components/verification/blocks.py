"""Blocks of attention and an MLP."""

from collections.abc import Iterator

from torch import Tensor, nn

from hooked_lm.components.blocks.attention_only import AttentionOnlyBlock
from hooked_lm.components.blocks.block import AttentionPart, Block, MLPPart, PreNormBlock
from hooked_lm.components.blocks.deepstack import DeepstackBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.blocks.post_norm import NormedResidualBlock, PostNormBlock
from hooked_lm.components.blocks.weighted import WeightedResidualBlock
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
    sum_of,
    weights_after_norms,
    within,
)


def attn_identities(block: AttentionPart, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities from the stream before attention to the output of attention.

    `shift()` is added to the input of queries and keys (the position embedding of a shortformer model).
    """

    def resid() -> Tensor:
        return at("hook_resid_pre")

    def get_input() -> Tensor:
        return norm_output(block, "ln1", at, resid)

    yield from norm_identity(block, "ln1", at, resid)
    both = get_input if shift is None else lambda: get_input() + shift()
    if is_known(block.attn):
        yield from identities(block.attn, within(at, "attn"), both, get_input)
        yield from attn_out_identity(block, at)


def attn_out_identity(block: AttentionPart, at: Sites) -> Iterator[Identity]:
    """Identity from the output of attention to its term of the stream."""
    yield (
        "sum of results + b_O, normed and scaled == attn_out",
        lambda: (scaled_output(block, "attn", "ln1_post", at), at("hook_attn_out")),
    )


def mlp_identities(block: MLPPart, at: Sites, stream: str) -> Iterator[Identity]:
    """Identities from the stream before the MLP, at this site, to the output of the MLP."""

    def resid() -> Tensor:
        return at(stream)

    def get_input() -> Tensor:
        return norm_output(block, block.mlp_norm, at, resid)

    if block.mlp_norm == "ln2":
        yield from norm_identity(block, "ln2", at, resid)
    if is_known(block.mlp):
        yield from identities(block.mlp, within(at, "mlp"), get_input)
        yield from mlp_out_identity(block, at)


def mlp_out_identity(block: MLPPart, at: Sites) -> Iterator[Identity]:
    """Identity from the output of the MLP to its term of the stream."""
    yield (
        "post -> mlp_out, normed and scaled",
        lambda: (scaled_output(block, "mlp", "ln2_post", at), at("hook_mlp_out")),
    )


def in_stream_identities(
    block: nn.Module, norm: str, site: str, at: Sites, result: str | None = None
) -> Iterator[Identity]:
    """Identities of a norm in the stream; `result` is the site after it, by default that of the normalised `site`."""
    result = result or f"normalized_{site}"

    def resid() -> Tensor:
        return at(f"hook_{site}")

    yield from norm_identity(block, norm, at, resid)
    yield (
        f"{norm}({site}) == {result}",
        lambda: (norm_output(block, norm, at, resid), at(f"hook_{result}")),
    )


@identities.register
def _(block: AttentionOnlyBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_post")
    yield from attn_identities(block, at, shift)


@weights_after_norms.register
def _(block: AttentionOnlyBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.attn))]


@identities.register
def _(block: PreNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield "resid_mid + mlp_out == resid_post", sum_of(at, ["hook_resid_mid", "hook_mlp_out"], "hook_resid_post")
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_mid")


@identities.register
def _(block: DeepstackBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for name, pair in identities.dispatch(PreNormBlock)(block, at, shift):
        if not name.endswith("== resid_post"):
            yield name, pair
    terms = ["hook_resid_mid", "hook_mlp_out", "hook_deepstack"]
    yield "resid_mid + mlp_out + deepstack == resid_post", sum_of(at, terms, "hook_resid_post")


@weights_after_norms.register
def _(block: PreNormBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.attn)), ("ln2", common_input_weights(block.mlp))]


@identities.register
def _(block: WeightedResidualBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""

    def weighted(part: str, before: str, after: str) -> Pair:
        return lambda: (
            block.weighted(part, at(f"hook_{before}")) + at(f"hook_{part}_out"),
            at(f"hook_{after}"),
        )

    yield "w_attn * resid_pre + attn_out == resid_mid", weighted("attn", "resid_pre", "resid_mid")
    yield "w_mlp * resid_mid + mlp_out == resid_post", weighted("mlp", "resid_mid", "resid_post")
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_mid")


@identities.register
def _(block: NormedResidualBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    for norm, before, out, after in (
        ("ln1", "resid_pre", "attn_out", "resid_mid"),
        ("ln2", "resid_mid", "mlp_out", "resid_post"),
    ):
        yield f"{norm}({before}) + {out} == {after}", _normed_sum(block, norm, before, out, after, at)
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_mid")


def _normed_sum(block: Block, norm: str, before: str, out: str, after: str, at: Sites) -> Pair:
    def both() -> tuple[Tensor, Tensor]:
        normalized = norm_output(block, norm, at, lambda: at(f"hook_{before}"))
        return normalized + at(f"hook_{out}"), at(f"hook_{after}")

    return both


@weights_after_norms.register
def _(block: NormedResidualBlock) -> list[tuple[str, list[InputWeight]]]:
    """None: the output of each norm is the stream."""
    return []


@identities.register
def _(block: PostNormBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield (
        "normalized_resid_mid + mlp_out == resid_post",
        sum_of(at, ["hook_normalized_resid_mid", "hook_mlp_out"], "hook_resid_post"),
    )
    yield from in_stream_identities(block, "ln1", "resid_mid", at)
    yield from in_stream_identities(block, "ln2", "resid_post", at)
    if is_known(block.attn):

        def get_input() -> Tensor:
            return at("hook_resid_pre")

        both = get_input if shift is None else lambda: get_input() + shift()
        yield from identities(block.attn, within(at, "attn"), both, get_input)
        yield from attn_out_identity(block, at)
    if is_known(block.mlp):
        yield from identities(block.mlp, within(at, "mlp"), lambda: at("hook_normalized_resid_mid"))
        yield from mlp_out_identity(block, at)


@weights_after_norms.register
def _(block: PostNormBlock) -> list[tuple[str, list[InputWeight]]]:
    """None: the output of each norm is the stream."""
    return []


@identities.register
def _(block: ParallelBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield (
        "resid_pre + attn_out + mlp_out == resid_post",
        sum_of(at, ["hook_resid_pre", "hook_attn_out", "hook_mlp_out"], "hook_resid_post"),
    )
    yield from attn_identities(block, at, shift)
    yield from mlp_identities(block, at, "hook_resid_pre")


@weights_after_norms.register
def _(block: ParallelBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights, with the weights after it."""
    return [("ln1", common_input_weights(block.attn)), ("ln2", common_input_weights(block.mlp))]


@weights_after_norms.register
def _(block: SharedNormBlock) -> list[tuple[str, list[InputWeight]]]:
    """The one norm, with the weights of attention and MLP after it."""
    return [("ln1", common_input_weights(block.attn, block.mlp))]
