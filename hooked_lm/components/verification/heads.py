"""Embeddings, and the heads of encoders."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.heads import (
    Classifier,
    EndToken,
    LastToken,
    MLMHead,
    NSPHead,
    Pooler,
    Real,
    TokenClassifier,
    TwoLayerMLMHead,
)
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Sites,
    add_bias,
    identities,
    norm_identity,
    norm_output,
    output_from_sites,
    output_weights,
    within,
)


@identities.register
def _(head: MLMHead, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "x W + b == pre", lambda: (add_bias(get_input() @ head.W, head.b), at("hook_pre"))
    yield "act(pre) == post", lambda: (head.act_fn(at("hook_pre")), at("hook_post"))
    yield from norm_identity(head, "ln", at, lambda: at("hook_post"))


@identities.register
def _(head: TwoLayerMLMHead, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    inner = within(at, "inner")
    yield from ((f"inner: {name}", pair) for name, pair in identities(head.inner, inner, get_input))
    yield from identities.dispatch(MLMHead)(head, at, lambda: output_from_sites(head.inner, inner))


@output_from_sites.register
def _(head: MLMHead, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return norm_output(head, "ln", at, lambda: at("hook_post"))


@identities.register
def _(head: Pooler, at: Sites, get_input: LazyTensor, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def pooled() -> tuple[Tensor, Tensor]:
        last = head.cfg.pools_last
        made = head.act_fn(add_bias((get_input() if last else head.pooled(get_input(), real)) @ head.W, head.b))
        made = head.pooled(made, real) if last else made
        return norm_output(head, "ln", at, lambda: made), at("hook_pooler_out")

    yield "act(x W + b), normed == pooler_out", pooled


@identities.register
def _(head: NSPHead, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "pooled W + b == nsp_out", lambda: (get_input() @ head.W + head.b, at("hook_nsp_out"))


@identities.register
def _(head: Classifier, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "pooled W + b == out", lambda: (get_input() @ head.W + head.b, at("hook_out"))


@identities.register
def _(head: TokenClassifier, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    last = get_input
    if head.cfg.transform is not None:
        sites, transform = within(at, "transform"), head.transform
        yield from ((f"transform: {name}", pair) for name, pair in identities(transform, sites, get_input))

        def last() -> Tensor:
            return output_from_sites(transform, sites)

    yield "x W + b == out", lambda: (last() @ head.W + head.b, at("hook_out"))


@identities.register(EndToken)
@identities.register(LastToken)
def _(
    head: EndToken | LastToken, at: Sites, get_input: LazyTensor, tokens: Int[Tensor, "batch pos"]
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "one position == pooler_out", lambda: (head.pooled(get_input(), tokens), at("hook_pooler_out"))


@output_weights.register
def _(embed: Embed) -> list[Tensor]:
    """The weights and biases that write the stream; none if a norm follows."""
    return [] if embed.cfg.norm is not None else output_weights.dispatch(object)(embed)
