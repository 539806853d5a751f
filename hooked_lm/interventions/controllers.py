"""Controllers that compute new values: ablation, noise, steering, projection, clamping, scaling.

All work out of place, so that gradients are those of the changed forward pass.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.part import Part
from hooked_lm.interventions.part_editor import LocalController, PartEditor, check_finite, fitted
from hooked_lm.interventions.window import constant

Schedule = Sequence[float | int] | Callable[[int, int], float | int] | None


@dataclass(eq=False, repr=False)
class ZeroAblate(PartEditor):
    """Sets a part of a site to zero (Michel et al. 2019, arXiv:1905.10650); its gradient is also zero.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.controllers import ZeroAblate
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> with model.hooks([ZeroAblate("z", 2, heads=[0, 3])]):
    ...     _, cache = model.run_with_cache("The capital of France is")
    >>> bool(cache["z", 2][:, :, [0, 3]].any())
    False
    """

    def edit(self, value: Tensor, part: Part) -> Tensor:
        return value.masked_fill(torch.ones((), dtype=torch.bool, device=value.device), 0)

    def acts_by_position(self, part: Part) -> bool:
        return True

    def replacement(self, like: Tensor, part: Part, hook: HookPoint) -> Tensor:
        return constant(0.0, like.ndim)


@dataclass(eq=False, repr=False)
class SetValue(PartEditor):
    """Sets a part of a site to a number, or to a tensor that broadcasts to the part.

    Axes with a single selected index have length 1. Those that an int selects may be missing, as in `value[:, -1] = tensor`.
    Raises TypeError for what is no number or tensor, ValueError for NaN, and in the forward pass for a tensor that does not
    broadcast, or does so in two ways.
    """

    value: float | int | Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_operand(self, "value")
        if not isinstance(self.value, Tensor) and self.value != self.value:
            raise ValueError("the value to set is NaN")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        everywhere = torch.ones((), dtype=torch.bool, device=value.device)
        if not isinstance(self.value, Tensor):
            return value.masked_fill(everywhere, self.value)
        return torch.where(everywhere, fitted(self.value, value, part, "value"), value)

    def acts_by_position(self, part: Part) -> bool:
        return not part.has_positions(self.value)

    def replacement(self, like: Tensor, part: Part, hook: HookPoint) -> Tensor | None:
        if not isinstance(self.value, Tensor):
            return constant(float(self.value), like.ndim)
        is_whole = all(axis == part.pos_axis for axis in part.indices)  # then the tensor broadcasts to the site too
        return part.aligned(self.value) if is_whole else None


@dataclass(eq=False, repr=False)
class AddValue(PartEditor):
    """Adds a number to a part of a site, or a tensor that broadcasts to the part, as in `SetValue`.

    `AddDirection` adds a direction that is as wide as the site, wherever the part is. Raises ValueError for a value that is
    not finite; otherwise as `SetValue`.
    """

    value: float | int | Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_operand(self, "value")
        check_finite(self, "value")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        return value + (fitted(self.value, value, part, "value") if isinstance(self.value, Tensor) else self.value)

    def acts_by_position(self, part: Part) -> bool:
        return not part.has_positions(self.value)


@dataclass(eq=False, repr=False)
class Scale(PartEditor):
    """Multiplies a part of a site by a number, or by a tensor that broadcasts to the part, as in `SetValue`.

    Raises ValueError for a factor that is not finite; otherwise as `SetValue`.
    """

    factor: float | int | Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_operand(self, "factor")
        check_finite(self, "factor")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        return value * (fitted(self.factor, value, part, "factor") if isinstance(self.factor, Tensor) else self.factor)

    def acts_by_position(self, part: Part) -> bool:
        return not part.has_positions(self.factor, "factor")


@dataclass(eq=False, repr=False)
class Clamp(PartEditor):
    """Clamps a part of a site between `min` and `max`; the gradient of clamped values is zero.

    Raises ValueError if neither is given, or if `min` is above `max`.
    """

    min: float | int | None = field(default=None, kw_only=True)
    max: float | int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise ValueError("Clamp needs min, max or both")
        if any(limit is not None and limit != limit for limit in (self.min, self.max)):
            raise ValueError(f"Clamp holds values between min and max, got min={self.min} and max={self.max}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"Clamp holds values between min and max, and min={self.min} is above max={self.max}")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        return value.clamp(self.min, self.max)

    def acts_by_position(self, part: Part) -> bool:
        return True


@dataclass(eq=False, repr=False)
class Noise(LocalController):
    """Adds Gaussian noise, as causal tracing does to the embeddings of a subject (Meng et al. 2022, arXiv:2202.05262).

    The noise depends only on `seed`, the site's name and the position, so it is the same in every forward pass, and the same
    in generation with and without a key/value cache (except at patterns and scores, whose rows grow). The global random
    generators are not used.

    Args:
        std: standard deviation of the noise.
        multiple: instead of `std`, a multiple of the standard deviation of the site's values in this forward pass, computed
            separately for each row of the batch and position.
        seed: seed of the noise.

    Raises ValueError unless exactly one of `std` and `multiple` is given and is not negative.
    """

    std: float | int | None = field(default=None, kw_only=True)
    multiple: float | int | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.std is None) == (self.multiple is None):
            raise ValueError(f"Noise needs std or multiple, and not both; got std={self.std}, multiple={self.multiple}")
        check_finite(self, "std", "multiple")
        if (self.std or self.multiple or 0.0) < 0:
            raise ValueError(f"a deviation is not negative, got std={self.std}, multiple={self.multiple}")

    def change(self, value: Tensor, hook: HookPoint) -> Any:
        changed = value
        for part in self.parts(value, hook):
            if not part.is_empty:
                added = self._deviation(value, part) * self._noise(part, hook.name or "").to(value)
                changed = part.replaced(changed, added.__add__)
        return changed

    def acts_by_position(self, part: Part) -> bool:
        return True

    def _deviation(self, value: Tensor, part: Part) -> Tensor | float:
        if self.multiple is None:
            return float(self.std or 0)
        axes = [axis for axis in range(value.ndim) if axis not in (0, part.pos_axis)]
        return self.multiple * part.take(value.detach().std(axes, correction=0, keepdim=True))

    def _noise(self, part: Part, name: str) -> Tensor:
        """Standard normal noise for the part, drawn separately for each position."""
        shape = [n for axis, n in enumerate(part.shape) if axis != part.pos_axis]
        generator = torch.Generator()
        drawn = []
        for position in part.orders:
            generator.manual_seed(zlib.crc32(f"{self.seed} {name} {position}".encode()))
            drawn.append(torch.randn(shape, generator=generator))
        noise = drawn[0] if part.pos_axis is None else torch.stack(drawn, part.pos_axis)
        for axis, indices in part.indices.items():
            if axis != part.pos_axis:
                noise = noise.index_select(axis, torch.tensor(indices))
        return noise


@dataclass(eq=False, repr=False)
class AddDirection(PartEditor):
    """Adds a direction: steering (Turner et al. 2023, arXiv:2308.10248).

    The direction is added once at every selected position: with a key/value cache, positions of the prompt are steered only
    in the step that processes the prompt. "last_prompt" is the position whose logits predict the first new token.

    Args:
        vector: the direction: as wide as the site's last axis, or with more of its last axes, e.g. [head, d_head] at `hook_z`.
            An axis of positions has an entry for each position from 0 to the last selected one.
        coefficient: factor of the direction.
        schedule: an additional factor for each position: a function of (position, step), where the step is 0 in the prompt and
            k at the k-th new token; or a list for the selected positions, in their order, whose last number repeats.
        unit: whether the direction is first scaled to length 1.

    Raises ValueError for numbers that are not finite, for a direction of length 0 with `unit`, for an empty schedule; in the
    forward pass for a direction whose width differs from the site's.

    >>> import torch
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.controllers import AddDirection
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> steer = AddDirection(
    ...     "resid_post", 1, vector=torch.ones(128), coefficient=3.0, positions=-1
    ... )
    >>> steered = model.run_with_hooks("The capital of France is", fwd_hooks=[steer])
    """

    vector: Float[Tensor, "*axes width"] = field(kw_only=True)
    coefficient: float | int = field(default=1.0, kw_only=True)
    schedule: Schedule = field(default=None, kw_only=True)
    unit: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, "vector", "coefficient", "schedule")
        if self.unit and not self.vector.norm() > 0:
            raise ValueError("a direction of length 0 cannot be scaled to length 1")
        if isinstance(self.schedule, Sequence) and not self.schedule:
            raise ValueError("a schedule needs at least one factor")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        check_width(self.vector, part)
        vector = self.vector / self.vector.norm() if self.unit else self.vector
        added = self.coefficient * fitted(self._taken(vector, part), value, part, "vector")
        return value + added * part.by_position(self._factors(part), value)

    def acts_by_position(self, part: Part) -> bool:
        return True

    def _taken(self, vector: Tensor, part: Part) -> Tensor:
        """The entries of the direction for a part."""
        if vector.ndim > len(part.shape):
            raise ValueError(f"vector has shape {tuple(vector.shape)}, more axes than '{part.where}'")
        vector = vector[(None,) * (len(part.shape) - vector.ndim)]
        indices = {**part.indices, **({} if part.pos_axis is None else {part.pos_axis: list(part.orders)})}
        for axis, n in enumerate(part.shape):
            n_given, numbers = vector.shape[axis], indices.get(axis, [])
            if n_given == 1:
                continue
            if n_given <= max(numbers, default=0) if axis == part.pos_axis else n_given != n:
                raise ValueError(
                    f"vector has shape {tuple(vector.shape)}, which does not fit '{part.where}': axis {axis} has {n_given} of {n}"
                )
            if axis in indices:
                vector = vector.index_select(axis, torch.tensor(numbers, dtype=torch.long, device=vector.device))
        return vector

    def _factors(self, part: Part) -> list[float]:
        """The schedule's factor for each position of the part."""
        if self.schedule is None:
            return [1.0] * len(part.orders)
        if callable(self.schedule):
            n_prompt = 1 if part.along is None else part.along.shown.n_prompt
            return [float(self.schedule(position, max(0, position - n_prompt + 1))) for position in part.orders]
        return [float(self.schedule[min(order, len(self.schedule) - 1)]) for order in part.orders.values()]


