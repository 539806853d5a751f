"""Activation patching: put one value of a clean run into a corrupted run, and see how much of the behaviour returns.

The method of causal tracing (Meng et al. 2022, arXiv:2202.05262) and of interchange interventions (Geiger et al. 2021,
arXiv:2106.02997). A *sweep* repeats it for every cell of a grid, such as layer x position: `get_act_patch_resid_pre`
and its like are sweeps over common sites, and `generic_activation_patch` makes one over any site. All take the clean
run as a cache, and a metric from logits [batch, pos, d_vocab] to one number.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol, runtime_checkable

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from hooked_lm.hooks import HookPoint, UnknownSite, site_glob
from hooked_lm.models.decoder import HookedTransformer

Metric = Callable[[Tensor], Any]
Index = Sequence[int]
PatchSetter = Callable[[Tensor, Index, Tensor], Tensor]

# ---- any sweep -------------------------------------------------------------------------------------------------------


def generic_activation_patch(
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "*batch pos"],
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric,
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: pd.DataFrame | None = None,
    return_index_df: bool = False,
) -> Any:
    """The metric of the corrupted run with one clean value put in, for every cell of a grid.

    Args:
        corrupted_tokens: the prompts to run, of the same length as those of `clean_cache`.
        clean_cache: what `run_with_cache` kept of the clean prompts, at least this site.
        patching_metric: from logits [batch, pos, d_vocab] to one number.
        patch_setter: called with the corrupted value, the cell's indices and the clean value of the same site; returns
            what the run goes on with. It may edit the corrupted value in place: it is given a copy.
        activation_name: the short name of a site that every layer has: "resid_pre", "z", "pattern", ...
        index_axis_names: the axes of the grid, "layer" first: "pos", "src_pos", "dest_pos" run over the positions,
            "head" and "head_index" over the heads of the site (key/value heads where it is per key/value head).
        index_df: instead of the axes, the cells themselves: a row each, "layer" in the first column.
        return_index_df: return the table of cells as well.

    Returns the metrics, with an axis for each name, or [row] for an `index_df`. Raises, before the sweep starts,
    TypeError for prompts that are no tensor, ValueError for prompts of unequal length and for a metric that does not
    give one number (or gives NaN) on the corrupted run, KeyError for a site that the model or the cache lacks,
    IndexError for cells that are out of range.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["When Mary and John left, John", "When Mary and John left, Mary"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> def silence(corrupted_value, index, clean_value):  # no patch: this head says nothing
    ...     corrupted_value[:, :, index[1]] = 0
    ...     return corrupted_value
    >>> effect = patching.generic_activation_patch(
    ...     model, corrupted, cache, lambda logits: logits[0, -1].max(), silence, "z", ("layer", "head")
    ... )
    >>> effect.shape == (model.cfg.n_layers, model.cfg.n_heads)
    True
    """
    if (index_axis_names is None) == (index_df is None):
        raise ValueError("give the cells of the sweep once: as index_axis_names or as index_df")
    sizes = _axis_sizes(model, activation_name, corrupted_tokens)
    if index_df is None:
        names = list(index_axis_names or ())
        shape = tuple(_size(sizes, name) for name in names)
        cells = [list(cell) for cell in product(*map(range, shape))]
    else:
        names, shape = list(index_df.columns), (len(index_df),)
        cells = [[int(index) for index in row] for row in index_df.itertuples(index=False)]
    sites = _checked_sites(model, activation_name, names, sizes, cells)
    _check_cache(model, clean_cache, sites.values(), corrupted_tokens, aligned=patch_setter in PATCH_SETTERS)

    with torch.no_grad():
        run = _CorruptedRun(model, corrupted_tokens)
        if (score := _score(patching_metric, run.logits(model.cfg.n_layers))) != score:
            raise ValueError("the metric of the corrupted run is NaN: nothing can be compared with it")
        results = []
        for cell in tqdm(cells, desc=f"patching {activation_name}", unit="run"):
            site = sites[cell[0]]
            patch = _patch(patch_setter, cell, clean_cache[site])
            logits = run.logits(cell[0] % model.cfg.n_layers, [(site, patch)])
            results.append(_score(patching_metric, logits))
    metrics = torch.tensor(results, device=model.device, dtype=torch.float32).view(shape)
    if not return_index_df:
        return metrics
    return metrics, (pd.DataFrame(cells, columns=names) if index_df is None else index_df)


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> pd.DataFrame:
    """Every combination of indices below the given bounds, a row each, the last column changing fastest.

    >>> make_df_from_ranges([2, 2], ["layer", "pos"]).to_numpy().tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    return pd.DataFrame(list(product(*map(range, column_max_ranges))), columns=list(column_names))


class _CorruptedRun:
    """The corrupted run, kept as the stream before each block, so that it can be resumed at any of them."""

    def __init__(self, model: HookedTransformer, tokens: Tensor) -> None:
        if not isinstance(model, HookedTransformer):
            raise TypeError(f"sweeps run on a HookedTransformer; patch a {type(model).__name__} with run_with_hooks")
        self.model = model
        resid, _, pos_embed, mask = model.input_to_embed(tokens)
        self.shared: dict[str, Any] = {"shortformer_pos_embed": pos_embed, "attention_mask": mask}
        self.streams = [resid]
        for layer in range(model.cfg.n_layers):
            resid = model(resid.clone(), start_at_layer=layer, stop_at_layer=layer + 1, **self.shared)
            self.streams.append(resid)

    def logits(self, layer: int, hooks: Sequence[Any] = ()) -> Float[Tensor, "batch pos d_vocab"]:
        """What comes out when the blocks from `layer` on run again, with these hooks."""
        stream = self.streams[layer].clone()  # a hook that the caller left on the model may edit in place
        return self.model.run_with_hooks(stream, start_at_layer=layer, fwd_hooks=hooks, **self.shared)


def _patch(patch_setter: PatchSetter, cell: Index, clean: Tensor) -> Callable[..., Tensor]:
    def patch(value: Tensor, hook: HookPoint) -> Tensor:
        return patch_setter(value, list(cell), clean)

    return patch


def _score(metric: Metric, logits: Tensor) -> float:
    value = metric(logits)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"the metric must give one number for logits {tuple(logits.shape)}, and gave {got}; "
            "take its mean over the batch"
        ) from None


