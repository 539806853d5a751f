"""The vectors that probes read: one for each prompt and layer, each at a token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.hooks.token_labels import Named
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat

Prompts = Sequence[str] | Tensor | Chat


def vectors_of(
    source: Decoder | ActivationCache | Mapping[int, Tensor],
    prompts: Prompts | None,
    site: str,
    layers: Sequence[int] | None,
    position: int | Named,
    batch_size: int,
) -> tuple[dict[int, Tensor], str, list[int] | None]:
    """The vectors [prompt, ...] by layer, the name of what they are, and the token of each if the model runs.

    Raises ValueError for arguments that do not go together.
    """
    if isinstance(source, Decoder):
        if prompts is None:
            raise ValueError(
                "a model needs prompts=...; give a cache, or vectors by layer, to probe values that are there"
            )
        found, tokens = _of_model(source, prompts, site, layers, position, batch_size)
        return found, site, tokens
    if prompts is not None:
        raise ValueError("prompts are for a model: a cache, or vectors by layer, have their values already")
    if not isinstance(position, int):
        raise ValueError(f"positions={position!r} need a model, and conversations as prompts")
    if isinstance(source, ActivationCache):
        chosen = range(source.model.cfg.n_layers) if layers is None else layers
        values = {layer: source[site, layer] for layer in chosen}
        n_pos = {layer: value.shape[1] for layer, value in values.items()}
        for layer, n in n_pos.items():
            if not -n <= position < n:
                raise ValueError(f"position {position} is out of range: the cache of layer {layer} has {n}")
        return {layer: value[:, position].detach().cpu() for layer, value in values.items()}, site, None
    chosen = list(source) if layers is None else list(layers)
    return {layer: source[layer].detach().cpu() for layer in chosen}, "vectors", None


def checked_vectors(vectors: Float[Tensor, "prompt *d"], n_labels: int, layer: int) -> Float[Tensor, "prompt *d"]:
    """The vectors, checked: as many as labels, and finite."""
    if vectors.ndim < 2 or len(vectors) != n_labels:
        raise ValueError(
            f"layer {layer} has vectors {list(vectors.shape)}, and there are {n_labels} labels, one for each prompt"
        )
    if not bool(vectors.isfinite().all()):
        rows = (~vectors.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
        raise ValueError(
            f"the vectors of layer {layer} are NaN or infinite for {len(rows)} prompts, the first is {rows[0]}"
        )
    return vectors


@torch.no_grad()
def _of_model(
    model: Decoder, prompts: Prompts, site: str, layers: Sequence[int] | None, position: int | Named, size: int
) -> tuple[dict[int, Tensor], list[int] | None]:
    chosen = list(range(model.cfg.n_layers) if layers is None else layers)
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    if not len(prompts) or not chosen:
        raise ValueError("there is nothing to probe: give at least one prompt and one layer")
    names = {layer: _site(model, site, layer) for layer in chosen}
    found: dict[int, list[Tensor]] = {layer: [] for layer in chosen}
    read: list[int] = []
    for start in range(0, len(prompts), size):
        some, tokens, mask = _batch(model, prompts[start : start + size])
        at = _chosen(some, mask, position)
        read += tokens[at].tolist() if bool((at.sum(1) == 1).all()) else []
        run: dict[str, Any] = {"return_type": None, "attention_mask": mask.to(model.device)}
        _, cache = model.run_with_cache(some, names_filter=list(names.values()), **run)
        for layer, name in names.items():
            value = cache[name].float().cpu()
            there = at.view(*at.shape, *[1] * (value.ndim - 2))
            found[layer].append(value.masked_fill(~there, 0).sum(1) / there.sum(1))
    return {layer: torch.cat(parts) for layer, parts in found.items()}, read if len(read) == len(prompts) else None


def _batch(model: Decoder, prompts: Prompts) -> tuple[Any, Tensor, Tensor]:
    """What the model reads of some prompts, and their ids and mask, on the CPU."""
    if isinstance(prompts, Chat):
        return prompts, prompts.tokens.cpu(), prompts.attention_mask.cpu()
    if isinstance(prompts, Tensor):
        tokens, mask = prompts, torch.ones_like(prompts)
    else:
        tokens, mask = model.tokens.encode(list(prompts), padding_side="right", truncate=True)
    return tokens.to(model.device), tokens.cpu(), mask.cpu()


def _chosen(prompts: object, mask: Int[Tensor, "batch pos"], position: int | Named) -> Bool[Tensor, "batch pos"]:
    """The tokens that are read of each prompt: one, or those that named positions select, of which the mean is read."""
    if not isinstance(position, int):
        if not isinstance(prompts, Chat):
            raise ValueError(f"positions={position!r} need prompts with roles: give model.chat([...])")
        return prompts.mask(position)
    lengths = mask.sum(1)
    if (short := int(lengths.min())) < (position + 1 if position >= 0 else -position):
        raise ValueError(f"position {position} is out of range: a prompt has {short} tokens, with its BOS")
    at = torch.full_like(lengths, position) if position >= 0 else lengths + position
    return (mask.cumsum(1) - 1 == at[:, None]) & mask.bool()


def _site(model: Decoder, site: str, layer: int) -> str:
    """The full name; raises ValueError for a site without a vector at each position, or of several names."""
    names = model.names((site, layer))
    if len(names) != 1:
        raise ValueError(f"{(site, layer)!r} means {len(names)} sites: give one, such as {names[0]!r}")
    dims = model.hook_dict[names[0]].dims
    if dims[:2] != ("batch", "pos") or "query_pos" in dims or "key_pos" in dims:
        raise ValueError(f"'{names[0]}' [{', '.join(dims)}] has no vector at each position")
    return names[0]
