"""Forward passes that end as soon as the values at some sites are known."""

from collections.abc import Iterable
from typing import Any

from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.decoder import Decoder

BEFORE_BLOCKS = ("hook_tokens", "hook_embed", "hook_pos_embed", "embed.", "pos_embed.", "vision.", "projector.")


def forward_to(model: HookedRootModule, sites: Iterable[str]) -> dict[str, Any]:
    """The arguments of a forward pass that reaches these sites and computes as little as possible beyond them.

    A decoder stops after the last block that holds a site. Other models, and decoders at a site after the blocks, run whole
    and return nothing, so that logits are computed only for a site that holds them.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> forward_to(model, ["hook_embed", "blocks.1.attn.hook_z"])
    {'stop_at_layer': 2}
    """
    if not isinstance(model, Decoder):
        return {"return_type": None} if hasattr(model, "cfg") else {}
    ends = [_blocks_needed(model, site) for site in sites]
    if not ends or None in ends:
        return {"return_type": None}
    return {"stop_at_layer": max(end for end in ends if end is not None)}


def _blocks_needed(model: Decoder, site: str) -> int | None:
    """The number of blocks to run for the value at a site; None for all, and what follows them."""
    if site.startswith("blocks."):
        return int(site.split(".")[1]) + 1
    return 0 if site.startswith(BEFORE_BLOCKS) else None
