"""Weights in terms of tokens: the tokens that a neuron or head responds to, and those whose logits it raises or lowers.

An output direction changes the logits through the final norm's weight and the unembedding. An input direction responds to
tokens by its dot product with their embeddings. The scales by which norms divide depend on the input and are left out, as are
constant factors of sublayer outputs: values are exact up to a positive factor that is the same for all tokens. Contributions
of positions and earlier layers are not included.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.analysis.reading.heads import check_model, head_counts
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of, norm_unhooked
from hooked_lm.extras import lazy_import
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks.head_labels import head_in_layer, head_label
from hooked_lm.models.caches.residual import input_norm_name
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.names import checked_index
from hooked_lm.results.scores import Scores, provenance

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

Directions = Float[Tensor, "*some d_model"]
Heads = int | str | Sequence[int | str]
NUMBERS = 1 << 24  # approximate limit of the numbers per chunk


# ---- neurons -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def neuron_top_tokens(model: Decoder, layer: int, neurons: int | Sequence[int], k: int = 10) -> "pd.DataFrame":
    """The tokens whose logits neurons raise and lower most, and those whose embeddings excite and inhibit them most.

    A row for each neuron, weight, sign and rank. `weight` is "W_out" for the tokens that the neuron's output raises ("+") or
    lowers ("-"), and "W_in" (and "W_gate" of a gated MLP) for those that excite ("+") or inhibit ("-") it. `value` is the dot
    product of the neuron's weights with the token's unembedding or embedding (Geva et al. 2021, arXiv:2012.14913; 2022,
    arXiv:2203.14680).

    Raises ValueError for a layer without an MLP, or with a mixture of experts; IndexError for a layer or neuron that does not
    exist.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> table = neuron_top_tokens(model, layer=3, neurons=[5, 7], k=2)
    >>> list(table.columns), len(table)
    (['layer', 'neuron', 'weight', 'sign', 'rank', 'token', 'value'], 16)
    """
    layer, mlp = mlp_of(model, layer)
    _check_k(k, model.cfg.d_vocab)
    chosen = [checked_index(i, mlp.W_out.shape[0], "neuron") for i in _listed(neurons)]
    read = [name for name in ("W_in", "W_gate") if hasattr(mlp, name)]
    rows = list[dict[str, Any]]()
    embedding, norm = embeddings(model), norm_before(model.blocks[layer], "mlp")
    for some in _chunks(chosen, NUMBERS // model.cfg.d_vocab):
        products = {"W_out": to_logits(model, written(norm_of(model.blocks[layer], "ln2_post"), mlp.W_out[some]))}
        products |= {name: seen_through(norm, getattr(mlp, name)[:, some].T) @ embedding.T for name in read}
        for row, neuron in enumerate(some):
            for weight, product in products.items():
                rows += _ends(model, product[row], k, layer=layer, neuron=neuron, weight=weight)
    return pd.DataFrame(rows)


def _ends(model: Decoder, values: Float[Tensor, " d_vocab"], k: int, **labels: Any) -> list[dict[str, Any]]:
    """A row for each of the `k` largest and `k` smallest values, with their tokens."""
    rows = []
    for sign, best in (("+", values.topk(k)), ("-", values.topk(k, largest=False))):
        numbers = zip(best.values.tolist(), token_strings(model, best.indices), strict=True)
        rows += [
            {**labels, "sign": sign, "rank": rank, "token": token, "value": value}
            for rank, (value, token) in enumerate(numbers)
        ]
    return rows


# ---- heads ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def head_top_tokens(
    model: Decoder,
    layer: int,
    heads: Heads,
    k: int = 10,
    sources: str | int | Sequence[str | int] | None = None,
) -> "pd.DataFrame":
    """The largest entries of a head's OV circuit: pairs of a source token and a token whose logit attention to it raises.

    The OV circuit is `embedding W_V W_O unembedding`, [d_vocab, d_vocab] (Elhage et al. 2021, "A Mathematical Framework for
    Transformer Circuits"), computed for a few source tokens at a time.

    Args:
        heads: one or more heads of the layer: indices, or labels such as "L3H4".
        k: the number of pairs per head, or per source token if `sources` is given.
        sources: source tokens, strings or ids; None: all.

    Columns: head, rank, source, token, value. Raises ValueError for a layer without attention, and IndexError for a layer or head
    that does not exist.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> head_top_tokens(model, layer=3, heads="L3H4", k=2, sources=[" Mary"])[
    ...     "source"
    ... ].tolist()
    [' Mary', ' Mary']
    """
    layer, attn = attention_of(model, layer)
    chosen = [checked_index(head_in_layer(head, layer), attn.cfg.n_heads, "head") for head in _listed(heads)]
    _check_k(k, model.cfg.d_vocab)
    some = None if sources is None else [_source_id(model, source) for source in _listed(sources)]
    return pd.concat([_top_pairs(model, layer, head, k, some) for head in chosen], ignore_index=True)


def _top_pairs(model: Decoder, layer: int, head: int, k: int, sources: list[int] | None) -> "pd.DataFrame":
    circuit = _circuit(model, layer, head)
    if sources is None:  # the k largest entries are in the rows with the k largest maxima
        chosen = torch.cat([part.amax(1) for part in circuit(range(model.cfg.d_vocab))]).topk(k).indices.tolist()
    else:
        chosen = sources
    best = [part.topk(k) for part in circuit(chosen)]
    source = torch.tensor(chosen).repeat_interleave(k)
    token, value = (
        torch.cat([b.indices for b in best]).flatten().cpu(),
        torch.cat([b.values for b in best]).flatten().cpu(),
    )
    if sources is None:
        first = value.argsort(descending=True, stable=True)[:k]
        source, token, value = source[first], token[first], value[first]
    return pd.DataFrame(
        {
            "head": head_label(layer, head),
            "rank": [i % k for i in range(len(value))],
            "source": token_strings(model, source),
            "token": token_strings(model, token),
            "value": value.tolist(),
        }
    )


def _circuit(
    model: Decoder, layer: int, head: int
) -> Callable[[Sequence[int]], Iterator[Float[Tensor, "source d_vocab"]]]:
    """A function that yields the OV circuit's rows for given source tokens, a few at a time."""
    reading, writing = head_weights(model.blocks[layer], head)
    source_side, token_side = embeddings(model) @ reading, to_logits(model, writing)
    size = NUMBERS // model.cfg.d_vocab
    return lambda sources: (source_side[some] @ token_side for some in _chunks(list(sources), size))


@torch.no_grad()
def copying_scores(model: Decoder) -> Scores:
    """The copying score of each head: 1 if all eigenvalues of its OV circuit are positive, -1 if all are negative.

    The sum of the eigenvalues of `embedding W_V W_O unembedding` divided by the sum of their absolute values (Elhage et al. 2021,
    "A Mathematical Framework for Transformer Circuits"), computed from a matrix [d_head, d_head] with the same non-zero
    eigenvalues.

    Returns Scores with the axes layer, head; NaN where a layer has no such weights. Raises ValueError for a model with different
    input and output vocabularies.

    >>> from hooked_lm import HookedTransformer
    >>> copying_scores(HookedTransformer.from_pretrained("demo"))
    Scores(layer 4 x head 8, 1 prompt; means ...)
    """
    check_model(model)
    check_linear(model.unembed)
    if model.cfg.d_vocab != model.unembed.W_U.shape[1]:
        raise ValueError(
            f"copying needs one vocabulary; this model reads {model.cfg.d_vocab} tokens and has logits of "
            f"{model.unembed.W_U.shape[1]}"
        )
    counts = head_counts(model)
    scores = torch.full((len(counts), max(counts), 1), torch.nan)
    embedding = embeddings(model)
    # unembedding times embedding, [d_model, d_model], is the same for all heads
    around = seen_through(norm_of(model, "ln_final"), (model.unembed.W_U.float() @ embedding).T).T
    for layer, block in enumerate(model.blocks):
        for head in range(counts[layer] if _reads_and_writes(block) else 0):
            reading, writing = head_weights(block, head)
            eigenvalues = FactoredMatrix(around @ reading, writing).eigenvalues
            scores[layer, head, 0] = (eigenvalues.sum().real / eigenvalues.abs().sum()).cpu()
    return Scores(
        scores, {"layer": range(len(counts)), "head": range(max(counts))}, about=provenance(model, of="copying score")
    )


def head_weights(block: Any, head: int) -> tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_head d_model"]]:
    """The value and output weights of a head, with the weights of the norms before and after attention folded in."""
    attn = block.attn
    W_V = attn.W_V[head * attn.W_V.shape[0] // attn.cfg.n_heads]
    reading = seen_through(norm_before(block, "attn"), W_V.T.float()).T
    return reading, written(norm_of(block, "ln1_post"), attn.W_O[head])


# ---- norms, embeddings, tokens -------------------------------------------------------------------------------------


def written(norm: nn.Module, directions: Directions) -> Directions:
    """Output directions after a norm, without the division by its scale."""
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return directions.float()
    directions = directions.float()
    centred = directions - directions.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else directions
    gain = norm.gain()
    return centred if gain is None else centred * gain.float()


def seen_through(norm: nn.Module, directions: Directions) -> Directions:
    """Input directions before a norm that correspond to `directions` after it, without the division by its scale."""
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return directions.float()
    gain = norm.gain()
    directions = directions.float() if gain is None else directions.float() * gain.float()
    return directions - directions.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else directions


def to_logits(model: Decoder, directions: Directions) -> Float[Tensor, "*some d_vocab"]:
    """The logits of residual stream directions, without the division by the final norm's scale."""
    check_one_stream(model, "weights have no logits")
    check_linear(model.unembed)
    return written(norm_of(model, "ln_final"), directions) @ model.unembed.W_U.float()


def embeddings(model: Decoder) -> Float[Tensor, "d_vocab d_model"]:
    """The embedding of each token in the residual stream."""
    check_one_stream(model, "weights do not read embeddings alone")
    embed = model.embed
    table = embed.table().float()
    table = table if embed.cfg.scale == 1.0 else table * embed.cfg.scale
    return norm_unhooked(norm_of(embed, "ln"), table)


def norm_before(block: Any, part: str) -> nn.Module:
    """The norm before a block's "attn" or "mlp"; the identity in post-norm blocks."""
    name = input_norm_name(block, part == "mlp")
    return getattr(block, name) if name else nn.Identity()


def attention_of(model: Decoder, layer: int) -> tuple[int, Any]:
    """The non-negative index of a layer and its attention; raises ValueError if it has no attention with `W_V` and `W_O`."""
    check_model(model)
    layer = checked_index(layer, len(model.blocks), "layer")
    if not _reads_and_writes(model.blocks[layer]):
        raise ValueError(f"layer {layer} has no attention with the weights W_V and W_O")
    return layer, model.blocks[layer].attn


def _reads_and_writes(block: Any) -> bool:
    return has_part(block, "attn") and {"W_V", "W_O"} <= {name for name, _ in block.attn.named_parameters()}


def mlp_of(model: Decoder, layer: int) -> tuple[int, Any]:
    """The non-negative index of a layer and its MLP; raises ValueError if it has none, or a mixture of experts."""
    layer = checked_index(layer, len(model.blocks), "layer")
    block = model.blocks[layer]
    if not has_part(block, "mlp"):
        raise ValueError(f"layer {layer} has no MLP, so it has no neurons")
    if isinstance(block.mlp, AbstractMoE):
        raise ValueError(f"the MLP of layer {layer} is a mixture of experts, which have neurons of their own each")
    return layer, block.mlp


def token_strings(model: Decoder, ids: Int[Tensor, " token"]) -> list[str] | list[int]:
    """Tokens as text; ids if the model has no tokenizer."""
    if model.tokenizer is None:
        return ids.tolist()
    return [model.to_single_str_token(token) for token in ids.tolist()]


def _source_id(model: Decoder, token: str | int) -> int:
    return model.to_single_token(token) if isinstance(token, str) else checked_index(token, model.cfg.d_vocab, "token")


def _listed(some: Any) -> list[Any]:
    found = [some] if isinstance(some, (int, str)) else list(some)
    if not found:
        raise ValueError("there is nothing to read: give at least one")
    return found


def _check_k(k: int, d_vocab: int) -> None:
    if not 1 <= k <= d_vocab:
        raise ValueError(f"k must be from 1 to {d_vocab}, the number of tokens, got {k}")


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    size = max(1, size)
    yield from (items[start : start + size] for start in range(0, len(items), size))