# ---- checks before a sweep -------------------------------------------------------------------------------------------


def _axis_sizes(model: HookedTransformer, activation_name: str, tokens: Any) -> dict[str, int]:
    """How long each axis of a grid is, for this site; raises if the first layer lacks it, or for text as tokens."""
    if not isinstance(tokens, Tensor):
        got = type(tokens).__name__
        raise TypeError(f"corrupted_tokens must be a tensor of ids, got {got}: model.to_tokens(text) makes one")
    cfg, [site] = model.cfg, model.names((activation_name, 0))
    per_kv_head = "kv_head" in model.hook_dict[site].dims
    n_heads = (cfg.n_key_value_heads if per_kv_head else None) or cfg.n_heads
    n_pos = tokens.shape[-1]
    heads = {"head": n_heads, "head_index": n_heads}
    return {"layer": cfg.n_layers, "pos": n_pos, "src_pos": n_pos, "dest_pos": n_pos, **heads}


def _size(sizes: dict[str, int], name: str) -> int:
    if name not in sizes:
        raise ValueError(f"unknown axis {name!r}; the axes are {', '.join(sizes)}; others need an index_df")
    return sizes[name]


def _checked_sites(
    model: HookedTransformer, activation_name: str, names: list[str], sizes: dict[str, int], cells: Sequence[Index]
) -> dict[int, str]:
    """The full name of the site in each layer that the cells name; raises for a cell out of range."""
    if names[:1] != ["layer"]:
        raise ValueError(f"the first axis of a sweep is 'layer', got {names[:1]}")
    for cell in cells:
        for name, index in zip(names, cell, strict=True):
            size = sizes.get(name)
            if size is not None and not -size <= index < size:
                raise IndexError(f"{name} {index} is out of range: there are {size}, so {-size} to {size - 1}")
    return {layer: model.names((activation_name, layer))[0] for layer in sorted({cell[0] for cell in cells})}