@dataclass(eq=False, repr=False)
class ProjectOut(PartEditor):
    """Projects a direction, or the span of several, out of a site: `x - x Q^T Q` with orthonormal rows `Q`.

    Arditi et al. 2024 (arXiv:2406.11717) do so with the refusal direction.

    Args:
        vectors: [width] or [n, width]; they need not be orthogonal or independent, but at least one is not zero.
        strength: the share of it that is taken out; 1: all.

    Raises ValueError if all are zero; in the forward pass if their width differs from the site's last axis.
    """

    vectors: Float[Tensor, "*n width"] = field(kw_only=True)
    strength: float | int = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors.ndim not in (1, 2):
            raise ValueError(f"vectors are [width] or [n, width], got {tuple(self.vectors.shape)}")
        check_finite(self, "vectors", "strength")
        if not self.vectors.norm() > 0:
            raise ValueError("the vectors to project out are all zero: they span nothing")
        if self.features is not None:
            raise ValueError("ProjectOut takes the last axis whole: it has no use for features")

    @property
    def basis(self) -> Float[Tensor, "rank width"]:
        """An orthonormal basis of the span of the vectors, as rows."""
        _, sizes, rows = torch.linalg.svd(
            self.vectors.double().reshape(-1, self.vectors.shape[-1]), full_matrices=False
        )
        precision = torch.finfo(self.vectors.dtype).eps * max(self.vectors.shape)
        return rows[sizes > sizes[0] * precision].to(self.vectors.dtype)

    def edit(self, value: Tensor, part: Part) -> Tensor:
        check_width(self.vectors, part)
        basis = self.basis.to(value)
        return value - self.strength * ((value @ basis.T) @ basis)

    def acts_by_position(self, part: Part) -> bool:
        return True


