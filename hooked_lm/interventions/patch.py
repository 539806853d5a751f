"""Controllers that replace values by those of another forward pass, by means, or by resampled rows; and that freeze values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from inspect import Signature, signature
from typing import Any, ClassVar, SupportsIndex, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.hooks.recorder import position_axis
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.part import Part, PositionMap
from hooked_lm.interventions.part_editor import LocalController, fitted
from hooked_lm.interventions.positions import listed
from hooked_lm.keywords import check_arguments

Source = Tensor | Mapping[str, Tensor] | None
Made = TypeVar("Made", bound="SourcedController")


@dataclass(eq=False, repr=False)
class SourcedController(LocalController):
    """Replaces a part of a site by the same part of a source.

    Args:
        source: values [batch, pos, ...] for one site, or a cache or dictionary of values by site. Missing leading axes, and
            axes of length 1, broadcast. None, in the classes that allow it: the site's value in the same forward pass.
        source_positions: the positions of the source whose values replace those at `positions`, one for each. None: the same
            positions; negative ones then count from the end of the source.
        positions: None means all of the prompt, and the source must be as long as the prompt.

    Raises ValueError for `source_positions` without as many `positions`; in the forward pass, KeyError if the source has no
    value for a site, ValueError for a source that is too short or does not broadcast.
    """

    source: Source = field(default=None, kw_only=True)
    source_positions: Indices = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.source, Mapping):
            site = self.hook_point if self.layer is None else (self.hook_point, self.layer)
            self.source = _of_site(self.source, site)
        if self.source_positions is None:
            return
        self.source_positions = plain_indices("source_positions", self.source_positions)
        if not self._by_number or len(listed(self.positions)) != len(listed(self.source_positions)):
            raise ValueError(
                f"source_positions={self.source_positions} goes with as many positions, got {self.positions!r}"
            )

    @classmethod
    def place(cls, hook_point: Site, layer: int | None) -> tuple[Site, int | None]:
        """The site and layer that are meant by these arguments."""
        return hook_point, layer

    @classmethod
    def from_run(
        cls: type[Made],
        model: HookedRootModule,
        prompts: Any,
        *where: Any,
        other_inputs: Sequence[Any] = (),
        **settings: Any,
    ) -> Made:
        """A controller whose source is the site's value in a forward pass of other prompts, without gradients.

        `prompts` is the first argument of the model's call, and `other_inputs` the following ones, such as the target of an
        encoder-decoder. `where` and `settings` are the arguments of the class; TypeError for one that it does not have.
        """
        known = Signature([one for name, one in signature(cls).parameters.items() if name != "source"])
        check_arguments(f"from_run of {cls.__name__}", known, where, settings)
        settings = known.bind(*where, **settings).arguments
        site, at = cls.place(settings.get("hook_point", ""), settings.get("layer"))
        names = model.names(site if at is None else (site, at))
        given = list(prompts) if isinstance(prompts, tuple) else prompts
        with torch.no_grad():
            _, cache = model.run_with_cache(given, *other_inputs, names_filter=names)
        values = dict(cache.items())  # a module that is called several times has several values
        return cls(**settings, source=values if len(values) > 1 else next(iter(values.values())))

    def change(self, value: Tensor, hook: HookPoint) -> Any:
        given = self._given(hook)
        source = None if given is None else self.made(_with_axes(given.to(value), value, hook), value, hook)
        own = self.made(value, value, hook) if source is None else value
        default = "all" if source is None or not _has_positions(source, hook) else "prompt"
        changed = value
        for part in self.parts(value, hook, default):
            if not part.is_empty:
                new = part.take(own) if source is None else self._taken(source, part)
                changed = part.replaced(changed, partial(_put, new, part))
        return changed

    def acts_by_position(self, part: Part) -> bool:
        return True

    def replacement(self, like: Tensor, part: Part, hook: HookPoint) -> Tensor | None:
        given = self._given(hook)
        if given is None or self.source_positions is not None or part.pos_axis is None:
            return None
        given = _with_axes(given, like, hook)
        source = self.made(given, like, hook)
        if source is not given and given.dtype != like.dtype:  # as in `change`, which converts before the mean
            source = self.made(given.to(like.dtype), like, hook)
        return source if source.shape[part.pos_axis] in (1, like.shape[part.pos_axis]) else None

    def made(self, source: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
        """The new values computed from the source; here the source itself."""
        return source

    @property
    def _by_number(self) -> bool:
        """Whether the positions are given as numbers, whose order is known before the forward pass."""
        is_range = isinstance(self.positions, slice) and self.source_positions is not None
        return self.positions == "last_prompt" or is_range or isinstance(self.positions, (int, list))

    def _given(self, hook: HookPoint) -> Tensor | None:
        if not isinstance(self.source, Mapping):
            return self.source
        if hook.name is None or hook.name not in self.source:
            raise KeyError(
                f"the source of {type(self).__name__} has no values for '{hook.name}'; it has {list(self.source)}"
            )
        return self.source[hook.name]

    def _taken(self, source: Tensor, part: Part) -> Tensor:
        """The entries of the source for a part."""
        source = _with_later_keys(source, part)
        numbers: Sequence[int] | None
        for axis, n in enumerate(part.shape):
            n_source = source.shape[axis]
            if n_source == 1:
                continue
            if part.along is not None and axis == part.pos_axis:
                numbers = self._source_positions(part.along, n_source, part.where)
            elif n_source == n:
                numbers = part.indices.get(axis)
            else:
                raise ValueError(
                    f"the source has shape {tuple(source.shape)}, which does not broadcast to '{part.where}': axis {axis} has "
                    f"{n_source} and not {n}"
                )
            if numbers is not None:
                source = source.index_select(axis, torch.tensor(numbers, dtype=torch.long, device=source.device))
        return source

    def _source_positions(self, along: PositionMap, n: int, where: str) -> list[int]:
        """The columns of a source with `n` positions that hold the values for the positions of a part."""
        positions, chosen = self.positions, along.orders
        padding = max(0, -along.shown.first)
        n_prompt = along.shown.n_prompt + padding
        if positions is None and n != n_prompt:
            raise ValueError(
                f"the source has {n} positions, and there are {n_prompt} at '{where}': give the positions "
                "that are replaced"
            )
        if n == n_prompt and self.source_positions is None:  # same columns as the value
            numbers = {position: position + padding for position in chosen}
        elif self._by_number:
            given = listed(positions if self.source_positions is None else self.source_positions)
            numbers = {position: given[order] for position, order in chosen.items()}
        elif isinstance(positions, slice) and min(positions.start or 0, positions.stop or 0) < 0:
            raise ValueError(
                f"positions={positions} counts from the end of {n_prompt} positions at '{where}', and the source has {n}: give "
                "positions and source_positions as lists"
            )
        else:
            numbers = {position: position for position in chosen}
        for position, number in numbers.items():
            if not -n <= number < n:
                raise ValueError(
                    f"position {position} at '{where}' takes position {number} of the source, which has only {n} positions"
                )
        return [number % n for number in numbers.values()]


@dataclass(eq=False, repr=False)
class Patch(SourcedController):
    """Replaces values by those of another forward pass: activation patching at any site, positions, heads, features, rows.

    Vig et al. 2020 (arXiv:2004.12265), Meng et al. 2022 (arXiv:2202.05262). Raises ValueError without a source.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.patch import Patch
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits, cache = model.run_with_cache("The capital of Italy is")
    >>> patch = Patch("resid_post", 3, source=cache, positions=-1)
    >>> patched = model.run_with_hooks("The capital of France is", fwd_hooks=[patch])
    >>> bool((patched[:, -1] - logits[:, -1]).abs().max() < 1e-4)
    True
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None:
            raise ValueError(f"{type(self).__name__} needs a source: a cache, a tensor, or `from_run` of other prompts")


