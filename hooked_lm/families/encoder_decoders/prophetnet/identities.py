"""Identities of streams that predict several tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.blocks.cross import PostNormCrossBlock
from hooked_lm.components.context import Context
from hooked_lm.components.verification.attention import mixed, mixing_identities, result_identity
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import Identity, LazyTensor, Pair, Sites, add_bias, identities, within
from hooked_lm.families.encoder_decoders.prophetnet.attention import MainAttention, PredictingAttention, StreamAttention
from hooked_lm.families.encoder_decoders.prophetnet.block import NgramBlock


def projected_identities(attn: StreamAttention, at: Sites, get_input: LazyTensor) -> Iterator[Identity]:
    """The identities from the input to queries, keys, values and biases."""
    weights = {"q": (attn.W_Q, attn.b_Q), "k": (attn.W_K, attn.b_K), "v": (attn.W_V, attn.b_V)}
    for name, (W, b) in {**weights, "bucket_bias": (attn.W_rel, attn.b_rel)}.items():

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            return add_bias(torch.einsum("bpm,nmh->bpnh", get_input(), W), b), at(f"hook_{name}")

        yield f"input -> {name}", projected


def scores(attn: StreamAttention, at: Sites, keys: LazyTensor) -> Pair:
    """The scores of keys of the main stream, where a query may attend to them."""

    def pair() -> tuple[Tensor, Tensor]:
        q, k, shown = at("hook_q"), keys(), at("hook_attn_scores")
        bias = attn.bias(at("hook_bucket_bias"), Context(q.shape[1], q.device))
        made = torch.einsum("bqnh,bknh->bnqk", q, k) * attn.scale + bias
        seen = shown.isfinite()
        return made.masked_fill(~seen, 0.0), shown.masked_fill(~seen, 0.0)

    return pair


@identities.register
def _(
    attn: MainAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from projected_identities(attn, at, get_input)
    yield "q k^T * scale + bucket_bias[bucket] == attn_scores", scores(attn, at, lambda: at("hook_k"))
    yield from mixing_identities(attn, at)


@identities.register
def _(
    attn: PredictingAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`; those with the main stream are the block's."""

    def own_scores() -> tuple[Tensor, Tensor]:
        made = (at("hook_q") * at("hook_k")).sum(-1, keepdim=True) * attn.scale + at("hook_bucket_bias")[..., :1]
        return made.transpose(1, 2), at("hook_attn_scores_own")

    def patterns() -> tuple[Tensor, Tensor]:
        shown = torch.cat([at("hook_attn_scores"), at("hook_attn_scores_own")], -1)
        return softmax(shown, None), torch.cat([at("hook_pattern"), at("hook_pattern_own")], -1)

    yield from projected_identities(attn, at, get_input)
    yield "q k * scale + bucket_bias[0] == attn_scores_own", own_scores
    yield "softmax of scores and attn_scores_own == patterns", patterns
    yield result_identity(attn, at)


@identities.register
def _(block: NgramBlock, at: Sites, source: LazyTensor | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with encoder output `source()`."""
    main = within(at, "attn")
    yield from wired_identities(block, at, block.wiring(), source=source)
    yield "first of streams_pre == resid_pre", lambda: (at("hook_streams_pre")[:, :, 0], at("hook_resid_pre"))
    yield (
        "normalized_resid_post == first of streams_post",
        lambda: (at("hook_normalized_resid_post"), at("hook_streams_post")[:, :, 0]),
    )
    for n, stream in enumerate(block.predicting):
        assert isinstance(stream, PostNormCrossBlock), "the layer of a predicting stream"
        inside = within(at, f"predicting.{n}")
        own, attn = within(inside, "attn"), stream.attn
        assert isinstance(attn, PredictingAttention), "the attention of a predicting stream"
        for name, pair in identities(stream, inside, source):
            yield f"predicting.{n}: {name}", pair

        def ends(n: int = n, inside: Sites = inside) -> tuple[Tensor, Tensor]:
            both = [inside("hook_resid_pre"), inside("hook_normalized_resid_post")]
            streams = [at(f"hook_streams_{place}")[:, :, 1 + n] for place in ("pre", "post")]
            return torch.stack(both), torch.stack(streams)

        def values(own: Sites = own) -> tuple[Tensor, Tensor]:
            of_own = own("hook_pattern_own").transpose(1, 2) * own("hook_v")
            return mixed(own("hook_pattern"), main("hook_v")) + of_own, own("hook_z")

        yield f"predicting.{n}: its part of streams_pre and streams_post", ends
        yield f"predicting.{n}: q k^T * scale + bias == attn_scores", scores(attn, own, lambda: main("hook_k"))
        yield f"predicting.{n}: pattern @ v of main + pattern_own * v == z", values
