"""What the axes of weights mean.

A component with weights has a class attribute `axes`: the name of each weight, with the names of its axes in order. The axes that
a product with the weight sums over are in brackets: `{"W_Q": "head [d_model] d_head", "W_O": "[head d_head] d_model"}`. A table
whose rows are looked up is a product with one-hot vectors: `"[d_vocab] d_model"`. A subclass names only what it adds or changes.

`[d_model]` reads the input of the component, as it comes from the stream, and `d_model` outside of brackets writes its output.
What reads another vector names that: `[d_source]`. A bias `b_Q` has the axes of `W_Q` outside of brackets, unless it is named.
A weight that is not multiplied as one matrix has the reason after a semicolon. Of `[head/n_groups d_head]` each output sums over
some heads only: their number divided by `cfg.n_groups`.
"""

import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

STREAM = ("d_model",)
GRAMMAR = re.compile(
    r"(?P<before>[\w ]*)(\[(?P<inputs>\w+(/(?P<groups>\w+))?( \w+)*)\])?(?P<after>[\w ]*)(; (?P<reason>.+))?"
)


@dataclass(frozen=True)
class Axes:
    """The axes of a weight: `names` in order, of which the product sums over `inputs`, given by their numbers.

    `groups` is the field of the config with the number of parts of the inputs, of which an output reads one; `reason` is why the
    weight is not packed as one matrix.
    """

    names: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    groups: str | None = None
    reason: str | None = None

    @staticmethod
    @cache
    def parse(text: str) -> "Axes":
        """The axes of a text such as `"head [d_model] d_head"`; ValueError for another form."""
        if not text or (match := GRAMMAR.fullmatch(text)) is None:
            raise ValueError(
                f"axes {text!r}: expected names, those that a product sums over side by side in one pair of brackets, such as "
                "'head [d_model] d_head'"
            )
        before, inputs, after = ((match[part] or "").split() for part in ("before", "inputs", "after"))
        names = (*before, *(name.partition("/")[0] for name in inputs), *after)
        return Axes(names, tuple(range(len(before), len(before) + len(inputs))), match["groups"], match["reason"])

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the axes outside of brackets."""
        return tuple(axis for axis in range(len(self.names)) if axis not in self.inputs)

    @property
    def reads_stream(self) -> bool:
        """Whether a product with the weight reads the input of its component."""
        return self.named(self.inputs) == STREAM

    @property
    def writes_stream(self) -> bool:
        """Whether a product with the weight, or a bias, is part of the output of its component."""
        return self.named(self.outputs) == STREAM

    def named(self, axes: Sequence[int]) -> tuple[str, ...]:
        """The names of some axes."""
        return tuple(self.names[axis] for axis in axes)

    def fans(self, weight: Tensor, module: nn.Module) -> tuple[int, int]:
        """The number of inputs of an output, and of outputs of an input."""
        fan_in, fan_out = (math.prod(weight.shape[axis] for axis in axes) for axes in (self.inputs, self.outputs))
        return fan_in if self.groups is None else fan_in // getattr(module.cfg, self.groups), fan_out

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix [out, in]."""
        n_in = math.prod(weight.shape[axis] for axis in self.inputs)
        return weight.permute(*self.outputs, *self.inputs).reshape(-1, n_in)

    def weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """A matrix [out, in] as a weight of a shape."""
        order = (*self.outputs, *self.inputs)
        return matrix.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def texts_of(kind: type[nn.Module]) -> Mapping[str, str]:
    """The `axes` of a class and its parents; empty for a foreign module."""
    stated = (vars(base).get("axes") for base in kind.__mro__)
    return ChainMap(*(texts for texts in stated if isinstance(texts, dict)))


def axes_in(kind: type[nn.Module], name: str) -> Axes | None:
    """The axes of a weight or bias of a class of modules; None if they are not stated."""
    texts = texts_of(kind)
    if name in texts:
        return Axes.parse(texts[name])
    of_weight = texts.get(f"W{name[1:]}") if name.startswith("b") else None
    return None if of_weight is None else Axes((of := Axes.parse(of_weight)).named(of.outputs))


def places_of(kind: type[nn.Module], axis: str) -> dict[str, int]:
    """The weights and biases of a class of modules that have an axis, each with its number."""
    texts = texts_of(kind)
    biases = (f"b{weight[1:]}" for weight in texts if weight.startswith("W"))
    stated = {name: axes.names for name in (*texts, *biases) if (axes := axes_in(kind, name)) is not None}
    return {name: names.index(axis) for name, names in stated.items() if axis in names}


def axes_of(module: nn.Module, name: str) -> Axes | None:
    """The axes of a weight or bias of a module, or of a list of weights; None if they are not stated.

    Raises ValueError if the weight has another number of axes.
    """
    axes, listed = axes_in(type(module), name), module._modules.get(name)
    for weight in listed if isinstance(listed, nn.ParameterList) else [module._parameters.get(name)]:
        if axes is not None and weight is not None and weight.ndim != len(axes.names):
            kind, stated = type(module).__name__, " ".join(axes.names)
            raise ValueError(f"{kind}.{name} has the axes [{stated}], but this one has the shape {[*weight.shape]}")
    return axes


def weights_with_axes(model: nn.Module) -> Iterator[tuple[str, nn.Module, Axes]]:
    """Each weight and bias whose axes are stated, by its name in the model, with its module."""
    for path, module in model.named_modules():
        lists = {name: part for name, part in module.named_children() if isinstance(part, nn.ParameterList)}
        for name in (*module._parameters, *lists):
            leaves = [name] if name not in lists else [f"{name}.{i}" for i in range(len(lists[name]))]
            if (axes := axes_of(module, name)) is not None:
                yield from ((f"{path}.{leaf}" if path else leaf, module, axes) for leaf in leaves)