@dataclass(eq=False, repr=False)
class OfLayer(SourcedController):
    """A class with a default site, whose first argument is therefore the layer.

    `layer` is that of the site; None: all layers. `hook_point` is another site, with `layer` or alone. Raises TypeError for a
    site in the place of the layer.
    """

    hook_point: Site = field(default="", kw_only=True)
    layer: int | None = None
    default_site: ClassVar[tuple[str, str]]  # (glob without `layer`, short name with `layer` or glob with "{layer}")

    def __post_init__(self) -> None:
        if self.layer is not None and not isinstance(self.layer, SupportsIndex):
            name = type(self).__name__
            raise TypeError(
                f"the first argument of {name} is a layer, got {self.layer!r}: give a site as hook_point=..."
            )
        self.hook_point, self.layer = self.place(self.hook_point, self.layer)
        super().__post_init__()

    @classmethod
    def place(cls, hook_point: Site, layer: int | None) -> tuple[Site, int | None]:
        if hook_point != "":
            return hook_point, layer
        site = cls.default_site[layer is not None]
        if layer is None or "{layer}" not in site:
            return site, layer
        if layer < 0:
            raise ValueError(f"the sites of {cls.__name__} go by a glob, which counts layers from 0; got {layer}")
        return site.format(layer=layer), None


