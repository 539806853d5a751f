"""Activation patching: patch an activation of a clean run into a corrupted run, and measure how much behaviour is recovered.

The method of causal tracing (Meng et al. 2022, arXiv:2202.05262) and of interchange interventions (Geiger et al. 2021,
arXiv:2106.02997). A *sweep* repeats it for every cell of a grid, such as layer x position. `get_act_patch_resid_pre`
and similar functions sweep over common sites, `generic_activation_patch` over any site. All take the cache of the clean
run and a metric that maps logits [batch, pos, d_vocab] to one number.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.engine.experiment import Metric
from hooked_lm.extras import lazy_import, require_extra
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.patching.grids import Grid, run_grids, table
from hooked_lm.patching.setters import (
    PATCH_SETTERS,
    PatchSetter,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

Tokens = Int[Tensor, "*batch pos"] | VisionInputs

# ---- any sweep -------------------------------------------------------------------------------------------------------


def generic_activation_patch(
    model: HookedRootModule,
    corrupted_tokens: Tokens,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric,
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: "pd.DataFrame | None" = None,
    return_index_df: bool = False,
) -> Any:
    """The metric of the corrupted run with one clean activation patched in, for every cell of a grid.

    Args:
        corrupted_tokens: the prompts to run, of the same length as those of `clean_cache`; `VisionInputs` for a model that reads
            images.
        clean_cache: the cache of `run_with_cache` on the clean prompts, with at least this site.
        patching_metric: maps logits [batch, pos, d_vocab] to one number.
        patch_setter: called with the corrupted activation, the cell's indices and the clean activation of the same site;
            returns the patched activation. It gets a copy of the corrupted activation, which it may edit in place.
        activation_name: the short name of a site of the layers: "resid_pre", "z", "pattern", ...
        index_axis_names: the axes of the grid, "layer" first: "pos", "src_pos", "dest_pos" are positions, "head" and
            "head_index" are the heads of the site (key/value heads for `k` and `v` with grouped-query attention).
        index_df: the cells, instead of the axes: one row per cell, "layer" in the first column.
        return_index_df: whether to return the table of cells too.

    Returns the metrics with one axis per axis name, or [row] for an `index_df`; NaN where a layer lacks the site. Raises before
    the sweep: TypeError if the prompts are not a tensor, ValueError for prompts of unequal length and for a metric that does
    not give one number (or gives NaN) on the corrupted run, KeyError for a site that the model or the cache lacks,
    IndexError for cells out of range.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(
    ...     ["When Mary and John left, John", "When Mary and John left, Mary"]
    ... )[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> setter = (
    ...     patching.layer_head_vector_patch_setter
    ... )  # your own functions run as whole forward passes
    >>> effect = patching.generic_activation_patch(
    ...     model,
    ...     corrupted,
    ...     cache,
    ...     lambda logits: logits[0, -1].max(),
    ...     setter,
    ...     "z",
    ...     ("layer", "head"),
    ... )
    >>> effect.shape == (model.cfg.n_layers, model.cfg.n_heads)
    True
    """
    grid = Grid(activation_name, patch_setter, index_axis_names, index_df)
    if return_index_df:
        require_extra("pandas", "viz")  # raises before the model runs
    [metrics] = run_grids(model, corrupted_tokens, clean_cache, patching_metric, [grid])
    return (metrics, table(grid, model, corrupted_tokens)) if return_index_df else metrics


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> "pd.DataFrame":
    """Every combination of indices below the given bounds, one per row; the last column changes fastest.

    >>> make_df_from_ranges([2, 2], ["layer", "pos"]).to_numpy().tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    return pd.DataFrame(list(product(*map(range, column_max_ranges))), columns=list(column_names))


# ---- common sweeps ---------------------------------------------------------------------------------------------------


@runtime_checkable
class Sweep(Protocol):
    """The type of the `get_act_patch_*` functions: a sweep with a fixed site and setter."""

    def __call__(
        self,
        model: HookedRootModule,
        corrupted_tokens: Tokens,
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric,
        index_axis_names: Sequence[str] | None = None,
        index_df: "pd.DataFrame | None" = None,
        return_index_df: bool = False,
    ) -> Any: ...


def _sweep(name: str, what: str, activation_name: str, patch_setter: PatchSetter) -> Sweep:
    axes = PATCH_SETTERS[patch_setter].axes

    def sweep(
        model: HookedRootModule,
        corrupted_tokens: Tokens,
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric,
        index_axis_names: Sequence[str] | None = None,
        index_df: "pd.DataFrame | None" = None,
        return_index_df: bool = False,
    ) -> Any:
        grid = index_axis_names or (axes if index_df is None else None)
        given = (model, corrupted_tokens, clean_cache, patching_metric)
        return generic_activation_patch(*given, patch_setter, activation_name, grid, index_df, return_index_df)

    sweep.__name__ = sweep.__qualname__ = f"get_act_patch_{name}"
    sweep.__doc__ = _SWEEP_DOC.format(name=name, what=what, axes=", ".join(axes), site=activation_name, dims=len(axes))
    return sweep


_SWEEP_DOC = """Patch {what}: the metric for every cell, [{axes}].

    The site is `{site}` of each layer; see `generic_activation_patch` for arguments and errors.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> patching.get_act_patch_{name}(model, corrupted, cache, lambda logits: logits[0, -1, 0]).ndim
    {dims}
    """

get_act_patch_resid_pre = _sweep(
    "resid_pre", "the stream before each block, one position at a time", "resid_pre", layer_pos_patch_setter
)
get_act_patch_resid_mid = _sweep(
    "resid_mid", "the stream between attention and MLP, one position at a time", "resid_mid", layer_pos_patch_setter
)
get_act_patch_attn_out = _sweep(
    "attn_out", "the output of attention, one position at a time", "attn_out", layer_pos_patch_setter
)
get_act_patch_mlp_out = _sweep(
    "mlp_out", "the output of the MLP, one position at a time", "mlp_out", layer_pos_patch_setter
)

get_act_patch_attn_head_out_by_pos = _sweep(
    "attn_head_out_by_pos", "a head's mixed values at one position", "z", layer_pos_head_vector_patch_setter
)
get_act_patch_attn_head_q_by_pos = _sweep(
    "attn_head_q_by_pos", "a head's query at one position", "q", layer_pos_head_vector_patch_setter
)
get_act_patch_attn_head_k_by_pos = _sweep(
    "attn_head_k_by_pos", "a key/value head's key at one position", "k", layer_pos_head_vector_patch_setter
)
get_act_patch_attn_head_v_by_pos = _sweep(
    "attn_head_v_by_pos", "a key/value head's value at one position", "v", layer_pos_head_vector_patch_setter
)
get_act_patch_attn_head_pattern_by_pos = _sweep(
    "attn_head_pattern_by_pos",
    "a head's attention pattern at one query position",
    "pattern",
    layer_head_pos_pattern_patch_setter,
)
get_act_patch_attn_head_pattern_dest_src_pos = _sweep(
    "attn_head_pattern_dest_src_pos",
    "a head's attention from one query position to one key position",
    "pattern",
    layer_head_dest_src_pos_pattern_patch_setter,
)

get_act_patch_attn_head_out_all_pos = _sweep(
    "attn_head_out_all_pos", "a head's mixed values", "z", layer_head_vector_patch_setter
)
get_act_patch_attn_head_q_all_pos = _sweep(
    "attn_head_q_all_pos", "a head's queries", "q", layer_head_vector_patch_setter
)
get_act_patch_attn_head_k_all_pos = _sweep(
    "attn_head_k_all_pos", "a key/value head's keys", "k", layer_head_vector_patch_setter
)
get_act_patch_attn_head_v_all_pos = _sweep(
    "attn_head_v_all_pos", "a key/value head's values", "v", layer_head_vector_patch_setter
)
get_act_patch_attn_head_pattern_all_pos = _sweep(
    "attn_head_pattern_all_pos", "a head's attention pattern", "pattern", layer_head_pattern_patch_setter
)

# ---- several sweeps in one tensor ------------------------------------------------------------------------------------


def get_act_patch_attn_head_all_pos_every(
    model: HookedRootModule,
    corrupted_tokens: Tokens,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "5 layer head"]:
    """Patch outputs, queries, keys, values and patterns of heads, in this order, at all positions together.

    With grouped-query attention the rows of keys and values are padded with NaN.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> every = patching.get_act_patch_attn_head_all_pos_every
    >>> len(every(model, corrupted, cache, lambda logits: logits[0, -1, 0]))
    5
    """
    setters = [
        *[(name, layer_head_vector_patch_setter) for name in "zqkv"],
        ("pattern", layer_head_pattern_patch_setter),
    ]
    return _stacked(run_grids(model, corrupted_tokens, clean_cache, metric, _grids(setters)))


def get_act_patch_attn_head_by_pos_every(
    model: HookedRootModule,
    corrupted_tokens: Tokens,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "5 layer pos head"]:
    """Patch outputs, queries, keys, values and patterns of heads, one position at a time.

    The position of a pattern is that of the query.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"], prepend_bos=False)[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> every = patching.get_act_patch_attn_head_by_pos_every
    >>> len(every(model, corrupted, cache, lambda logits: logits[0, -1, 0]))
    5
    """
    setters = [(name, layer_pos_head_vector_patch_setter) for name in "zqkv"]
    setters.append(("pattern", layer_head_pos_pattern_patch_setter))
    *vectors, pattern = run_grids(model, corrupted_tokens, clean_cache, metric, _grids(setters))
    return _stacked([*vectors, pattern.transpose(1, 2)])


def get_act_patch_block_every(
    model: HookedRootModule,
    corrupted_tokens: Tokens,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "3 layer pos"]:
    """Patch `resid_pre`, `attn_out` and `mlp_out` of each block, one position at a time.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> len(
    ...     patching.get_act_patch_block_every(
    ...         model, corrupted, cache, lambda logits: logits[0, -1, 0]
    ...     )
    ... )
    3
    """
    setters = [(name, layer_pos_patch_setter) for name in ("resid_pre", "attn_out", "mlp_out")]
    return _stacked(run_grids(model, corrupted_tokens, clean_cache, metric, _grids(setters)))


def _grids(setters: Iterable[tuple[str, PatchSetter]]) -> list[Grid]:
    """The full grid of each site and setter."""
    return [Grid(name, setter, PATCH_SETTERS[setter].axes) for name, setter in setters]


def _stacked(results: Iterable[Tensor]) -> Tensor:
    """Stack sweeps along a new first axis, padded with NaN to the largest number of heads."""
    results = list(results)
    width = max(result.shape[-1] for result in results)
    pad = torch.nn.functional.pad
    return torch.stack([pad(r, (0, width - r.shape[-1]), value=float("nan")) for r in results])
