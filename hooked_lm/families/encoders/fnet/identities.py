"""Identities of Fourier transforms."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities, output_from_sites
from hooked_lm.families.encoders.fnet.fourier import FourierMixer


@identities.register
def _(mixer: FourierMixer, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`, without padding."""

    def transformed() -> tuple[Tensor, Tensor]:
        x = get_input()
        return mixer.by_matrix(x, Context(x.shape[1], x.device)).to(x.dtype), at("hook_out")

    yield "waves of the stream, summed == out", transformed


@output_from_sites.register
def _(mixer: FourierMixer, at: Sites) -> Tensor:
    """The output."""
    return at("hook_out")