def _check_cache(
    model: HookedTransformer, clean_cache: Mapping[str, Tensor], sites: Iterable[str], tokens: Tensor, aligned: bool
) -> None:
    """Raises if the clean cache lacks a site, or (`aligned`) holds another number of prompts or positions."""
    batch, n_pos = tokens.shape if tokens.ndim == 2 else (1, tokens.shape[0])
    for site in sites:
        if site not in clean_cache:
            how = f"run_with_cache(clean_tokens, names_filter='{site_glob(site)}')"
            raise UnknownSite(f"the clean cache holds no '{site}': {how} keeps it")
        if not aligned:
            continue
        dims, shape = model.hook_dict[site].dims, tuple(clean_cache[site].shape)
        if len(shape) != len(dims):
            raise ValueError(
                f"the clean '{site}' has shape {shape}; expected [{', '.join(dims)}]: keep the batch dimension"
            )
        lengths = dict(zip(dims, shape, strict=True))
        if (clean_pos := lengths.get("pos", lengths.get("query_pos", n_pos))) != n_pos:
            raise ValueError(
                f"clean and corrupted prompts differ in length: '{site}' of the clean run has {clean_pos} positions, "
                f"the corrupted tokens have {n_pos}; patching position by position needs prompts that line up"
            )
        if lengths.get("batch", batch) not in (1, batch):
            raise ValueError(f"the clean run has {lengths['batch']} prompts, the corrupted run {batch}; give as many")


# ---- patch setters ---------------------------------------------------------------------------------------------------


def _take_over(corrupted: Tensor, clean: Tensor, *where: int | slice) -> Tensor:
    """Overwrite one place of every row of the batch by the clean value."""
    corrupted[(slice(None), *where)] = clean[(slice(None), *where)]
    return corrupted


def layer_pos_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Index (layer, pos), of values [batch, pos, ...]. Edits in place and returns, as all setters do.

    >>> import torch
    >>> layer_pos_patch_setter(torch.zeros(1, 3, 1), [0, 1], torch.ones(1, 3, 1)).flatten()
    tensor([0., 1., 0.])
    """
    _, pos = index
    return _take_over(corrupted_activation, clean_activation, pos)


def layer_pos_head_vector_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Index (layer, pos, head), of values [batch, pos, head, ...]."""
    _, pos, head = index
    return _take_over(corrupted_activation, clean_activation, pos, head)


def layer_head_vector_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Index (layer, head), of values [batch, pos, head, ...]."""
    _, head = index
    return _take_over(corrupted_activation, clean_activation, slice(None), head)


def layer_head_pattern_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Index (layer, head), of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head = index
    return _take_over(corrupted_activation, clean_activation, head)


def layer_head_pos_pattern_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Index (layer, head, query_pos), of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head, query_pos = index
    return _take_over(corrupted_activation, clean_activation, head, query_pos)


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Index, clean_activation: Tensor
) -> Tensor:
    """Index (layer, head, query_pos, key_pos), of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head, query_pos, key_pos = index
    return _take_over(corrupted_activation, clean_activation, head, query_pos, key_pos)


PATCH_SETTERS: dict[PatchSetter, tuple[str, ...]] = {
    layer_pos_patch_setter: ("layer", "pos"),
    layer_pos_head_vector_patch_setter: ("layer", "pos", "head"),
    layer_head_vector_patch_setter: ("layer", "head"),
    layer_head_pattern_patch_setter: ("layer", "head_index"),
    layer_head_pos_pattern_patch_setter: ("layer", "head_index", "dest_pos"),
    layer_head_dest_src_pos_pattern_patch_setter: ("layer", "head_index", "dest_pos", "src_pos"),
}
"""Each setter, and the axes of the grid that its indices run over."""

# ---- common sweeps ---------------------------------------------------------------------------------------------------


