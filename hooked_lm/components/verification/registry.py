"""What must hold between the sites of a component, and which of its weights read and write the stream.

`at(name)` is the value at a site in one run; a pair is a function that returns two tensors which must be equal, called
when it is checked, so that a missing site fails its own check only. Each function here has an implementation for each class of
components, in the file of this folder that is named after the mechanism. `models.verification` checks the identities.
"""

from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.norm import RMSNorm, norm_unhooked

Sites = Callable[[str], Tensor]
Read = Callable[[], Tensor]
Pair = Callable[[], tuple[Tensor, Tensor]]
Identity = tuple[str, Pair]
Reader = tuple[nn.Module, str, str]  # a module, and the names of its weight and bias


@singledispatch
def identities(module: Any, at: Sites, *read: Any) -> Iterator[Identity]:
    """What must hold between the sites of a run, where `read()` is the input of the component."""
    raise TypeError(f"no identities are known of a {type(module).__name__}")


@singledispatch
def output_from_sites(module: Any, at: Sites) -> Tensor:
    """The output of a component, computed from its last sites."""
    raise TypeError(f"no output from sites is known of a {type(module).__name__}")


@singledispatch
def input_weights(module: Any) -> list[Reader]:
    """The weights [..., in, out] that read the input of a component; none if a norm in front cannot be folded into them."""
    raise TypeError(f"the input weights of a {type(module).__name__} are not known")


@singledispatch
def output_weights(module: Any) -> list[Tensor]:
    """The weights and biases [..., d_model] that write the output of a component."""
    raise TypeError(f"the output weights of a {type(module).__name__} are not known")


@singledispatch
def norm_readers(block: Any) -> list[tuple[str, list[Reader]]]:
    """Each norm that is between the stream and weights of a block, with the weights that read it; a foreign block has none."""
    return []


def is_known(module: nn.Module) -> bool:
    """Whether the identities of a module are known; those of a foreign module are not."""
    return identities.dispatch(type(module)) is not identities.dispatch(object)


def readers_of(*modules: nn.Module) -> list[Reader]:
    """The weights that read the common input of these modules; none if a norm in front cannot be folded into all of them."""
    found = [input_weights(module) if is_known(module) else [] for module in modules]
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
    """What a block adds to the stream for this output of a sublayer."""
    return norm_unhooked(post_norm, out) * scale


def sum_of(at: Sites, parts: list[str], whole: str) -> Pair:
    """The sum of the values at some sites, and the value at another."""
    return lambda: (sum((at(part) for part in parts[1:]), at(parts[0])), at(whole))
