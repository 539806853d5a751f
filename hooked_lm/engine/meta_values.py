"""The shapes and dtypes of the values at sites, determined by a forward pass of one token."""

from collections.abc import Collection
from typing import TypeGuard

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.fallback_reason import fallback_reason
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.vision.inputs import Rows, ids_of


def meta_values(model: HookedRootModule, tokens: Rows, sites: Collection[str]) -> dict[str, Tensor]:
    """Tensors on the meta device, with the shapes and dtypes of the values at these sites in a forward pass of the tokens.

    Only sites with axes of batch and position and floating-point values are included. Empty if the engine needs whole forward
    passes for this model or these prompts.
    """
    if fallback_reason(model, tokens) is not None:
        return {}
    sizes = {"batch": tokens.shape[0]} | dict.fromkeys(("pos", "query_pos", "key_pos"), tokens.shape[1])
    found: dict[str, Tensor] = {}

    def record(value: object, hook: HookPoint) -> None:
        dims = hook.dims
        if is_positional(value, dims):
            shape = [sizes.get(dim, size) for dim, size in zip(dims, value.shape, strict=True)]
            found[hook.name or ""] = torch.empty(shape, dtype=value.dtype, device="meta")

    record.records = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model.run_with_hooks(one_token(model, tokens), return_type=None, fwd_hooks=[(site, record) for site in sites])
    return found


def one_token(model: HookedRootModule, rows: Rows) -> Int[Tensor, "1 1"]:
    """A prompt of one token, a word: the first of the prompts, unless they begin with an image."""
    ids = ids_of(rows)
    is_image = model.images_among(ids)
    words = ids[0] if is_image is None else ids[~is_image]
    return words[:1, None] if len(words) else ids.new_zeros(1, 1)


def is_positional(value: object, dims: tuple[str, ...]) -> TypeGuard[Tensor]:
    """Whether a value at a site with these axes has axes of batch and position, and is floating-point."""
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == len(dims)
    return fits and dims[:1] == ("batch",) and (dims[1:2] == ("pos",) or "query_pos" in dims)
