"""The grids of the `get_act_patch_*` sweeps: a site, the axes of the cells, and the checks before a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooked_lm.engine.edit import Cell
from hooked_lm.engine.experiment import Experiment, Metric
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.prompts import check_source, site_of_layer
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookedRootModule, UnknownSite, site_glob
from hooked_lm.models.checks import check_equal_heads
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.patching.setters import PATCH_SETTERS, Index, PatchSetter, change

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")


@dataclass(frozen=True)
class Grid:
    """A site, its patch setter, and the cells: the product of `axes`, or one per row of `index_df`."""

    activation_name: str
    setter: PatchSetter
    axes: Sequence[str] | None = None
    index_df: "pd.DataFrame | None" = None

    def __post_init__(self) -> None:
        if (self.axes is None) == (self.index_df is None):
            raise ValueError("give the cells of the sweep either as index_axis_names or as index_df")

    @property
    def names(self) -> list[str]:
        """The names of the indices."""
        return list(self.axes or ()) if self.index_df is None else list(self.index_df.columns)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the result."""
        if self.index_df is not None:
            return (len(self.index_df),)
        return tuple(_size(sizes, name) for name in self.names)

    def indices(self, sizes: Mapping[str, int]) -> list[Index]:
        """The indices of every cell."""
        if self.index_df is not None:
            return [[int(index) for index in row] for row in self.index_df.itertuples(index=False)]
        return [list(cell) for cell in product(*map(range, self.shape(sizes)))]


def table(grid: Grid, model: HookedRootModule, tokens: object) -> "pd.DataFrame":
    """The cells of a grid, one per row."""
    if grid.index_df is not None:
        return grid.index_df
    return pd.DataFrame(grid.indices(axis_sizes(model, grid.activation_name, tokens)), columns=grid.names)


def run_grids(
    model: HookedRootModule, tokens: Any, clean_cache: Mapping[str, Tensor], metric: Metric, grids: Sequence[Grid]
) -> list[Tensor]:
    """The metric of every cell of every grid, computed in one experiment; NaN where a layer lacks the site."""
    shapes, cells, where = [], [], []
    for number, grid in enumerate(grids):
        sizes = axis_sizes(model, grid.activation_name, tokens)
        indices = grid.indices(sizes)
        sites = _checked_sites(model, grid, sizes, indices)
        _check_cache(model, clean_cache, sites.values(), tokens, aligned=grid.setter in PATCH_SETTERS)
        shapes.append(grid.shape(sizes))
        for place, index in enumerate(indices):
            if index[0] in sites:
                site = sites[index[0]]
                cells.append([change(grid.setter, site, index, clean_cache[site], tokens.shape[-1])])
                where.append((number, place))
    title = f"patching {', '.join(dict.fromkeys(grid.activation_name for grid in grids))}"
    results = [torch.full((max(1, torch.Size(shape).numel()),), torch.nan) for shape in shapes]
    rows = tokens if len(tokens.shape) == 2 else tokens[None]
    for cell, score in one_number(model, rows, metric, cells, title):
        number, place = where[cell]
        results[number][place] = score
    device = next(model.parameters()).device
    return [
        result[: torch.Size(shape).numel()].view(shape).to(device)
        for result, shape in zip(results, shapes, strict=True)
    ]


@keeps_torch_state
def one_number(
    model: HookedRootModule, tokens: Rows, metric: Metric, cells: Sequence[Cell], title: str
) -> list[tuple[int, float]]:
    """Pairs (index of the cell, its metric); the metric must be one number for all prompts."""
    sites = {change.site for cell in cells for change in cell}
    experiment = Experiment(model, tokens, [metric], compare=sites)
    if experiment.scores.shape[1] != 1:
        n_prompts = experiment.scores.shape[1]
        raise ValueError(
            f"the metric must give one number for logits {tuple(experiment.shape)}, but returned a tensor ({n_prompts},); "
            "take its mean over the batch"
        )
    torch.set_grad_enabled(False)  # until the sweep ends
    return [(cell, scores.item()) for cell, scores in experiment.run_without_gradients(cells, title)]


# ---- checks before a sweep -------------------------------------------------------------------------------------------


def axis_sizes(model: HookedRootModule, activation_name: str, tokens: object) -> dict[str, int]:
    """The size of each axis for this site. Raises KeyError if no layer has the site, TypeError if `tokens` is not a tensor."""
    refuse_two_stacks(model, "a classic sweep")
    if not isinstance(tokens, (Tensor, VisionInputs)):
        got = type(tokens).__name__
        raise TypeError(f"corrupted_tokens must be a tensor of ids, got {got}: model.to_tokens(text) makes one")
    cfg = model.cfg
    [site] = _site_of_some_layer(model, activation_name)
    if "head" in model.hook_dict[site].dims:
        check_equal_heads(model, "a classic sweep over heads")
    per_kv_head = "kv_head" in model.hook_dict[site].dims
    n_heads = (cfg.n_key_value_heads if per_kv_head else None) or cfg.n_heads
    n_pos = tokens.shape[-1]
    heads = {"head": n_heads, "head_index": n_heads}
    return {"layer": cfg.n_layers, "pos": n_pos, "src_pos": n_pos, "dest_pos": n_pos, **heads}


def _site_of_some_layer(model: HookedRootModule, activation_name: str) -> list[str]:
    """The name of the site in the first layer that has it; raises KeyError with similar names if no layer has it."""
    there = [layer for layer in range(model.cfg.n_layers) if site_of_layer(model, activation_name, layer) is not None]
    return model.names((activation_name, there[0] if there else 0))


def _size(sizes: Mapping[str, int], name: str) -> int:
    if name not in sizes:
        raise ValueError(f"unknown axis {name!r}; the axes are {', '.join(sizes)}; others need an index_df")
    return sizes[name]


def _checked_sites(
    model: HookedRootModule, grid: Grid, sizes: Mapping[str, int], indices: Sequence[Index]
) -> dict[int, str]:
    """The full name of the site in each layer that has it. Raises IndexError for a cell out of range, KeyError for a layer of
    `index_df` that lacks the site."""
    names = grid.names
    if names[:1] != ["layer"]:
        raise ValueError(f"the first axis of a sweep is 'layer', got {names[:1]}")
    for cell in indices:
        for name, index in zip(names, cell, strict=True):
            size = sizes.get(name)
            if size is not None and not -size <= index < size:
                raise IndexError(f"{name} {index} is out of range: there are {size}, so {-size} to {size - 1}")
    found = {
        layer: site_of_layer(model, grid.activation_name, layer) for layer in sorted({cell[0] for cell in indices})
    }
    if grid.index_df is not None and None in found.values():
        model.names((grid.activation_name, next(layer for layer, site in found.items() if site is None)))  # raises
    return {layer: site for layer, site in found.items() if site is not None}


def _check_cache(
    model: HookedRootModule, clean_cache: Mapping[str, Tensor], sites: Iterable[str], tokens: Rows, aligned: bool
) -> None:
    """Raises if the clean cache lacks a site, or, with `aligned`, if its shape does not fit the prompts or the model."""
    batch, n_pos = tokens.shape if len(tokens.shape) == 2 else (1, tokens.shape[0])
    for site in sites:
        if site not in clean_cache:
            how = f"run_with_cache(clean_tokens, names_filter='{site_glob(site)}')"
            raise UnknownSite(f"the clean cache has no '{site}': {how} includes it")
        if aligned:
            check_source(model, clean_cache[site], site, batch, n_pos)