@dataclass(eq=False, repr=False)
class SwapDirections(PartEditor):
    """Exchanges how much of two directions a site has: with `V = [v, w]` and `(a, b) = V^+ x`, `x` becomes
    `x + strength ((b - a) v + (a - b) w)`. What is orthogonal to both is unchanged.

    Args:
        vectors: [2, width], which do not lie on one line.
        strength: the factor of the change; with 1 a second swap undoes the first.

    Raises ValueError for vectors on one line; in the forward pass if their width differs from the site's last axis.

    >>> import torch
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.controllers import SwapDirections
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> swap = SwapDirections("resid_post", 1, vectors=torch.eye(128)[:2])
    >>> text = "The capital of France is"
    >>> x = model.run_with_cache(text)[1]["resid_post", 1]
    >>> y = model.run_with_cache(text, fwd_hooks=[swap])[1]["resid_post", 1]
    >>> bool((y[..., [1, 0]] - x[..., :2]).abs().max() < 1e-4)
    True
    """

    vectors: Float[Tensor, "two width"] = field(kw_only=True)
    strength: float | int = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors.ndim != 2 or len(self.vectors) != 2:
            raise ValueError(f"vectors are [2, width], got {tuple(self.vectors.shape)}")
        check_finite(self, "vectors", "strength")
        lengths = torch.linalg.svdvals(torch.nn.functional.normalize(self.vectors.double(), dim=-1))
        if not lengths[1] > 1e-4:
            raise ValueError("the two vectors lie on one line, so that nothing can be exchanged")
        if self.features is not None:
            raise ValueError("SwapDirections takes the last axis whole: it has no use for features")

    def edit(self, value: Tensor, part: Part) -> Tensor:
        check_width(self.vectors, part)
        parts = torch.linalg.pinv(self.vectors.double()).to(value)  # [width, 2]
        first, second = (value @ parts).split(1, -1)
        v, w = self.vectors.to(value)
        return value + self.strength * (second - first) * (v - w)

    def acts_by_position(self, part: Part) -> bool:
        return True


def _check_operand(hook: LocalController, name: str) -> None:
    """Raises TypeError for a setting that is neither a number nor a tensor."""
    given = getattr(hook, name)
    if not isinstance(given, (int, float, Tensor)):
        raise TypeError(
            f"{name} of {type(hook).__name__} must be a number or a tensor, got a {type(given).__name__}; values of another "
            "run are a Patch: at(...).patch(cache)"
        )


def check_width(vector: Tensor, part: Part) -> None:
    """Raises ValueError, with both widths, for a direction that is not as wide as the site."""
    if vector.shape[-1] != part.shape[-1]:
        raise ValueError(
            f"a direction of width {vector.shape[-1]} at '{part.where}', whose last axis is {part.shape[-1]}"
        )
