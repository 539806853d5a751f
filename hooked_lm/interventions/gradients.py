"""Hook objects on the gradients that flow from a site to earlier layers."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hooked_lm.interventions.detectors import Record
from hooked_lm.interventions.part import Part
from hooked_lm.interventions.part_editor import PartEditor, check_finite


@dataclass(eq=False, repr=False)
class ScaleGradient(PartEditor):
    """Multiplies the gradient of a part of a site by a number: 0 stops it, -1 reverses it. Values do not change.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.gradients import ScaleGradient
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> with model.hooks(bwd_hooks=[ScaleGradient("mlp_out", 3, factor=0.0)]):
    ...     model("The capital of France is", return_type="loss").backward()
    >>> bool(model.blocks[3].mlp.W_out.grad.any()), bool(model.blocks[3].attn.W_O.grad.any())
    (False, True)
    """

    factor: float | int = field(kw_only=True)
    direction: ClassVar[str] = "bwd"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, "factor")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        return value * self.factor


@dataclass(eq=False, repr=False)
class ClipGradient(PartEditor):
    """Clips the gradient of a part of a site; a gradient within the limits is unchanged, bit for bit.

    Args:
        max_norm: the largest norm of the part's gradient, separately for each row of the batch; a larger one is scaled down.
        max_value: the largest absolute value of an entry.

    Raises ValueError if neither is given, or if one of them is not above 0.
    """

    max_norm: float | int | None = field(default=None, kw_only=True)
    max_value: float | int | None = field(default=None, kw_only=True)
    direction: ClassVar[str] = "bwd"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [limit for limit in (self.max_norm, self.max_value) if limit is not None]
        if not given or not all(limit > 0 for limit in given):
            raise ValueError(
                f"ClipGradient needs max_norm or max_value above 0, got {self.max_norm} and {self.max_value}"
            )

    def edit(self, value: Tensor, part: Part) -> Tensor:
        if self.max_value is not None:
            value = value.clamp(-self.max_value, self.max_value)
        if self.max_norm is None:
            return value
        axes = list(range(1, value.ndim))
        largest = value.abs().amax(axes, keepdim=True)
        scaled = value / largest  # squares of large numbers overflow in half precision
        norms = torch.linalg.vector_norm(scaled, dim=axes, keepdim=True)
        return torch.where(norms * largest > self.max_norm, scaled * (self.max_norm / norms), value)


@dataclass(eq=False, repr=False)
class RecordGradient(Record):
    """`Record` for gradients: keeps a detached copy of each."""

    direction: ClassVar[str] = "bwd"
