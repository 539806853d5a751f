"""The parameters and persistent buffers of a model as slots that can be filled.

Weights that were cut from one fused tensor are views of one storage. `copy.deepcopy`, `torch.save` of a model or state dict,
and optimiser steps handle this correctly: each element is stored once, and no two parameters overlap. `torch.save` of one
such weight, and plain `pickle` of the model, would store the fused tensor once for each of them. `compact` copies one weight
into its own storage, `compact_model` all weights of a model, which also closes the mapped file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Slot:
    """A parameter or persistent buffer of a model, and each attribute that holds it (several if modules share it)."""

    holders: list[tuple[nn.Module, str]]  # (module, name of its attribute)
    tensor: Tensor

    def like(self, tensor: Tensor) -> Tensor:
        """`tensor` as the kind of value that this slot holds: a parameter with the same `requires_grad`, or a buffer.

        A packed tensor cannot be trained.
        """
        if not isinstance(self.tensor, nn.Parameter):
            return tensor
        return nn.Parameter(tensor, requires_grad=self.tensor.requires_grad and not hasattr(tensor, "packed"))

    def replace(self, tensor: Tensor) -> None:
        """Puts the result of `like` in place of the parameter or buffer, in every module that holds it."""
        for module, leaf in self.holders:
            held = module._parameters if isinstance(self.tensor, nn.Parameter) else module._buffers
            held[leaf] = tensor  # type: ignore[assignment]


def slots(model: nn.Module) -> dict[str, Slot]:
    """The parameters and persistent buffers of a model by name. A shared one has the first of its names."""
    found: dict[str, Slot] = {}
    known: dict[int, Slot] = {}
    for path, module in model.named_modules():
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for leaf, tensor in {**module._parameters, **buffers}.items():
            if tensor is None:
                continue
            if id(tensor) in known:
                known[id(tensor)].holders.append((module, leaf))
            else:
                slot = known[id(tensor)] = Slot([(module, leaf)], tensor)
                found[f"{path}.{leaf}" if path else leaf] = slot
    return found


def compact(tensor: Tensor) -> Tensor:
    """The tensor in a storage that holds nothing but its elements, for `torch.save`, pickling or sharing of one weight.

    Returns the tensor itself if that already holds, else a copy with strides in the same order.

    >>> import torch
    >>> from hooked_lm.weights.parameters import compact
    >>> part = torch.zeros(4, 30)[:, 10:20].transpose(0, 1)
    >>> compact(part).untyped_storage().nbytes(), compact(part).stride()
    (160, (1, 10))
    """
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format)


def compact_model(model: nn.Module) -> None:
    """Copies every parameter and buffer into its own storage, in place: no shared storage, no mapped file.

    The parameter objects stay the same, so optimisers stay valid. The copies take as much memory as the model.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
