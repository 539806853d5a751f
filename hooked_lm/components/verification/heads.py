"""The heads of encoders."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler, Real, TokenClassifier
from hooked_lm.components.norm import norm_of
from hooked_lm.components.verification.registry import (
    Identity,
    Read,
    Sites,
    below,
    identities,
    norm_identity,
    normed,
    output_from_sites,
    plus,
)


@identities.register
def _(head: MLMHead, at: Sites, read: Read) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    yield "x W + b == pre", lambda: (plus(read() @ head.W, head.b), at("hook_pre"))
    yield "act(pre) == post", lambda: (head.act_fn(at("hook_pre")), at("hook_post"))
    yield from norm_identity("ln", norm_of(head, "ln"), below(at, "ln"), lambda: at("hook_post"))


@output_from_sites.register
def _(head: MLMHead, at: Sites) -> Tensor:
    """The output, computed from the last sites."""
    return normed(norm_of(head, "ln"), below(at, "ln"), lambda: at("hook_post"))


@identities.register
def _(head: Pooler, at: Sites, read: Read, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""

    def pooled() -> tuple[Tensor, Tensor]:
        made = head.act_fn(plus(head.read(read(), real) @ head.W, head.b))
        return normed(norm_of(head, "ln"), below(at, "ln"), lambda: made), at("hook_pooler_out")

    yield "act(x W + b), normed == pooler_out", pooled


@identities.register
def _(head: NSPHead, at: Sites, read: Read) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    yield "pooled W + b == nsp_out", lambda: (read() @ head.W + head.b, at("hook_nsp_out"))


@identities.register
def _(head: Classifier, at: Sites, read: Read) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    yield "pooled W + b == out", lambda: (read() @ head.W + head.b, at("hook_out"))


@identities.register
def _(head: TokenClassifier, at: Sites, read: Read) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    last = read
    if head.cfg.transform is not None:
        sites, transform = below(at, "transform"), head.transform
        yield from ((f"transform: {name}", pair) for name, pair in identities(transform, sites, read))

        def last() -> Tensor:
            return output_from_sites(transform, sites)

    yield "x W + b == out", lambda: (last() @ head.W + head.b, at("hook_out"))
