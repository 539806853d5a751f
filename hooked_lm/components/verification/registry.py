"""Identities between the sites of a component, and its weights that read and write the stream.

`at(name)` is the value at a site in one run. A pair is a function that returns two tensors which must be equal; it is called
in its check, so that a missing site fails that check only. Each function here is implemented for each class of components, in
the file of this folder that is named after the mechanism. `models.verification` checks the identities.
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
    """Identities between the sites of a run, where `read()` is the input of the component."""
    raise TypeError(f"no identities are registered for {type(module).__name__}")


@singledispatch
def output_from_sites(module: Any, at: Sites) -> Tensor:
    """The output of a component, computed from its last sites."""
    raise TypeError(f"no output from sites is registered for {type(module).__name__}")


@singledispatch
def input_weights(module: Any) -> list[Reader]:
    """The weights [..., in, out] that read the input of a component; empty if a norm before them cannot be folded."""
    raise TypeError(f"no input weights are registered for {type(module).__name__}")


@singledispatch
def output_weights(module: Any) -> list[Tensor]:
    """The weights and biases [..., d_model] that write the output of a component."""
    raise TypeError(f"no output weights are registered for {type(module).__name__}")


@singledispatch
def norm_readers(block: Any) -> list[tuple[str, list[Reader]]]:
    """Each norm between the stream and weights of a block, with the weights that read it; none for a foreign block."""
    return []


def is_known(module: nn.Module) -> bool:
    """Whether identities are registered for a module's class; foreign modules have none."""
    return identities.dispatch(type(module)) is not identities.dispatch(object)


def readers_of(*modules: nn.Module) -> list[Reader]:
    """The weights that read the common input of these modules; empty if a norm before them cannot be folded into all."""
    found = [input_weights(module) if is_known(module) else [] for module in modules]
    return [reader for of_module in found for reader in of_module] if all(found) else []


def below(at: Sites, part: str) -> Sites:
    """The sites of a submodule, by names relative to it."""
    return lambda name: at(f"{part}.{name}")


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """`x + bias`, or `x` without a bias."""
    return x if bias is None else x + bias


def normed(norm: nn.Module, at: Sites, x: Read) -> Tensor:
    """The output of a norm, from its site; a foreign module or identity is applied to its input."""
    return norm.apply_weights(at("hook_normalized")) if isinstance(norm, (LayerNorm, RMSNorm)) else norm(x())


def norm_identity(name: str, norm: nn.Module, at: Sites, x: Read) -> Iterator[Identity]:
    """The normalised value times the divisor is the input of the norm."""
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
    """The output of a sublayer to the stream, after its norm and scale."""
    return norm_unhooked(post_norm, out) * scale


def sum_of(at: Sites, parts: list[str], whole: str) -> Pair:
    """The sum of the values at `parts`, and the value at `whole`."""
    return lambda: (sum((at(part) for part in parts[1:]), at(parts[0])), at(whole))
