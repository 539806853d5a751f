"""Identities of blocks with a narrower stream, bottlenecks, and embeddings of three tokens."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hooked_lm.components.blocks.wiring import NORMALIZED_POST, POST, PRE, Step, Sublayer, Wiring
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    identities,
    norm_identity,
    norm_output,
    within,
)
from hooked_lm.families.encoders.mobilebert.narrow import Bottleneck, NarrowBlock, SeveralMLPsBlock
from hooked_lm.families.encoders.mobilebert.trigram import TrigramEmbed


def _inside(block: NarrowBlock) -> Wiring:
    """What the block does in the narrow stream, which begins with the output of the bottleneck."""
    names = {PRE: "bottleneck.hook_out", POST: "hook_narrow_post", NORMALIZED_POST: "hook_normalized_narrow_post"}
    attn, *steps = (_renamed(step, names) for step in SeveralMLPsBlock.wiring(block).steps)
    assert isinstance(attn, Sublayer), "attention is the first step"
    reads, value = f"{_bottlenecks(block)[-1]}.hook_out", PRE
    if block.cfg.attends_narrow:
        value = reads
    elif block.cfg.qk_bottleneck is None:
        reads = PRE
    beside = () if value == reads else (value,)
    return Wiring((replace(attn, reads=reads, at=(), beside=beside), *steps))


def _bottlenecks(block: NarrowBlock) -> list[str]:
    """The bottlenecks that are run."""
    return ["bottleneck"] + ["qk_bottleneck"] * (block.cfg.qk_bottleneck is not None and not block.cfg.attends_narrow)


def _renamed(step: Step, names: dict[str, str]) -> Step:
    """A step between values of other names."""
    return replace(step, **{field: names.get(value, value) for field, value in vars(step).items()})


@identities.register
def _(block: NarrowBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run: those of the wide stream's wiring, and those of the narrow stream."""
    for part in _bottlenecks(block):
        for name, pair in identities(block.get_submodule(part), within(at, part), partial(at, PRE)):
            yield f"{part}: {name}", pair
    yield from wired_identities(block, at, block.wiring(), shift)
    yield from wired_identities(block, at, _inside(block))
    yield (
        "normalized_narrow_post W_up + b_up == narrow_out",
        lambda: (at("hook_normalized_narrow_post") @ block.W_up + block.b_up, at("hook_narrow_out")),
    )


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
