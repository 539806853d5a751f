"""What is written to the stream that attention reads, split into sources: sublayers, heads, features of transcoders."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.blocks.wiring import PRE
from hooked_lm.hooks import Slice
from hooked_lm.models.caches import decompose
from hooked_lm.models.caches.residual import embedding_sites, output_norm
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.terms import Term, Terms, terms_of

Vectors = Float[Tensor, "batch pos d_model"]
WHOLE, HEADS = "layer", "head"


def terms_read(model: Decoder, layer: int, reads: str) -> Terms:
    """The terms of the stream that a sublayer of a layer reads. Raises ValueError if it is no sum."""
    return terms_of(model, layer, None if reads == PRE else reads)


def sites_written(model: Decoder, of: Terms, by: str) -> list[str]:
    """The sites that `sources` reads."""
    sites = [*embedding_sites(model).values(), *(term.site for term in of.terms)]
    attention = [term for term in of.terms if term.part == "attn"] if by == HEADS else []
    sites += [f"blocks.{term.layer}.attn.hook_z" for term in attention]
    sites += [f"blocks.{term.layer}.{term.step.post}.hook_scale" for term in of.terms if term.step and term.step.post]
    known = set(model.all_points())
    return [site for site in sites if site in known]


def sources(
    model: Decoder,
    cache: Mapping[Any, Tensor],
    of: Terms,
    by: str,
    positions: Slice,
    without: Collection[str] = (),
) -> dict[str, Vectors]:
    """Label -> what a source adds to the stream at some positions, `without` the terms of some labels; they sum to the stream."""
    found = decompose.entering(model, cache, of, positions)
    for term in of.terms:
        if term.step is None or term.label in without:
            continue
        whole = decompose.written(cache, [term], positions)
        found |= dict(_heads(model, cache, term, positions)) if by == HEADS and term.part == "attn" else whole
    return found


def _heads(model: Decoder, cache: Mapping[Any, Tensor], term: Term, positions: Slice) -> Iterator[tuple[str, Vectors]]:
    """The heads of a layer, and the bias of their sum."""
    results = decompose.head_results(model, cache, term.layer, positions)
    added = output_norm(model, cache, term, positions)(results, extra_axes=1)
    for head, vectors in enumerate(added.unbind(-2)):
        yield f"L{term.layer}H{head}", vectors
    like = added[..., 0, :]
    bias = decompose.biases(model, cache, [term], positions, like)
    if bool(bias.any()):
        yield f"{term.layer}_attn_bias", bias
