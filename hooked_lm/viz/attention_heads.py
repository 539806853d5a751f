"""Attention as it is given to a picture: the patterns of one layer or of several, the chosen heads, and the tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Layer: TypeAlias = Float[Tensor, "..."]  # [head, query_pos, key_pos], checked in words
Layers: TypeAlias = Layer | np.ndarray | Sequence[Layer | np.ndarray] | Mapping[int, Layer | np.ndarray]
Heads: TypeAlias = str | int | Sequence[str | int]
LONG = 64  # queries and keys from which on few weights are near 1, and colours end at the usual ones
Place: TypeAlias = tuple[int | None, int]  # a layer, if it has a number, and a head


def layers_of(pattern: Layers) -> dict[int | None, Layer]:
    """The layers by number, None for a single one without a number. Raises ValueError for other shapes."""
    if isinstance(pattern, Tensor | np.ndarray):
        given: dict[int | None, Any] = {None: pattern}
    else:
        given = dict(pattern.items() if isinstance(pattern, Mapping) else enumerate(pattern))
    layers = {layer: _alone(torch.as_tensor(weights)) for layer, weights in given.items()}
    if not layers:
        raise ValueError("there is no layer: give at least one")
    for layer, weights in layers.items():
        where = "the pattern" if layer is None else f"the pattern of layer {layer}"
        if weights.ndim == 4 and len(weights):
            raise ValueError(
                f"{where} is {list(weights.shape)}, a batch of {len(weights)} prompts, and a picture shows one: take the first "
                "with pattern[0]"
            )
        if weights.ndim != 3:
            raise ValueError(
                f"{where} is {list(weights.shape)}, not [head, query_pos, key_pos]: take one prompt of a batch, pattern[0]; "
                "several layers are a list or a dict by layer"
            )
        if not weights.numel():
            raise ValueError(f"{where} is empty: {list(weights.shape)}")
    shapes = {tuple(weights.shape[1:]) for weights in layers.values()}
    if len(shapes) > 1:
        raise ValueError(f"all layers must have the same queries and keys, these have {sorted(shapes)}")
    return layers


def _alone(weights: Layer) -> Layer:
    """The layer without the dimension of a batch of one prompt."""
    return weights[0] if weights.ndim == 4 and len(weights) == 1 else weights


def chosen_heads(layers: Mapping[int | None, Layer], heads: Heads | None) -> list[Place]:
    """The heads to show, in order. Raises ValueError for those that do not exist."""
    every = [(layer, head) for layer, weights in layers.items() for head in range(len(weights))]
    if heads is None:
        return every
    labels = {head_label(*place): place for place in every}
    if len(layers) == 1:
        labels |= {str(head): (layer, head) for layer, head in every}
        labels |= {f"H{head}": (layer, head) for layer, head in every}
    wanted = [str(head) for head in ([heads] if isinstance(heads, str | int) else heads)]
    if not wanted:
        raise ValueError("heads is empty: give some, or None for all")
    if unknown := [head for head in wanted if head not in labels]:
        found, number = f"{head_label(*every[0])} to {head_label(*every[-1])}", unknown[0][1 : unknown[0].find("H")]
        fix = f"; give the whole layer with its number, {{{number}: pattern}}" if None in layers and number else ""
        raise ValueError(f"there is no head {unknown[0]}: there are {found}{fix}")
    places = [labels[head] for head in wanted]
    if len(set(places)) < len(places):
        raise ValueError(f"a head is given twice in {wanted}")
    return places


def head_label(layer: int | None, head: int) -> str:
    """The label of a head, "L1H7"; "H7" where the layer has no number."""
    return f"H{head}" if layer is None else f"L{layer}H{head}"


def check_tokens(tokens: Sequence[str], key_tokens: Sequence[str] | None, n_queries: int, n_keys: int) -> None:
    """Raises ValueError for tokens that do not fit the queries, and the keys."""
    _check(tokens, n_queries, "tokens", "queries")
    if key_tokens is None and n_queries != n_keys:
        raise ValueError(f"there are {n_queries} queries and {n_keys} keys: give key_tokens, one for each key")
    if key_tokens is not None:
        _check(key_tokens, n_keys, "key_tokens", "keys")


def _check(tokens: Sequence[str], expected: int, name: str, what: str) -> None:
    if isinstance(tokens, str):
        raise ValueError(f"{name} is one text: give a list, a string for each of the {expected} {what}")
    if len(tokens) != expected:
        raise ValueError(f"{len(tokens)} {name} for {expected} {what}")
