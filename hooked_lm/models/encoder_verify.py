"""Do the sites of an encoder mean what they promise? Its embeddings, its blocks and its heads, on one run."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.encoder_embed import EncoderEmbed
from hooked_lm.components.identities import Identity, Pair, Sites, below, norm_identity, normed
from hooked_lm.models.verify import Verification, checked, drawn_tokens, last_site


@torch.no_grad()
def verify(model: Any, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
    """Check the identities between the sites of an encoder on one run, over random tokens unless given.

    Errors and tolerances are those of `hooked_lm.models.verify`. Heads run too, where there are any.
    """
    tokens = (drawn_tokens(model.cfg) if tokens is None else tokens).to(model.device)
    return checked(model, (tokens,), lambda at, output: _identities(model, at, output))


def _identities(model: Any, at: Sites, output: Tensor) -> Iterator[Identity]:
    if isinstance(model.embed, EncoderEmbed):
        yield from _embed_identities(model, at)
    yield "full_embed == resid_pre", lambda: (at("hook_full_embed"), at("blocks.0.hook_resid_pre"))
    for layer, block in enumerate(model.blocks):
        yield from block.identities(below(at, f"blocks.{layer}"))
    for layer, block in enumerate(model.blocks[:-1]):
        left, then = last_site(block, layer), f"blocks.{layer + 1}.hook_resid_pre"
        yield "resid_post == next resid_pre", _same(at, left, then)
    last = last_site(model.blocks[-1], len(model.blocks) - 1)
    yield from norm_identity("ln_final", model.ln_final, below(at, "ln_final"), lambda: at(last))

    def stream() -> Tensor:
        return normed(model.ln_final, below(at, "ln_final"), lambda: at(last))

    yield from _head_identities(model, at, stream, output)


def _same(at: Sites, left: str, right: str) -> Pair:
    return lambda: (at(left), at(right))


def _embed_identities(model: Any, at: Sites) -> Iterator[Identity]:
    parts = [
        name for name in ("hook_embed", "hook_token_type_embed", "hook_pos_embed") if f"embed.{name}" in model.hook_dict
    ]

    def total() -> Tensor:
        return sum((at(f"embed.{name}") for name in parts[1:]), at(f"embed.{parts[0]}"))

    def full() -> tuple[Tensor, Tensor]:
        normalized = normed(model.embed.ln, below(at, "embed.ln"), total)
        return model.embed.into_stream(normalized), at("hook_full_embed")

    yield from norm_identity("embed.ln", model.embed.ln, below(at, "embed.ln"), total)
    yield "sum of embeddings, normed == full_embed", full


def _head_identities(model: Any, at: Sites, stream: Any, output: Tensor) -> Iterator[Identity]:
    """What the heads make of the stream."""
    if model.unembed is not None:
        read = stream
        if model.mlm_head is not None:
            sites = below(at, "mlm_head")
            yield from ((f"mlm_head: {name}", pair) for name, pair in model.mlm_head.identities(sites, stream))

            def read() -> Tensor:
                return model.mlm_head.rebuilt(sites)

        yield "unembed(mlm_head) == logits", lambda: (model.unembed.plain(read()), output)
    if model.pooler is not None:
        yield from ((f"pooler: {n}", pair) for n, pair in model.pooler.identities(below(at, "pooler"), stream))
    for head in ("nsp_head", "classifier"):
        if (module := getattr(model, head)) is not None:
            found = module.identities(below(at, head), lambda: at("pooler.hook_pooler_out"))
            yield from ((f"{head}: {name}", pair) for name, pair in found)
    if model.token_classifier is not None:
        found = model.token_classifier.identities(below(at, "token_classifier"), stream)
        yield from ((f"token_classifier: {name}", pair) for name, pair in found)
    if model.main_head is None:
        yield "ln_final(resid_post) == embeddings", lambda: (stream(), output)
