"""Checks of the arguments of a forward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.components.readable import check
from hooked_lm.components.streams import MergedRMSNorm
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.loss import from_the_end

RETURN_TYPES = ("logits", "loss", "both", None)


def one_input(input: object, input_ids: Tensor | None) -> Any:
    """The model's input, given by either name. Raises TypeError for none and for both."""
    if (input is None) == (input_ids is None):
        given = "neither" if input is None else "both"
        raise TypeError(f"give the model's input once, as `input` or as `input_ids`; there are {given}")
    return input_ids if input is None else input


def check_options(return_type: str | None, logits_to_keep: int | None) -> None:
    """Raises ValueError for invalid options."""
    if return_type not in RETURN_TYPES:
        raise ValueError(f"return_type must be 'logits', 'loss', 'both' or None, got {return_type!r}")
    if logits_to_keep is not None and logits_to_keep < 1:
        raise ValueError(f"logits_to_keep must be at least 1, got {logits_to_keep}")


def check_layers(start: int | None, stop: int | None, n_layers: int, cache: KeyValueCache | None) -> None:
    """Raises IndexError for layer bounds out of range, and ValueError for a cache that does not fit the layers."""
    for bound in (start, stop):
        if bound is not None and not -n_layers <= bound <= n_layers:
            raise IndexError(f"layer {bound} is out of range: a bound may be {-n_layers} to {n_layers}")
    if cache is None or range(n_layers)[start:stop] == range(len(cache)):  # a cache of the first layers
        return
    if len(cache) != n_layers:
        raise ValueError(f"the key/value cache is for {len(cache)} layers, but the model has {n_layers}")
    if not cache.frozen and len(range(n_layers)[start:stop]) < n_layers and (start is not None or stop != cache.until):
        raise ValueError("a run of some layers would leave the key/value cache half-filled; freeze() it first")


def real_of(attention_mask: Tensor) -> Tensor:
    """A mask of ones and zeros as booleans. Raises ValueError for other values, such as those of an additive mask."""
    if attention_mask.dtype != torch.bool:
        right = (attention_mask == 0) | (attention_mask == 1)
        known, fix = (
            "an attention mask is 1 for real tokens and 0 for padding",
            "convert an additive mask with `mask == 0`",
        )
        check(right.all(), f"{known}; {fix}", lambda: f"{known}, got {attention_mask[~right][0].item()}; {fix}")
    return attention_mask.bool()


def is_ids(input: Tensor) -> bool:
    """Whether a tensor is token ids, [batch, pos] or [pos]."""
    return input.ndim in (1, 2) and not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)


def first_bidirectional(blocks: Iterable[nn.Module]) -> int | None:
    """The first layer with bidirectional attention; None if there is none."""
    attentions = (getattr(block, "attn", None) for block in blocks)
    return next((layer for layer, attn in enumerate(attentions) if not getattr(attn, "causal", True)), None)


def check_cacheable(blocks: Iterable[nn.Module]) -> None:
    """Raises ValueError for bidirectional layers, whose keys and values change with every new token."""
    if (layer := first_bidirectional(blocks)) is not None:
        raise ValueError(
            f"a key/value cache needs causal attention, but that of layer {layer} is bidirectional, so keys and values of "
            "earlier tokens change with each new one. Run the whole text at once, without past_kv_cache, a prefix or chunks"
        )


def check_in_parts(model: HookedRootModule, n_first: int, n_pos: int) -> None:
    """Raises ValueError if the first tokens have other keys in a prompt of `n_pos` tokens than alone."""
    if n_first < n_pos and model.reads_both_ways:
        raise ValueError("this model reads a prompt in both directions: give all of it at once")
    for rotary in (getattr(getattr(module, "cfg", None), "rotary", None) for module in model.modules()):
        scaling = getattr(rotary, "scaling", None)
        if scaling is not None and scaling.length(n_first) != scaling.length(n_pos):
            raise ValueError(
                f"the rotary angles of this model depend on the length of the prompt ({type(scaling).__name__}): the first "
                f"{n_first} tokens have other keys alone than in a prompt of {n_pos}. Read it at once"
            )


def n_streams(model: nn.Module) -> int:
    """The number of a model's residual streams."""
    final = norm_of(model, "ln_final")
    return final.cfg.n_streams if isinstance(final, MergedRMSNorm) else 1


def check_one_stream(model: nn.Module, what: str) -> None:
    """Raises ValueError for a model with several residual streams, which have no such thing."""
    if (n := n_streams(model)) > 1:
        raise ValueError(
            f"{what}: this model has {n} residual streams, each of which a layer changes in part, and which are merged before "
            "the final norm, so no stream is the sum of what sublayers wrote; patch sites, read 'streams_post' with "
            "logit_lens, or use gradients instead"
        )


