"""The poolers of text towers."""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.text_pool import EndToken, LastToken
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities


@identities.register(EndToken)
@identities.register(LastToken)
def _(
    head: EndToken | LastToken, at: Sites, get_input: LazyTensor, tokens: Int[Tensor, "batch pos"]
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "one position == pooler_out", lambda: (head.pooled(get_input(), tokens), at("hook_pooler_out"))
