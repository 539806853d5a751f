"""Identities of gated short convolutions."""

from collections.abc import Iterator

from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, add_bias, identities
from hooked_lm.components.verification.ssm import input_identities
from hooked_lm.families.decoders.lfm2.short_conv import ShortConv


@identities.register
def _(mixer: ShortConv, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """Identities between the sites of a run without padding or a cache."""
    yield from input_identities(mixer, at, get_input)
    yield "stream -> B", lambda: (add_bias(get_input() @ mixer.W_B, mixer.b_B), at("hook_B"))
    yield (
        "the windows of B * x, read by the taps == y",
        lambda: (mixer.read(mixer.states(at("hook_B") * at("hook_x"))[0]), at("hook_y")),
    )