@runtime_checkable
class Sweep(Protocol):
    """One of the sweeps below: a site and a grid, waiting for model, prompts, clean run and metric."""

    def __call__(
        self,
        model: HookedTransformer,
        corrupted_tokens: Tensor,
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric,
        index_axis_names: Sequence[str] | None = None,
        index_df: pd.DataFrame | None = None,
        return_index_df: bool = False,
    ) -> Any: ...


def _sweep(name: str, what: str, activation_name: str, patch_setter: PatchSetter) -> Sweep:
    axes = PATCH_SETTERS[patch_setter]

    def sweep(
        model: HookedTransformer,
        corrupted_tokens: Int[Tensor, "*batch pos"],
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric,
        index_axis_names: Sequence[str] | None = None,
        index_df: pd.DataFrame | None = None,
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
    "attn_out", "what attention adds to the stream, one position at a time", "attn_out", layer_pos_patch_setter
)
get_act_patch_mlp_out = _sweep(
    "mlp_out", "what the MLP adds to the stream, one position at a time", "mlp_out", layer_pos_patch_setter
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
    "attn_head_pattern_by_pos", "where a head looks from one position", "pattern", layer_head_pos_pattern_patch_setter
)
get_act_patch_attn_head_pattern_dest_src_pos = _sweep(
    "attn_head_pattern_dest_src_pos",
    "how much a head looks from one position at another",
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
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "*batch pos"],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "5 layer head"]:
    """Outputs, queries, keys, values and patterns of heads, at all positions together.

    In a model with fewer key/value heads than heads, the rows of keys and values end in NaN.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> every = patching.get_act_patch_attn_head_all_pos_every
    >>> len(every(model, corrupted, cache, lambda logits: logits[0, -1, 0]))
    5
    """
    given = (model, corrupted_tokens, clean_cache, metric)
    vectors = [get_act_patch_attn_head_out_all_pos(*given), get_act_patch_attn_head_q_all_pos(*given)]
    vectors += [get_act_patch_attn_head_k_all_pos(*given), get_act_patch_attn_head_v_all_pos(*given)]
    return _stacked([*vectors, get_act_patch_attn_head_pattern_all_pos(*given)])


def get_act_patch_attn_head_by_pos_every(
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "*batch pos"],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "5 layer pos head"]:
    """The same, position by position; the position of a pattern is that of the query.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"], prepend_bos=False)[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> every = patching.get_act_patch_attn_head_by_pos_every
    >>> len(every(model, corrupted, cache, lambda logits: logits[0, -1, 0]))
    5
    """
    given = (model, corrupted_tokens, clean_cache, metric)
    vectors = [get_act_patch_attn_head_out_by_pos(*given), get_act_patch_attn_head_q_by_pos(*given)]
    vectors += [get_act_patch_attn_head_k_by_pos(*given), get_act_patch_attn_head_v_by_pos(*given)]
    return _stacked([*vectors, get_act_patch_attn_head_pattern_by_pos(*given).transpose(1, 2)])


def get_act_patch_block_every(
    model: HookedTransformer,
    corrupted_tokens: Int[Tensor, "*batch pos"],
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
) -> Float[Tensor, "3 layer pos"]:
    """The stream before each block, what attention adds, what the MLP adds.

    >>> from hooked_lm import HookedTransformer, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = model.to_tokens(["Mary", "John"])[:, None]
    >>> _, cache = model.run_with_cache(clean)
    >>> len(patching.get_act_patch_block_every(model, corrupted, cache, lambda logits: logits[0, -1, 0]))
    3
    """
    sweeps = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return _stacked(sweep(model, corrupted_tokens, clean_cache, metric) for sweep in sweeps)


def _stacked(results: Iterable[Tensor]) -> Tensor:
    """Sweeps along a new first axis; NaN where one has fewer heads than another."""
    results = list(results)
    width = max(result.shape[-1] for result in results)
    pad = torch.nn.functional.pad
    return torch.stack([pad(r, (0, width - r.shape[-1]), value=float("nan")) for r in results])
