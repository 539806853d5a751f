"""The heads and projectors of vision towers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.heads import Real
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    norm_identity,
    norm_output,
    output_from_sites,
    within,
)
from hooked_lm.components.vision.deepstack import DeepstackMerger
from hooked_lm.components.vision.heads import ClassAndMean, ClassToken, ProbePooler, Projection
from hooked_lm.components.vision.merger import LinearMerger, MergingProjector, PatchMerger
from hooked_lm.components.vision.projector import LinearProjector, MLPProjector, PoolingProjector


@identities.register
def _(head: ClassToken, at: Sites, get_input: LazyTensor, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "the first position == pooler_out", lambda: (get_input()[:, 0], at("hook_pooler_out"))


@identities.register
def _(head: ProbePooler, at: Sites, get_input: LazyTensor, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def probe() -> Tensor:
        return head.W_probe.expand(len(get_input()), 1, -1)

    def attended() -> Tensor:
        return at("hook_attn_out")

    attn, mlp = within(at, "attn"), within(at, "mlp")
    yield from identities(head.attn, attn, probe, get_input)
    yield "sum of results + b_O == attn_out", lambda: (output_from_sites(head.attn, attn), attended())
    yield from norm_identity(head, "ln", at, attended)
    yield from identities(head.mlp, mlp, lambda: norm_output(head, "ln", at, attended))
    yield "post -> mlp_out", lambda: (output_from_sites(head.mlp, mlp), at("hook_mlp_out"))
    yield "attn_out + mlp_out == pooler_out", lambda: ((attended() + at("hook_mlp_out"))[:, 0], at("hook_pooler_out"))


@identities.register
def _(head: ClassAndMean, at: Sites, get_input: LazyTensor, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def both() -> tuple[Tensor, Tensor]:
        x = get_input()
        return torch.cat([x[:, 0], head.mean(x, real)], -1), at("hook_pooler_out")

    yield "class token, mean of patches == pooler_out", both


@identities.register
def _(head: Projection, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "input @ W + b == out", lambda: (add_bias(get_input() @ head.W, head.b), at("hook_out"))


@identities.register
def _(projector: MLPProjector, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from two_layers(projector, at, get_input)


@identities.register
def _(merger: PatchMerger, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def normed() -> Tensor:
        return norm_output(merger, "ln", at, get_input)

    if merger.cfg.norm_after:
        yield "ln.normalized * w + b == merged", lambda: (normed(), at("hook_merged"))
    else:
        yield from norm_identity(merger, "ln", at, get_input)
        yield (
            "the first patch begins the first square",
            lambda: (normed()[:, 0], at("hook_merged")[:, 0, : merger.cfg.d_vision]),
        )
    yield from two_layers(merger, at, lambda: at("hook_merged"))


@identities.register
def _(merger: LinearMerger, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def merged() -> tuple[Tensor, Tensor]:
        return get_input().sum(1), at("hook_merged").unflatten(-1, (-1, merger.cfg.d_vision)).sum((1, 2))

    yield "sum of patches == sum of squares", merged
    yield "merged @ W == out", lambda: (at("hook_merged") @ merger.W, at("hook_out"))


@identities.register
def _(merger: DeepstackMerger, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`, also of the mergers of other depths."""
    yield from identities.dispatch(PatchMerger)(merger, at, get_input)
    for i, other in enumerate(merger.deepstack):
        sites = within(at, f"deepstack.{i}")
        for name, pair in identities(other, sites, lambda sites=sites: sites("hook_in")):
            yield f"deepstack: {name}", pair


@identities.register
def _(projector: MergingProjector, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from norm_identity(projector, "ln", at, get_input)
    yield (
        "the first patch begins the first square",
        lambda: (
            norm_output(projector, "ln", at, get_input)[:, 0],
            at("hook_merged")[:, 0, : projector.cfg.d_vision],
        ),
    )
    yield "merged @ W_merge == mlp_in", lambda: (at("hook_merged") @ projector.W_merge, at("hook_mlp_in"))
    yield from two_layers(projector, at, lambda: at("hook_mlp_in"))


def two_layers(
    module: MLPProjector | PatchMerger | MergingProjector, at: Sites, get_input: LazyTensor
) -> Iterator[Identity]:
    """The identities of two linear layers with an activation between them."""
    yield "input @ W_in + b_in == pre", lambda: (add_bias(get_input() @ module.W_in, module.b_in), at("hook_pre"))
    yield "act(pre) == post", lambda: (module.act_fn(at("hook_pre")), at("hook_post"))
    yield (
        "post @ W_out + b_out == out",
        lambda: (add_bias(at("hook_post") @ module.W_out, module.b_out), at("hook_out")),
    )


@identities.register
def _(projector: LinearProjector, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "input @ W + b == out", lambda: (get_input() @ projector.W + projector.b, at("hook_out"))


@identities.register
def _(projector: PoolingProjector, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def pooled() -> Tensor:
        return at("hook_pooled")

    yield "mean of squares of the input == pooled", lambda: (projector.pooled(get_input()), pooled())
    yield from norm_identity(projector, "ln", at, pooled)
    yield "ln(pooled) @ W == out", lambda: (norm_output(projector, "ln", at, pooled) @ projector.W, at("hook_out"))
