"""The heads and projectors of vision towers."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.heads import Real
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.components.vision.heads import ClassToken, Projection
from hooked_lm.components.vision.projector import MLPProjector


@identities.register
def _(head: ClassToken, at: Sites, get_input: LazyTensor, real: Real | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "the first position == pooler_out", lambda: (get_input()[:, 0], at("hook_pooler_out"))


@identities.register
def _(head: Projection, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "input @ W == out", lambda: (get_input() @ head.W, at("hook_out"))


@identities.register
def _(projector: MLPProjector, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def pre() -> tuple[Tensor, Tensor]:
        made = get_input() @ projector.W_in
        return made if projector.b_in is None else made + projector.b_in, at("hook_pre")

    def out() -> tuple[Tensor, Tensor]:
        made = at("hook_post") @ projector.W_out
        return made if projector.b_out is None else made + projector.b_out, at("hook_out")

    yield "input @ W_in + b_in == pre", pre
    yield "act(pre) == post", lambda: (projector.act_fn(at("hook_pre")), at("hook_post"))
    yield "post @ W_out + b_out == out", out
