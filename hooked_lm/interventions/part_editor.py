"""Base classes of hook objects that act on a part of a site: its positions, heads, features and rows."""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hooked_lm.engine.edit import Edit
from hooked_lm.engine.meta_values import is_positional
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.head_labels import Heads, head_indices, labelled_layer
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.hooks.token_labels import is_named
from hooked_lm.interventions.base import Controller, HookObject
from hooked_lm.interventions.part import WHOLE, Part, parts_of
from hooked_lm.interventions.positions import Positions, check_positions
from hooked_lm.interventions.window import Window


@dataclass(eq=False, repr=False)
class PartHook(HookObject):
    """Selects a part of a site's value; the rest is ignored, or unchanged.

    Args (of all subclasses):
        positions: an int, several ints, a slice, "prompt", "last_prompt" (the last of the prompt), "generated" (tokens that
            generation added) or "all". Negative ones count from the end of the prompt. A slice without a stop includes
            generated tokens. None: "all".
        heads: indices of heads (of keys and values: key/value heads), or labels such as "L1H7", all of one
            layer, which `layer` or the site may also name. None: all.
        features: indices of the last axis: neurons, dimensions of the stream.
        rows: indices of the batch.

    All indices are an int, a list, tuple or array of ints, or a `slice`.

    Raises TypeError for an index that is not an int, such as a mask, and ValueError for the label of a head of another layer;
    in the forward pass, ValueError for an axis that the site does not have, IndexError for an index out of range.
    """

    positions: Positions = field(default=None, kw_only=True)
    heads: Heads = field(default=None, kw_only=True)
    features: Indices = field(default=None, kw_only=True)
    rows: Indices = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions = check_positions(self.positions)
        self.layer = labelled_layer(self.heads, self.hook_point, self.layer)
        self.heads = head_indices(self.heads, self.hook_point, self.layer)
        self.features, self.rows = plain_indices("features", self.features), plain_indices("rows", self.rows)

    def query_columns(self, hook: HookPoint, shape: tuple[int, ...]) -> set[int] | None:
        """The query positions of scores or a pattern of this shape that it reads or changes; None: all, or unknown."""
        if not self.is_enabled:
            return set()
        if self.positions in (None, "all"):
            return None
        parts = parts_of(torch.empty(shape, device="meta"), hook, self.positions, rows=self.rows)
        if not all(self.sees_only(part) for part in parts):
            return None
        axis = hook.dims.index("query_pos")
        return {column for part in parts for column in part.indices.get(axis, range(shape[axis]))}

    def sees_only(self, part: Part) -> bool:
        """Whether the positions of a part are all that it needs of a value."""
        return False


@dataclass(eq=False, repr=False)
class LocalController(PartHook, Controller):
    """Changes a part of a site's value; the rest is unchanged.

    Args (of all subclasses, besides those of `PartHook`):
        rest: for each axis after batch and position the indices, or None for all; e.g. `(3,)` is head 3 at `hook_z`, and
            head 3 at `hook_pattern`, where the position is that of the query. It is channel 3 of a wrapped module's feature
            map, whose axes have no names.

    Raises ValueError in the forward pass for a site without floating-point values.
    """

    rest: Sequence[Indices] = field(default=(), kw_only=True)
    gets_part_alone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rest = tuple(plain_indices("rest", index) for index in self.rest)

    def __call__(self, value: object, hook: HookPoint) -> Any:
        if not self.is_enabled:
            return None
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            got = f"numbers of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"{type(self).__name__} changes activations, and '{hook.name}' passes {got}; to change token ids, change the "
                "model's input, or use a hook function"
            )
        return super().__call__(value, hook)

    def parts(self, value: Tensor, hook: HookPoint, positions: Positions = None) -> list[Part]:
        """The parts of this value to change; `positions` is the default for the setting of that name."""
        given = positions if self.positions is None else self.positions
        return parts_of(value, hook, given, self.heads, self.features, self.rows, self.rest)

    # ---- as a cell of a sweep ----------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "acts_by_position" not in own and any(name in own for name in ("__call__", "change", "edit", "made")):
            cls.acts_by_position = LocalController.acts_by_position  # type: ignore[method-assign]  # unknown for a new rule
        if "gets_part_alone" not in own and ("__call__" in own or "change" in own):
            cls.gets_part_alone = False

    def acts_by_position(self, part: Part) -> bool:
        """Whether the new value at each position depends on the value at that position alone.

        If so, it is an `Edit` in sweeps, and `change` gets some of the positions at a time.
        """
        return False

    def sees_only(self, part: Part) -> bool:
        """Whether the new values follow from those of the part."""
        return self.gets_part_alone or self.acts_by_position(part)

    def replacement(self, like: Tensor, part: Part, hook: HookPoint) -> Tensor | None:
        """The new values if they do not depend on the old ones, broadcastable to the site's value; None otherwise."""
        return None

    def local_edit(self, point: HookPoint, like: Tensor | None) -> Edit | None:
        if like is None or not is_positional(like, point.dims):
            return None
        part, *others = self.parts(like, point)
        if others:  # the rows have different positions
            return None
        if is_named(self.positions):
            self = copy(self)
            self.positions = None if part.positions is None else list(part.positions)
        positions, site = part.positions, point.name or ""
        if part.is_empty:
            return Edit(site, torch.zeros([1] * like.ndim), ())
        if part.pos_axis is None or not self.acts_by_position(part):
            return None
        new, index = self.replacement(like, part, point), part.index
        if new is None or not all(
            n in (1, size) for n, size in zip(reversed(new.shape), reversed(like.shape), strict=False)
        ):
            self.change(like, point)  # raises for settings that do not fit the site
        if new is None or sum(isinstance(some, list) for some in index) > 1:
            return Edit(site, Window(self, site, point.dims, part.pos_axis), positions)
        rows, *rest = index
        while rest and rest[-1] == WHOLE:
            rest.pop()
        return Edit(site, new, positions, tuple(rest), None if rows == WHOLE else rows)


@dataclass(eq=False, repr=False)
class PartEditor(LocalController):
    """Base class for your own controllers: computes the new values of a part from the old ones alone.

    A subclass is a dataclass of its settings and defines `edit`. `acts_by_position` says whether it can share the forward
    passes of a sweep; see docs/interventions.md.
    """

    gets_part_alone = True

    def change(self, value: Tensor, hook: HookPoint) -> Any:
        for part in self.parts(value, hook):
            value = part.replaced(value, partial(self.edit, part=part))
        return value

    @abstractmethod
    def edit(self, value: Tensor, part: Part) -> Tensor:
        """The new values of a part, with all axes of the site; must not change `value` in place."""


def check_finite(hook: HookObject, *names: str) -> None:
    """Raises ValueError for settings that are or contain NaN, infinity or an int too large for a float; None is allowed."""
    for name in names:
        given = getattr(hook, name)
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if one is None or callable(one):
                continue
            if not (bool(one.isfinite().all()) if isinstance(one, Tensor) else abs(one) <= sys.float_info.max):
                raise ValueError(f"{name} of {type(hook).__name__} must be finite, got {repr(given)[:80]}")


def fitted(given: Tensor, like: Tensor, part: Part, what: str) -> Tensor:
    """`given` broadcast to the shape of a part, in its dtype; raises ValueError as `Part.aligned`."""
    return part.aligned(given, what).to(like).expand_as(like)
