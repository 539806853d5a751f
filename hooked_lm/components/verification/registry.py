"""Identities between the sites of a component, and its weights that read and write the stream.

`at(name)` is the value at a site in one run. A pair is a function that returns two tensors which must be equal; it is called
in its check, so that a missing site fails that check only. Each function here is implemented for each class of components, in
the file of this folder that is named after the mechanism, or beside a family's own mechanism. `models.verification` checks the
identities.
"""

from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any

from torch import Tensor, nn

from hooked_lm.components.axes import Axes, axes_of
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of

Sites = Callable[[str], Tensor]
LazyTensor = Callable[[], Tensor]
Pair = Callable[[], tuple[Tensor, Tensor]]
Identity = tuple[str, Pair]
InputWeight = tuple[nn.Module, str, str]  # a module, and the names of its weight and bias


@singledispatch
def identities(module: nn.Module, at: Sites, *get_input: Any) -> Iterator[Identity]:
    """Identities between the sites of a component in a run, where `get_input()` is its input."""
    raise TypeError(f"no identities are registered for {type(module).__name__}")


@singledispatch
def output_from_sites(module: nn.Module, at: Sites) -> Tensor:
    """The output of a component, computed from its last sites."""
    raise TypeError(f"no output from sites is registered for {type(module).__name__}")


@singledispatch
def input_weights(module: nn.Module) -> list[InputWeight]:
    """The weights [..., in, out] that the input of a component is multiplied by; empty if a norm cannot be folded into them.

    They follow from `axes`. What uses its input in another way too is registered.
    """
    return [(part, name, f"b{name[1:]}") for part, name, axes in _axes_within(module) if axes.reads_stream]


@singledispatch
def output_weights(module: nn.Module) -> list[Tensor]:
    """The weights and biases [..., d_model] that write the output of a component; none if something is between.

    They follow from `axes`. A component that uses what they write in another way is registered.
    """
    return [getattr(part, name) for part, name, axes in _axes_within(module) if axes.writes_stream]


def _axes_within(module: nn.Module) -> Iterator[tuple[nn.Module, str, Axes]]:
    if not hasattr(type(module), "axes"):
        raise TypeError(f"{type(module).__name__} states no axes of its weights, see hooked_lm.components.axes")
    for part in module.modules():
        for name in part._parameters:  # a module that is split over processes refuses to give them
            if getattr(part, name) is not None and (axes := axes_of(part, name)) is not None:
                yield part, name, axes


@singledispatch
def norm_identities(norm: nn.Module, at: Sites) -> Iterator[Identity]:
    """What a norm computes after it has normalised; most only multiply."""
    yield from ()


@singledispatch
def weights_after_norms(block: nn.Module) -> list[tuple[str, list[InputWeight]]]:
    """Each norm between the stream and weights of a block, with the weights that its output is multiplied by.

    Empty for a foreign block.
    """
    return []


def is_known(module: nn.Module) -> bool:
    """Whether identities are registered for a module's class; foreign modules have none."""
    return identities.dispatch(type(module)) is not identities.dispatch(object)


def common_input_weights(*modules: nn.Module) -> list[InputWeight]:
    """The input weights of modules with a common input; empty if a norm before them cannot be folded into all."""
    found = [input_weights(module) if is_known(module) else [] for module in modules]
    return [weight for of_module in found for weight in of_module] if all(found) else []


def within(at: Sites, part: str) -> Sites:
    """The sites of a submodule, by their names inside it."""
    return lambda name: at(f"{part}.{name}")


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """`x + bias`, or `x` without a bias."""
    return x if bias is None else x + bias


def norm_output(module: nn.Module, name: str, at: Sites, x: LazyTensor) -> Tensor:
    """The output of the norm `name` of a module, from its site; without a norm of ours it is computed from the input."""
    norm = norm_of(module, name)
    return norm.apply_weights(at(f"{name}.hook_normalized")) if isinstance(norm, (LayerNorm, RMSNorm)) else norm(x())


def norm_identity(
    module: nn.Module, name: str, at: Sites, x: LazyTensor, label: str | None = None
) -> Iterator[Identity]:
    """The normalised value times the divisor is the input of the norm `name` of a module; none for a foreign norm."""
    norm = norm_of(module, name)
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return

    def restored() -> tuple[Tensor, Tensor]:
        value = x()
        if isinstance(norm, LayerNorm):
            value = norm.centred(value)
        return at(f"{name}.hook_normalized") * at(f"{name}.hook_scale"), value

    kind = "stream - mean" if isinstance(norm, LayerNorm) else "stream"
    yield f"{label or name}: normalized * scale == {kind}", restored
    for further, pair in norm_identities(norm, within(at, name)):
        yield f"{label or name}: {further}", pair
