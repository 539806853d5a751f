"""The cells of a sweep: sites x layers x positions x heads or neurons, where the layers have them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from hooked_lm.engine.cells_before_blocks import in_tower, is_of_images, n_positions, shapes_at
from hooked_lm.engine.edit import Change, Edit, Rest
from hooked_lm.engine.meta_values import meta_values, one_token
from hooked_lm.engine.prompts import (
    AxisSelection,
    HeadSelection,
    chosen,
    labelled_heads,
    position_axis,
    present,
    site_of_layer,
    values_of,
)
from hooked_lm.engine.stacks import tokens_at
from hooked_lm.engine.study import Study
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.head_labels import head_label
from hooked_lm.models.text.source_and_target import SourceAndTarget
from hooked_lm.models.vision.inputs import Rows, ids_of
from hooked_lm.results import Label

FEATURES = {"head": ("head", "kv_head", "ssm_head"), "neuron": ("d_mlp", "d_inner")}
PRESETS: dict[str, tuple[tuple[str, ...], AxisSelection, HeadSelection, AxisSelection]] = {
    "layer": (("attn_out", "mixer_out", "mlp_out"), None, None, None),  # sites, positions, heads, neurons
    "position": (("resid_pre",), "each", None, None),
    "head": (("z",), None, "each", None),
    "neuron": (("post",), None, None, "each"),
}
T = TypeVar("T")
Choice = list[int] | None  # indices of an axis of the grid; None: no axis, all together


def by_component(
    model: HookedRootModule,
    by: str | None,
    sites: str | Sequence[str] | None,
    positions: AxisSelection,
    heads: HeadSelection,
    neurons: AxisSelection,
) -> tuple[list[str], AxisSelection, HeadSelection, AxisSelection]:
    """The short names of sites and the choices of axes: those given, and for `by` those of PRESETS where a default is given.

    Raises ValueError for no sites, and for another `by`.
    """
    given = [sites] if isinstance(sites, str) or not isinstance(sites, Sequence | None) else sites
    if given is not None and not given:
        raise ValueError("sites is empty: name at least one")
    if by is None:
        return list(given or ["resid_pre"]), positions, heads, neurons
    if by not in PRESETS:
        raise ValueError(f"by must be {', '.join(map(repr, PRESETS))} or None, got {by!r}")
    names, of_positions, of_heads, of_neurons = PRESETS[by]
    if given is None:
        given = present(model, names, range(model.stack_of(names[0])[1])) or names[:1]
    is_default = isinstance(positions, str) and positions == "each"
    return (
        list(given),
        of_positions if is_default else positions,
        of_heads if heads is None else heads,
        of_neurons if neurons is None else neurons,
    )


class SweepPlan:
    """The grid of a sweep over sites with these short names; see `sweep` for the other arguments."""

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Rows,
        names: Sequence[str],
        layers: AxisSelection = "each",
        positions: AxisSelection = "each",
        heads: HeadSelection = None,
        neurons: AxisSelection = None,
    ) -> None:
        if heads is not None and neurons is not None:
            raise ValueError("give heads or neurons, not both: a site has one or the other")
        if strange := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"sites must be short names such as 'resid_pre', got {strange[0]!r}")
        self.model, self.names = model, names
        self.n_layers = self._n_layers()
        self.pairs = labelled_heads(heads)  # (layer, head) of each head, if they are named by labels
        if self.pairs is not None:
            if not (isinstance(layers, str) and layers == "each"):
                raise ValueError(f"heads={heads!r} have their layers in their labels: leave out layers={layers!r}")
            layers, heads = (sorted({pair[i] for pair in self.pairs}) for i in (0, 1))
        self.layers = None if self.n_layers == 0 else chosen(layers, self.n_layers, "layer")
        self.found = self._found()
        if any(is_of_images(model, site) for site in self.sites):
            tokens = in_tower(model, tokens)
        self.tokens = self._tokens(tokens, apart=positions is not None)
        self.shapes = shapes_at(model, tokens, self.sites)  # of values whose batch are images
        self.positions = chosen(positions, self._n_pos(), "position")
        self.like: dict[str, Tensor] = {}  # shapes and dtypes of values, as meta tensors, if determined
        self.feature = "head" if heads is not None else "neuron" if neurons is not None else None
        self.sizes = self._sizes(tokens) if self.feature is not None else {}
        which: Any = heads if heads is not None else neurons
        self.features = None if self.feature is None else chosen(which, max(self.sizes.values()), self.feature)
        self.axes = self._axes()

    @property
    def sites(self) -> list[str]:
        """The full names of all sites."""
        return list(self.found.values())

    def study(self, value: Callable[[str], Tensor], title: str, changes: str = "corrupted") -> Study:
        """The study that puts `value(site)` into every cell."""
        values = {site: value(site) for site in self.sites}
        cells = self.cells(lambda site, positions, rest: Edit(site, values[site], positions, rest))
        return Study(self.axes, cells, title=title, changes=changes)

    def cells(self, change: Callable[[str, tuple[int, ...] | None, Rest], T]) -> dict[tuple[int, ...], list[T]]:
        """Maps each existing grid index to the results of `change(site, positions, rest)` for its sites."""
        cells = {place: [change(*each) for each in self._targets(*cell)] for place, cell in self._places()}
        return {place: cell for place, cell in cells.items() if cell}

    def cell_at(self, values: dict[str, Tensor], place: Sequence[int]) -> list[Change]:
        """The edits at one grid index, with these values of the sites."""
        indices = list(place)
        name = self.names[indices.pop(0)] if len(self.names) > 1 else self.names[0]
        layers = None if self.layers is None or self.pairs else [self.layers[indices.pop(0)]]
        positions = None if self.positions is None else [self.positions[indices.pop(0)]]
        features = None if self.features is None or self.pairs else [self.features[indices.pop(0)]]
        if self.pairs:
            layers, features = ([number] for number in self.pairs[indices.pop(0)])
        targets = self._targets(name, layers, positions, features)
        return [Edit(site, values[site], where, rest) for site, where, rest in targets]

    def _places(self) -> Iterator[tuple[tuple[int, ...], tuple[str, Choice, Choice, Choice]]]:
        """Yields each grid index, with the site's name, layers, positions and features that it edits."""
        layers, positions, features = (_each(some) for some in (self.layers, self.positions, self.features))
        grid = list(product(layers, positions, features))
        if self.pairs:
            heads = list(enumerate(self.pairs))
            grid = [((None, [layer]), where, (i, [head])) for where, (i, (layer, head)) in product(positions, heads)]
        for (number, name), cell in product(enumerate(self.names), grid):
            place = [number] if len(self.names) > 1 else []
            place += [i for i, _ in cell if i is not None]
            yield tuple(place), (name, *(some for _, some in cell))  # type: ignore[misc]

    def _targets(
        self, name: str, layers: Choice, positions: Choice, features: Choice
    ) -> Iterator[tuple[str, tuple[int, ...] | None, Rest]]:
        """Yields the sites of a cell, with positions and indices; skips layers without the site or the head."""
        where = None if positions is None else tuple(positions)
        for layer in range(max(self.n_layers, 1)) if layers is None else layers:
            site = self.found.get((name, layer))
            if site is not None and (features is None or features[0] < self.sizes[site]):
                yield site, where, () if features is None else self._rest(site, features[0])

    def _n_layers(self) -> int:
        """The number of layers of the sites' stack; raises ValueError for sites of both stacks."""
        stacks = {name: self.model.stack_of(name) for name in self.names}
        if len(set(stacks.values())) > 1:
            raise ValueError(
                f"a grid has the layers of one stack, and {list(self.names)} are sites of two: sweep each stack separately"
            )
        return stacks[self.names[0]][1]

    def _tokens(self, tokens: Rows, apart: bool) -> Rows:
        """The tokens at the positions of the sites; with `apart`, raises ValueError if sites have different tokens."""
        found = {site: tokens_at(self.model, tokens, site) for site in self.sites}
        first, *others = found.values()
        if apart and any(not torch.equal(ids_of(other), ids_of(first)) for other in others):
            raise ValueError(
                f"{list(self.names)} have positions of the source and of the target: sweep each site separately"
            )
        return first

    def _found(self) -> dict[tuple[str, int], str]:
        """The full name of each site in each layer that has it; raises KeyError, with similar names, if no layer has it."""
        if self.n_layers == 0:
            return {(name, 0): name for name in self.names}
        layers = range(self.n_layers) if self.layers is None else self.layers
        found = {(name, layer): site_of_layer(self.model, name, layer) for name in self.names for layer in layers}
        for name in self.names:
            if all(found[name, layer] is None for layer in layers):
                self.model.names((name, layers[0]))
        return {key: site for key, site in found.items() if site is not None}

    def _n_pos(self) -> int:
        """The number of positions of the sites; raises ValueError if they have different ones."""
        found = {n_positions(shape, self.model.hook_dict[site].dims) for site, shape in self.shapes.items()}
        if len(found) > 1:
            raise ValueError(f"{list(self.names)} have {sorted(found)} positions: sweep each site separately")
        return found.pop() if found else self.tokens.shape[1]

    def _sizes(self, tokens: Rows) -> dict[str, int]:
        """The number of heads or neurons of each site, determined by a forward pass of one token."""
        if self.shapes:
            return {site: shape[self._axis(site)] for site, shape in self.shapes.items()}
        self.like = meta_values(self.model, tokens, self.sites)
        if self.like.keys() == set(self.sites):
            return {site: self.like[site].shape[self._axis(site)] for site in self.sites}
        one = tokens[:1] if isinstance(tokens, SourceAndTarget) else one_token(self.model, tokens)
        shown = values_of(self.model, one, self.sites)
        return {site: shown[site].shape[self._axis(site)] for site in self.sites}

    def _axis(self, site: str) -> int:
        """The axis of heads or neurons of a site; raises ValueError if there is none."""
        dims = self.model.hook_dict[site].dims
        for dim in FEATURES[self.feature or "head"]:
            if dim in dims:
                return dims.index(dim)
        raise ValueError(f"'{site}' [{', '.join(dims)}] has no {self.feature}s")

    def _rest(self, site: str, feature: int) -> Rest:
        """The index of a head or neuron, for the axes after batch and position."""
        dims = list(self.model.hook_dict[site].dims)
        axis = dims[self._axis(site)]
        if "query_pos" in dims:
            dims.insert(1, dims.pop(dims.index("query_pos")))
        return (*[slice(None)] * (dims.index(axis) - 2), feature)

    def _axes(self) -> dict[str, list[Label]]:
        axes: dict[str, list[Label]] = {"site": list(self.names)} if len(self.names) > 1 else {}
        if self.layers is not None and not self.pairs:
            axes["layer"] = list(self.layers)
        if self.positions is not None:
            name, labels = position_axis(self.model, self.tokens, self.sites[0])
            axes[name] = [labels[pos] for pos in self.positions]
        if self.features is not None and self.feature is not None:
            axes[self.feature] = [head_label(*pair) for pair in self.pairs or ()] or list(self.features)
        return axes


def _each(some: Choice) -> list[tuple[int | None, Choice]]:
    return [(None, None)] if some is None else [(i, [index]) for i, index in enumerate(some)]