def check_equal_heads(model: nn.Module, what: str) -> None:
    """Raises ValueError if the layers have different numbers of heads; `what` needs one number."""
    configs = [getattr(getattr(block, "attn", None), "cfg", None) for block in getattr(model, "blocks", ())]
    counts = {n_heads for cfg in configs if (n_heads := getattr(cfg, "n_heads", None)) is not None}
    if len(counts) > 1:
        numbers = ", ".join(map(str, sorted(counts)))
        raise ValueError(
            f"{what} needs layers with equal numbers of heads, this model has layers with {numbers}; use patching.sweep, "
            "patching.ablate or analysis.attribute_edges, whose grids may have empty cells"
        )


def check_stream(input: object, d_model: int, *widths: int) -> None:
    """Raises ValueError unless this is a residual stream, of this or another of some widths."""
    if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] not in (d_model, *widths):
        got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise ValueError(f"expected a residual stream [batch, pos, {d_model}], got {got}")


def check_length(new: Tensor, n_past: int, n_ctx: int) -> None:
    """Raises ValueError for an input [batch, pos, ...] that is empty, or too long after `n_past` positions."""
    if new.numel() == 0:
        raise ValueError(f"the input is empty: its shape is {tuple(new.shape)}; give at least one token")
    if n_past + new.shape[1] > n_ctx:
        with_past = f" with the {n_past} in the cache" if n_past else ""
        raise ValueError(
            f"the prompt has {n_past + new.shape[1]} tokens{with_past}, more than the model's n_ctx of {n_ctx}"
        )


def check_loss(logits: Tensor, tokens: Tensor | None) -> Tensor:
    """The token ids for a loss. Raises ValueError unless logits and tokens have the same positions."""
    if tokens is None:
        raise ValueError("a loss needs the token ids: give tokens=... with the residual stream")
    if tokens.shape[1] != logits.shape[1]:
        raise ValueError(
            f"a loss needs the logits of all positions, got {logits.shape[1]} for {tokens.shape[1]} tokens; omit "
            "logits_to_keep"
        )
    return tokens


def checked_global_mask(model: HookedRootModule, mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The mask of global tokens [batch, pos]; ValueError for another shape, and for a model without global attention."""
    if mask is None:
        return None
    if model.global_tokens is None:
        raise ValueError("this model has no tokens of global attention: leave global_attention_mask out")
    mask = mask if mask.ndim == 2 else mask[None]
    if mask.shape != tokens.shape:
        raise ValueError(
            f"global_attention_mask is {tuple(mask.shape)}; expected {tuple(tokens.shape)}, the shape of the ids"
        )
    return real_of(mask).to(tokens.device)


def check_rows(real: Tensor | None) -> None:
    """Raises ValueError for a row without a real token; not inside `torch.compile`."""
    if real is not None:
        fix = "is all padding; give at least one real token"
        check(real.any(1).all(), f"a row {fix}", lambda: f"row {int(real.any(1).int().argmin())} {fix}")


def ids_on_device(tokens: Tensor, d_vocab: int) -> Tensor:
    """Token ids with negative ones replaced, checked where they are: the host does not wait for a GPU; see `check`."""
    if tokens.numel():
        known = f"d_vocab is {d_vocab}, so ids are 0 to {d_vocab - 1}, or {-d_vocab} to -1 from the end"
        right = ((tokens >= -d_vocab) & (tokens < d_vocab)).all()
        check(right, f"a token id is out of range: {known}", lambda: str(unknown_id(tokens, d_vocab)))
    return from_the_end(tokens, d_vocab)


def unknown_id(tokens: Tensor, d_vocab: int) -> ValueError:
    """The error for the first id outside -d_vocab .. d_vocab - 1."""
    place = ((tokens < -d_vocab) | (tokens >= d_vocab)).nonzero()[0].tolist()
    where = f" at {place} of the tokens {list(tokens.shape)}" if place else ""
    return ValueError(
        f"token id {tokens[tuple(place)].item()}{where} is out of range: d_vocab is {d_vocab}, so ids are 0 to "
        f"{d_vocab - 1}, or {-d_vocab} to -1 from the end"
    )


def check_mask(mask: Tensor, batch: int, n_pos: int, n_past: int) -> None:
    """Raises ValueError for a mask that covers neither the new tokens nor the cached and the new ones."""
    if mask.ndim == 2 and mask.shape[0] == batch and (mask.shape[1] == n_pos or mask.shape[1] == n_past + n_pos):
        return
    with_cached = f", or {(batch, n_past + n_pos)} with the cached ones" if n_past else ""
    raise ValueError(
        f"the attention mask is {tuple(mask.shape)}; expected {(batch, n_pos)}, for the new tokens{with_cached}"
    )
