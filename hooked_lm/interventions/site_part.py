"""`at`: an edit in one line, as a place and what happens there."""

from dataclasses import dataclass, fields
from typing import Any, NoReturn

from torch import Tensor

from hooked_lm.hooks.head_labels import LABEL, Heads
from hooked_lm.hooks.indices import Indices
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.controllers import AddValue, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.patch import MeanAblate, Patch, Source
from hooked_lm.interventions.positions import Positions


@dataclass(frozen=True, repr=False)
class SitePart:
    """A part of a site, as `at` returns it. Each method makes the hook object that changes it so."""

    site: Site
    layer: int | None = None
    positions: Positions = None
    heads: Heads = None
    features: Indices = None
    rows: Indices = None

    def set(self, value: float | Tensor) -> SetValue:
        """Sets the part to a number or a tensor, as `value[:, -1] = tensor` does."""
        return SetValue(**self._where, value=value)

    def add(self, value: float | Tensor) -> AddValue:
        """Adds a number or a tensor."""
        return AddValue(**self._where, value=value)

    def scale(self, factor: float | Tensor) -> Scale:
        """Multiplies by a number or a tensor."""
        return Scale(**self._where, factor=factor)

    def zero(self) -> ZeroAblate:
        """Sets the part to zero."""
        return ZeroAblate(**self._where)

    def mean(self, source: Source = None, over: str = "batch") -> MeanAblate:
        """Replaces the part by its mean over a source, such as a cache of other prompts, or over the same run."""
        return MeanAblate(**self._where, source=source, over=over)

    def patch(self, source: Source, source_positions: Indices = None) -> Patch:
        """Replaces the part by that of another run: a cache, or a tensor [batch, pos, ...] of the whole site."""
        return Patch(**self._where, source=source, source_positions=source_positions)

    @property
    def _where(self) -> dict[str, Any]:
        return {"hook_point" if of.name == "site" else of.name: getattr(self, of.name) for of in fields(self)}

    @property
    def hook_point(self) -> NoReturn:
        """Raises TypeError: without one of the methods this is no hook yet."""
        raise TypeError(
            f"{self!r} says where, and not what happens there: end it with .set(value), .add(value), .scale(factor), .zero(), "
            ".mean(source) or .patch(source)"
        )

    def __repr__(self) -> str:
        where = [repr(self.site), *([] if self.layer is None else [repr(self.layer)])]
        given = [(of.name, getattr(self, of.name)) for of in fields(self)[2:]]
        return f"at({', '.join([*where, *(f'{name}={value!r}' for name, value in given if value is not None)])})"


def at(
    site: Site,
    layer: int | None = None,
    *,
    positions: Positions = None,
    heads: Heads = None,
    features: Indices = None,
    rows: Indices = None,
) -> SitePart:
    """A part of a site, to be changed in one line: `at("z", 3, heads=7, positions=-1).set(v)`.

    `.set`, `.add`, `.scale`, `.zero`, `.mean` and `.patch` return a hook object, which is accepted wherever a hook is: by
    `run_with_hooks`, `run_with_cache` and `model.hooks` (thus in `generate`), as a cell of a sweep, in a file of `Hooks`.

    Args:
        site: a name, short name, glob or list; the label of a head, such as "L3H7", is its output `z`.
        layer: the layer of a short name.
        positions, heads, features, rows: the part, as for all hook objects (see `PartHook`); None: all.

    A tensor has the shape of the part, or one that broadcasts to it. The axes that an int selects may be missing: with
    `heads=7, positions=-1` at `z` it is [d_head], [batch, d_head] or [batch, 1, 1, d_head]. Gradients reach it.

    Raises, in the forward pass, KeyError for a site that the model lacks, IndexError for a position or head that it lacks,
    ValueError with both shapes for a tensor that does not fit.

    >>> import torch
    >>> from hooked_lm import HookedTransformer, at
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> v = torch.ones(128)
    >>> steered = model.run_with_hooks(
    ...     "The capital of France is", fwd_hooks=at("resid_post", 1, positions=-1).add(v)
    ... )
    >>> _, cache = model.run_with_cache(
    ...     "The capital of France is", fwd_hooks=at("L2H3").zero()
    ... )
    >>> bool(cache["z", 2][:, :, 3].any())
    False
    """
    if isinstance(site, str) and LABEL.fullmatch(site):
        if heads is not None:
            raise ValueError(f"at({site!r}) is a head: leave out heads={heads!r}, or give the site 'z'")
        site, heads = "z", site
    return SitePart(site, layer, positions, heads, features, rows)
