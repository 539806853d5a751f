"""Blocks with several MLPs and with a narrower stream, bottlenecks, and embeddings of three tokens."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hooked_lm.components.blocks.narrow import Bottleneck, NarrowBlock, SeveralMLPsBlock
from hooked_lm.components.embeddings.trigram import TrigramEmbed
from hooked_lm.components.verification.blocks import attn_out_identity, in_stream_identities, mlp_out_identity
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
    is_known,
    norm_identity,
    norm_output,
    output_from_sites,
    sum_of,
    within,
)


def several_mlps(block: SeveralMLPsBlock, at: Sites, result: str) -> Iterator[Identity]:
    """The identities of all MLPs; `result` is the site of the sum after the last."""
    stream = "hook_normalized_resid_mid"
    for i, ffn in enumerate(block.ffn):
        name, sites = f"ffn.{i}", within(at, f"ffn.{i}")
        if is_known(ffn.mlp):  # type: ignore[arg-type]
            found = identities(ffn.mlp, within(sites, "mlp"), partial(at, stream))  # type: ignore[arg-type]
            yield from ((f"{name}: {identity}", pair) for identity, pair in found)
            yield f"{name}: post -> mlp_out", partial(_mlp_out, ffn, sites)
        yield (
            f"{name}: stream + mlp_out == resid_post",
            sum_of(at, [stream, f"{name}.hook_mlp_out"], f"{name}.hook_resid_post"),
        )
        of_norm = in_stream_identities(ffn, "ln", "resid_post", sites)
        yield from ((f"{name}: {identity}", pair) for identity, pair in of_norm)
        stream = f"{name}.hook_normalized_resid_post"
    yield f"stream + mlp_out == {result.removeprefix('hook_')}", sum_of(at, [stream, "hook_mlp_out"], result)
    if is_known(block.mlp):
        yield from identities(block.mlp, within(at, "mlp"), partial(at, stream))
        yield from mlp_out_identity(block, at)


def _mlp_out(ffn: torch.nn.Module, sites: Sites) -> tuple[Tensor, Tensor]:
    return output_from_sites(ffn.mlp, within(sites, "mlp")), sites("hook_mlp_out")  # type: ignore[arg-type]


@identities.register
def _(block: SeveralMLPsBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    yield "resid_pre + attn_out == resid_mid", sum_of(at, ["hook_resid_pre", "hook_attn_out"], "hook_resid_mid")
    yield from in_stream_identities(block, "ln1", "resid_mid", at)
    yield from in_stream_identities(block, "ln2", "resid_post", at)
    if is_known(block.attn):
        yield from identities(block.attn, within(at, "attn"), partial(at, "hook_resid_pre"))
        yield from attn_out_identity(block, at)
    yield from several_mlps(block, at, "hook_resid_post")


@identities.register
def _(block: NarrowBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run."""
    wide = partial(at, "hook_resid_pre")
    parts = ["bottleneck"] + ["qk_bottleneck"] * (block.cfg.qk_bottleneck is not None and not block.cfg.attends_narrow)
    for part in parts:
        found = identities(getattr(block, part), within(at, part), wide)
        yield from ((f"{part}: {identity}", pair) for identity, pair in found)
    narrow = partial(at, f"{parts[-1]}.hook_out") if parts[1:] or block.cfg.attends_narrow else wide
    if is_known(block.attn):
        yield from identities(block.attn, within(at, "attn"), narrow, narrow if block.cfg.attends_narrow else wide)
        yield from attn_out_identity(block, at)
    yield (
        "bottleneck.out + attn_out == resid_mid",
        sum_of(at, ["bottleneck.hook_out", "hook_attn_out"], "hook_resid_mid"),
    )
    yield from in_stream_identities(block, "ln1", "resid_mid", at)
    yield from several_mlps(block, at, "hook_narrow_post")
    yield from in_stream_identities(block, "ln2", "narrow_post", at)
    yield (
        "normalized_narrow_post W_up + b_up == narrow_out",
        lambda: (at("hook_normalized_narrow_post") @ block.W_up + block.b_up, at("hook_narrow_out")),
    )
    yield "resid_pre + narrow_out == resid_post", sum_of(at, ["hook_resid_pre", "hook_narrow_out"], "hook_resid_post")
    yield from in_stream_identities(block, "ln3", "resid_post", at)


@identities.register
def _(bottleneck: Bottleneck, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def projected() -> Tensor:
        return get_input() @ bottleneck.W + bottleneck.b

    yield from norm_identity(bottleneck, "ln", at, projected)
    yield "ln(x W + b) == out", lambda: (norm_output(bottleneck, "ln", at, projected), at("hook_out"))


@identities.register
def _(embed: TrigramEmbed, at: Sites, out: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with output `out()`."""

    def neighbours() -> tuple[Tensor, Tensor]:
        rows = at("hook_narrow_embed")
        nothing = torch.zeros_like(rows[:, :1])
        terms = [rows]
        if embed.cfg.trigram:
            terms = [torch.cat([rows[:, 1:], nothing], 1), rows, torch.cat([nothing, rows[:, :-1]], 1)]
        return torch.einsum("tbpe,tem->bpm", torch.stack(terms), embed.W_proj) + embed.b_proj, out()

    yield "narrow_embed of next, own and previous token, W_proj + b_proj == embed", neighbours
