"""Rows of attention scores and patterns, read where they are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.hooks.head_labels import parse_head_label
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices

SITES = {"pattern": "hook_pattern", "scores": "hook_attn_scores"}
Rows = dict[int, Float[Tensor, "batch head query key_pos"]]


def attention_rows(
    model: Any,
    inputs: Sequence[object],
    layers: Indices,
    heads: Sequence[str] | str | Indices,
    query_positions: Indices,
    what: str,
    options: Mapping[str, Any],
) -> Rows:
    """See `BaseModel.attention_rows`."""
    if what not in SITES:
        raise ArgumentError(f"what must be 'pattern' or 'scores', got {what!r}")
    if len(model.stacks) > 1:
        raise ArgumentError(
            f"attention_rows reads the one stack of a model, and {type(model).__name__} has {len(model.stacks)}: "
            f"model.run_with_cache(..., names_filter='decoder.*.cross_attn.{SITES[what]}', pos_slice=[-1]) gives the same rows"
        )
    of_layers = _heads_of_layers(heads)
    if of_layers and layers is None:
        layers = sorted(of_layers)
    [stack], points = model.stacks, model.all_points()
    blocks = stack.blocks_of(model)
    sites = {layer: f"{stack.blocks}.{layer}.attn.{SITES[what]}" for layer in range(len(blocks))}
    wanted = indices_in("layers", plain_indices("layers", layers), len(blocks))
    there = [layer for layer, site in sites.items() if site in points]
    if wrong := [layer for layer in wanted if layer not in there and (layers is not None or not there)]:
        mixer = next(
            (type(part).__name__ for name, part in blocks[wrong[0]].named_children() if name == "mixer"), "none"
        )
        raise ArgumentError(
            f"layer {wrong[0]} has no softmax attention (its mixer: {mixer}); the layers that have it are {there}"
        )
    if outside := sorted(of_layers.keys() - {*wanted}):
        raise ArgumentError(f"heads={heads!r} has a head of layer {outside[0]}, and the layers are {wanted}")
    chosen = [layer for layer in wanted if layer in there and layer in (of_layers or there)]
    positions = plain_indices("query_positions", query_positions)
    names = [sites[layer] for layer in chosen]
    run = {"return_type": None} if "return_type" in model.run_with_cache.__annotations__ else {}
    _, cache = model.run_with_cache(*inputs, names_filter=names, pos_slice=positions, **run, **options)
    if heads is None:
        return {layer: cache[sites[layer]] for layer in chosen}
    found = {layer: of_layers.get(layer, plain_indices("heads", heads) if not of_layers else None) for layer in chosen}
    return {
        layer: (rows := cache[sites[layer]])[:, indices_in("heads", found[layer], rows.shape[1], sites[layer])]
        for layer in chosen
    }


def _heads_of_layers(heads: Sequence[str] | str | Indices) -> dict[int, list[int]]:
    """The heads of each layer, of labels such as "L1H7"; empty if heads are given as indices."""
    labels = [heads] if isinstance(heads, str) else list(heads) if isinstance(heads, (list, tuple)) else []
    found: dict[int, list[int]] = {}
    for layer, head in map(parse_head_label, labels) if any(isinstance(one, str) for one in labels) else ():
        found.setdefault(layer, []).append(head)
    return found