@dataclass(eq=False, repr=False)
class PatchResidual(OfLayer, Patch):
    """`Patch` at the residual stream after a layer, `hook_resid_post`: `PatchResidual(layer, source=...)`.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.patch import PatchResidual
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> _, cache = model.run_with_cache("The capital of Italy is")
    >>> PatchResidual(3, positions=-1, source=cache)
    PatchResidual(3, hook_point='resid_post', positions=-1, source=tensor[1, 6, 128])
    """

    default_site = ("*.hook_resid_post", "resid_post")


@dataclass(eq=False, repr=False)
class PatchHead(OfLayer, Patch):
    """`Patch` at the outputs of attention heads, `hook_z`: `PatchHead(layer, heads=..., source=...)`."""

    default_site = ("*.attn.hook_z", "z")


@dataclass(eq=False, repr=False)
class PatchMLP(OfLayer, Patch):
    """`Patch` at the outputs of MLPs, `hook_mlp_out`: `PatchMLP(layer, source=...)`."""

    default_site = ("*.hook_mlp_out", "mlp_out")


@dataclass(eq=False, repr=False)
class MeanAblate(SourcedController):
    """Replaces values by a mean over a source, e.g. a cache of many prompts, or over the same forward pass.

    Wang et al. 2022 (arXiv:2211.00593).

    Args:
        over: the axes of the mean: "batch" (a mean for each position), "pos" (a mean for each row) or "batch pos". Padding is
            included. Without a source, generation with a key/value cache shows one new token at a time, and a mean over
            positions is over that token alone.

    Raises ValueError for another `over`; in the forward pass for "pos" at a site without positions, and for a mean over the
    batch of a single prompt without a source, which would change nothing.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions.patch import MeanAblate
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> others = [
    ...     "The capital of Italy is",
    ...     "The capital of Spain is",
    ...     "The capital of Japan is",
    ... ]
    >>> ablate = MeanAblate.from_run(model, others, "z", 1, heads=[7])
    >>> logits = model.run_with_hooks("The capital of France is", fwd_hooks=[ablate])
    """

    over: str = field(default="batch", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in ("batch", "pos", "batch pos"):
            raise ValueError(f"over must be 'batch', 'pos' or 'batch pos', got {self.over!r}")

    def made(self, source: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
        axes = [0] if "batch" in self.over else []
        if "pos" in self.over:
            at = position_axis(source.ndim, hook.dims)
            if at is None:
                raise ValueError(f"over={self.over!r}, and '{hook.name}' has no axis of positions")
            axes.append(at)
        axes = [axis for axis in axes if source.shape[axis] > 1]
        if self.source is None and self.over == "batch" and not axes:
            raise ValueError(
                f"'{hook.name}' shows a single prompt, whose mean over the batch is its own value: give a source, e.g. "
                "MeanAblate.from_run(model, other_prompts, ...), several prompts, or over='pos'"
            )
        return source.mean(axes, keepdim=True) if axes else source

    def acts_by_position(self, part: Part) -> bool:
        return self.source is not None or "pos" not in self.over


@dataclass(eq=False, repr=False)
class ResampleAblate(SourcedController):
    """Replaces each row of the batch by the values of another prompt (causal scrubbing; Chan et al. 2022).

    Without a source, rows of the batch are permuted so that none keeps its values. With a source, a row of it is drawn for
    each. The rows depend only on `seed`: they are the same at every site, position and step. The global random generators are
    not used.

    Raises ValueError in the forward pass for a batch of one row without a source.
    """

    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"a seed is a number of 64 bits, got {self.seed}")

    def made(self, source: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
        n, generator = len(value), torch.Generator().manual_seed(self.seed)
        if self.source is not None:
            return source[torch.randint(len(source), (n,), generator=generator).to(source.device)]
        if n < 2:
            raise ValueError(f"'{hook.name}' shows a single row: give a source, or at least two prompts in a batch")
        return value[other_rows(n, generator).to(value.device)]

    def acts_by_position(self, part: Part) -> bool:
        return True


@dataclass(eq=False, repr=False)
class FreezeAttention(OfLayer, Patch):
    """Freezes attention patterns at given values: what heads move can change, where they attend cannot. Default: all layers.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits". During generation the patterns of the prompt are
    frozen; those of new tokens are not.
    """

    default_site = ("*.attn.hook_pattern", "pattern")


@dataclass(eq=False, repr=False)
class FreezeNorm(OfLayer):
    """Freezes the divisors of norms, `hook_scale`, so that a norm is linear in its input. Default: all norms, or all of `layer`.

    With a source, at its values; without, at those of the forward pass, detached from the graph. `layer` counts from 0.
    """

    default_site = ("*.hook_scale", "*.{layer}.*.hook_scale")

    def made(self, source: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
        return source.detach()

    def acts_by_position(self, part: Part) -> bool:
        return True


def other_rows(n: int, generator: torch.Generator) -> Int[Tensor, " row"]:
    """Another row for each of `n` rows: a random cyclic permutation."""
    order = torch.randperm(n, generator=generator)
    donors = torch.empty_like(order)
    donors[order] = order.roll(1)
    return donors


def _put(new: Tensor, part: Part, old: Tensor) -> Tensor:
    return fitted(new, old, part, "the source")


def _of_site(source: Mapping[str, Tensor], site: object) -> Source:
    """The values of a source for a site, or all of them if its names do not match the site."""
    if isinstance(site, str) and f"{site}@1" in source:
        return {name: value for name, value in source.items() if name.partition("@")[0] == site}
    if isinstance(site, (str, tuple)) and site in source:
        return source[site]  # type: ignore[index]  # caches know tuples
    if isinstance(site, str):
        matching = {name: value for name, value in source.items() if fnmatchcase(name, site)}
        return matching or dict(source)
    return dict(source)


def _with_axes(source: Tensor, value: Tensor, hook: HookPoint) -> Tensor:
    """The source with missing leading axes added, of length 1."""
    if source.ndim > value.ndim:
        raise ValueError(
            f"the source has shape {tuple(source.shape)}, which does not broadcast to {tuple(value.shape)} at '{hook.name}'"
        )
    return source[(None,) * (value.ndim - source.ndim)] if source.ndim < value.ndim else source


def _has_positions(source: Tensor, hook: HookPoint) -> bool:
    axis = position_axis(source.ndim, hook.dims)
    return axis is not None and source.shape[axis] > 1


def _with_later_keys(source: Tensor, part: Part) -> Tensor:
    """Attention patterns padded to the current number of keys, with no attention to keys after the source."""
    if "key_pos" not in part.dims or part.along is None or not part.along.shown.is_generating:
        return source
    axis = part.dims.index("key_pos")
    missing = part.shape[axis] - source.shape[axis]
    if missing <= 0 or axis != source.ndim - 1:
        return source
    never = float("-inf") if "hook_attn_scores" in part.where else 0.0
    return F.pad(source, (0, missing), value=never)
