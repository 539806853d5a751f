"""Do the sites of an encoder mean what they promise? Its embeddings, its blocks and its heads, on one run."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.embed import Unembed, soft_capped
from hooked_lm.components.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler, TokenClassifier
from hooked_lm.components.norm import norm_of
from hooked_lm.components.verification import identities as component_identities
from hooked_lm.components.verification import output_from_sites
from hooked_lm.components.verification.registry import Identity, Pair, Read, Sites, below, norm_identity, normed
from hooked_lm.models.verification.verify import Verification, checked, drawn_tokens, last_site


@torch.no_grad()
def verify(model: Any, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
    """Check the identities between the sites of an encoder on one run, over random tokens unless given.

    Errors and tolerances are those of `hooked_lm.models.verification.verify`. Heads run too, where there are any.
    """
    tokens = (drawn_tokens(model.cfg) if tokens is None else tokens).to(model.device)
    return checked(model, (tokens,), lambda at, output: _identities(model, at, output))


def _identities(model: Any, at: Sites, output: Tensor) -> Iterator[Identity]:
    if isinstance(model.embed, EncoderEmbed):
        yield from _embed_identities(model, at)
    yield "full_embed == resid_pre", lambda: (at("hook_full_embed"), at("blocks.0.hook_resid_pre"))
    for layer, block in enumerate(model.blocks):
        yield from component_identities(block, below(at, f"blocks.{layer}"))
    for layer, block in enumerate(model.blocks[:-1]):
        left, then = last_site(block, layer), f"blocks.{layer + 1}.hook_resid_pre"
        yield "resid_post == next resid_pre", _same(at, left, then)
    last = last_site(model.blocks[-1], len(model.blocks) - 1)
    yield from norm_identity("ln_final", norm_of(model, "ln_final"), below(at, "ln_final"), lambda: at(last))

    def stream() -> Tensor:
        return normed(norm_of(model, "ln_final"), below(at, "ln_final"), lambda: at(last))

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
        normalized = normed(norm_of(model.embed, "ln"), below(at, "embed.ln"), total)
        return model.embed.into_stream(normalized), at("hook_full_embed")

    yield from norm_identity("embed.ln", norm_of(model.embed, "ln"), below(at, "embed.ln"), total)
    yield "sum of embeddings, normed == full_embed", full


def _head_identities(model: Any, at: Sites, stream: Read, output: Tensor) -> Iterator[Identity]:
    """What the heads make of the stream; a head of somebody else's cannot be asked."""

    def pooled() -> Tensor:
        return at("pooler.hook_pooler_out")

    kinds: dict[str, Any] = {"mlm_head": MLMHead, "pooler": Pooler, "nsp_head": NSPHead}
    kinds |= {"classifier": Classifier, "token_classifier": TokenClassifier}
    for name, kind in kinds.items():
        head, read = getattr(model, name), pooled if name in ("nsp_head", "classifier") else stream
        if isinstance(head, kind):
            yield from (
                (f"{name}: {identity}", pair) for identity, pair in component_identities(head, below(at, name), read)
            )
    if isinstance(model.unembed, Unembed):

        def unembedded(x: Tensor) -> Tensor:
            return soft_capped(model.unembed.unhooked(x), model.tree.unembed.soft_cap)

        def logits() -> tuple[Tensor, Tensor]:
            if model.mlm_head is None:
                return unembedded(stream()), output
            if isinstance(model.mlm_head, MLMHead):
                return unembedded(output_from_sites(model.mlm_head, below(at, "mlm_head"))), output
            return unembedded(model.mlm_head(stream())), output

        yield "unembed(mlm_head) == logits", logits
    if model.main_head is None:
        yield "ln_final(resid_post) == embeddings", lambda: (stream(), output)
