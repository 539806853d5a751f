"""What the identities between sites are made of; each component states its own, `models.verify` checks them all.

`at(name)` is what passed a site in one run; a pair is a function that gives two tensors which must be equal, called
when it is checked, so that a missing site fails its own check only.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norm import LayerNorm, RMSNorm

Sites = Callable[[str], Tensor]
Read = Callable[[], Tensor]
Pair = Callable[[], tuple[Tensor, Tensor]]
Identity = tuple[str, Pair]
Reader = tuple[nn.Module, str, str]  # a module, and the names of its weight and bias


@runtime_checkable
class Sublayer(Protocol):
    """What is between a norm and the stream and can speak for itself; a foreign module cannot."""

    def identities(self, at: Sites, *read: Read) -> Iterator[Identity]:
        """What must hold between the sites of a run in which `read()` came in."""

    def output_from_sites(self, at: Sites) -> Tensor:
        """The output, from the last sites."""

    def input_weights(self) -> list[Reader]:
        """The weights [..., in, out] that read the input; none if a norm in front cannot be folded into them."""

    def output_weights(self) -> list[Tensor]:
        """The weights and biases [..., d_model] that write the output."""


def readers_of(*modules: nn.Module) -> list[Reader]:
    """The weights that read what these modules share; none if a norm in front cannot be folded into all of them."""
    found = [module.input_weights() if isinstance(module, Sublayer) else [] for module in modules]
    return [reader for of_module in found for reader in of_module] if all(found) else []


def below(at: Sites, part: str) -> Sites:
    """The sites of a part, by their names relative to it."""
    return lambda name: at(f"{part}.{name}")


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """The sum with a bias that may be absent."""
    return x if bias is None else x + bias


def normed(norm: nn.Module, at: Sites, x: Read) -> Tensor:
    """The output of a norm as its site shows it; a foreign module, or none, is applied to what it reads."""
    return norm.apply_weights(at("hook_normalized")) if isinstance(norm, (LayerNorm, RMSNorm)) else norm(x())


def norm_identity(name: str, norm: nn.Module, at: Sites, x: Read) -> Iterator[Identity]:
    """The divisor and the normalised value give back what was normalised."""
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return

    def restored() -> tuple[Tensor, Tensor]:
        value = x()
        if isinstance(norm, LayerNorm):
            value = value - value.mean(-1, keepdim=True)
        return at("hook_normalized") * at("hook_scale"), value

    kind = "stream - mean" if isinstance(norm, LayerNorm) else "stream"
    yield f"{name}: normalized * scale == {kind}", restored


def added(out: Float[Tensor, "batch pos d_model"], post_norm: nn.Module, scale: float) -> Tensor:
    """What a sublayer's output becomes before it is added to the stream."""
    plain = getattr(post_norm, "plain", post_norm)
    return plain(out) * scale
