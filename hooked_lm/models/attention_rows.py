"""Rows of attention scores and patterns, read where they are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.hooks.head_labels import parse_head_label
from hooked_lm.hooks.indices import Indices, Plain, indices_in, plain_indices

SITES = {"pattern": "hook_pattern", "scores": "hook_attn_scores"}
Heads = Sequence[str] | str | Indices
Rows = dict[int, Float[Tensor, "batch head query key_pos"]]


def attention_rows(
    model: Any,
    inputs: Sequence[object],
    layers: Indices,
    heads: Heads,
    query_positions: Indices,
    what: str,
    options: Mapping[str, Any],
) -> Rows:
    """See `BaseModel.attention_rows`."""
    if what not in SITES:
        raise ArgumentError(f"what must be 'pattern' or 'scores', got {what!r}")
    if len(model.stacks) != 1:
        raise ArgumentError(
            f"attention_rows is of models with one stack of blocks, which {type(model).__name__} is not: run_with_cache(..., "
            f"names_filter='*.{SITES[what]}', pos_slice=[-1]) gives the same rows of all its attention, by site"
        )
    by_label = _heads_by_layer(heads)
    sites = _sites(model, SITES[what], sorted(by_label) if by_label and layers is None else layers)
    if outside := sorted(by_label.keys() - sites):
        raise ArgumentError(f"heads={heads!r} has a head of layer {outside[0]}, and the layers are {list(sites)}")
    sites = {layer: site for layer, site in sites.items() if layer in (by_label or sites)}
    positions = plain_indices("query_positions", query_positions)
    given = {"return_type": None, "pos_slice": positions, **options}
    _, cache = model.run_with_cache(*inputs, names_filter=list(sites.values()), **given)
    same: Plain = None if by_label else plain_indices("heads", heads)
    found = {
        layer: (cache[site], indices_in("heads", by_label.get(layer, same), cache[site].shape[1], site))
        for layer, site in sites.items()
    }
    return {layer: rows if heads is None else rows[:, some] for layer, (rows, some) in found.items()}


def _sites(model: Any, name: str, layers: Indices) -> dict[int, str]:
    """The site with this name of each of these layers; None: of all layers that have it."""
    [stack], points = model.stacks, model.all_points()
    blocks = stack.blocks_of(model)
    every = {layer: f"{stack.blocks}.{layer}.attn.{name}" for layer in range(len(blocks))}
    there = {layer: site for layer, site in every.items() if site in points}
    wanted = list(there) if layers is None else indices_in("layers", plain_indices("layers", layers), len(blocks))
    if wrong := [layer for layer in wanted if layer not in there] or ([] if there else [0]):
        mixer = type(getattr(blocks[wrong[0]], "mixer", blocks[wrong[0]])).__name__
        raise ArgumentError(f"layer {wrong[0]}, {mixer}, has no softmax attention; those that have are {list(there)}")
    return {layer: there[layer] for layer in wanted}


def _heads_by_layer(heads: Heads) -> dict[int, list[int]]:
    """The heads of each layer, of labels such as "L1H7"; empty if heads are given as indices."""
    labels = [heads] if isinstance(heads, str) else heads if isinstance(heads, (list, tuple)) else ()
    found: dict[int, list[int]] = {}
    for label in labels if any(isinstance(one, str) for one in labels) else ():
        layer, head = parse_head_label(str(label))
        found.setdefault(layer, []).append(head)
    return found
