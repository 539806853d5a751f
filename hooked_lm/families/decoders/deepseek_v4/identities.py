"""Identities of attention whose keys are its values, within a window and to pooled keys, and of experts chosen by token ids."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.attention.multihead import project
from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.blocks.hyper import HyperBlock
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.verification.attention import mixed, same_lengths
from hooked_lm.components.verification.moe import choice_identities
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Pair,
    Sites,
    identities,
    norm_identity,
    norm_output,
    output_from_sites,
    within,
)
from hooked_lm.families.decoders.deepseek_v4.compressed import CompressedAttention, PoolIndexer
from hooked_lm.families.decoders.deepseek_v4.hash_moe import HashHyperBlock, HashMoE, RepeatedIds
from hooked_lm.families.decoders.deepseek_v4.key_pool import KeyPool, PoolInputs
from hooked_lm.families.decoders.deepseek_v4.tied_kv import AbstractTiedKVAttention


@identities.register
def _(
    attn: AbstractTiedKVAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield "ln1.normalized * w + b -> q_latent", lambda: (get_input() @ attn.W_DQ, at("hook_q_latent"))
    yield "latent -> q", lambda: (project(_latent(attn, at), attn.W_UQ, None), at("hook_q"))
    yield "ln1.normalized * w + b -> k", lambda: (project(get_input(), attn.W_K, None), at("hook_k"))
    for name, site in (("q_norm", "hook_q_latent"), ("q_head_norm", "hook_q"), ("k_norm", "hook_k")):
        yield from norm_identity(attn, name, at, lambda site=site: at(site))  # type: ignore[misc]
    for name, norm in (("q", "q_head_norm"), ("k", "k_norm")):

        def normed(name: str = name, norm: str = norm) -> Tensor:
            return norm_output(attn, norm, at, lambda: at(f"hook_{name}"))

        yield from _turned(name, attn.cfg.rotary, normed, at, f"hook_rot_{name}")
    if value_input is None:
        yield "rot_k == v", lambda: (at("hook_rot_k"), at("hook_v"))
    yield "q k^T * scale == attn_scores", _scores(attn, at, "hook_attn_scores", lambda: at("hook_rot_k")[:, :, 0])
    yield from _mixing(attn, at)
    yield from _turned("rot_z", attn.cfg.rotary, lambda: at("hook_rot_z"), at, "hook_z")
    yield (
        "sum over the heads of a group of z @ W_DO == o_latent",
        lambda: (attn.o_latent(at("hook_z")), at("hook_o_latent")),
    )
    yield (
        "z @ W_O == result",
        lambda: (torch.einsum("bpnh,nhm->bpnm", at("hook_z"), attn.W_O), at("hook_result")),
    )


def _latent(attn: AbstractTiedKVAttention, at: Sites) -> Tensor:
    return norm_output(attn, "q_norm", at, lambda: at("hook_q_latent"))


def _turned(name: str, rotary: Rotary, before: LazyTensor, at: Sites, site: str) -> Iterator[Identity]:
    """Identities of a rotation of the last features, whose result is at a site."""
    last, others = slice(-rotary.dim, None), slice(-rotary.dim)
    yield (
        f"rotary({name}) keeps lengths",
        same_lengths(rotary, lambda: before()[..., last], lambda: at(site)[..., last]),
    )
    yield (
        f"features of {name} without rotary == those of {site.removeprefix('hook_')}",
        lambda: (before()[..., others], at(site)[..., others]),
    )


def _scores(attn: AbstractTiedKVAttention, at: Sites, site: str, keys: LazyTensor) -> Pair:
    """The products of queries and keys [batch, key, d_head], and the scores that are not masked."""

    def pair() -> tuple[Tensor, Tensor]:
        shown = at(site)
        made = torch.einsum("bqnh,bkh->bnqk", at("hook_rot_q"), keys()) * attn.scale
        return made[shown.isfinite()], shown[shown.isfinite()]

    return pair


def _mixing(attn: AbstractTiedKVAttention, at: Sites) -> Iterator[Identity]:
    """Identities from the scores to the mixed values: of tokens, or of tokens and blocks."""
    blocks = isinstance(attn, CompressedAttention)

    def both(of_tokens: str, of_blocks: str) -> Tensor:
        return torch.cat([at(of_tokens), at(of_blocks)], -1) if blocks else at(of_tokens)

    def values() -> Tensor:
        return torch.cat([at("hook_v"), at("hook_pooled_v")[:, :, None]], 1) if blocks else at("hook_v")

    def pattern() -> tuple[Tensor, Tensor]:
        found = both("hook_pattern", "hook_pooled_pattern")
        return softmax(both("hook_attn_scores", "hook_pooled_scores"), attn.sinks), found

    def rot_z() -> tuple[Tensor, Tensor]:
        return mixed(both("hook_pattern", "hook_pooled_pattern"), values()), at("hook_rot_z")

    more = ", pooled" if blocks else ""
    yield f"softmax(attn_scores{more}) == pattern{more}", pattern
    yield f"pattern @ v{more} == rot_z", rot_z


def _pool_identities(
    pool: KeyPool, inputs: PoolInputs, at: Sites, x: LazyTensor, index: str = ""
) -> Iterator[Identity]:
    """Identities of pooled keys; `x()` is the input of what tokens contribute."""
    of_pool, given = within(at, "pool"), within(at, "to_pool")

    def keys() -> Tensor:
        return norm_output(pool, "norm", of_pool, lambda: of_pool("hook_pooled_k"))

    def pooled() -> tuple[Tensor, Tensor]:
        k, gate = given("hook_pool_k"), given("hook_pool_gate")
        return pool.pooled(k, gate, Context(k.shape[1], k.device)), of_pool("hook_pooled_k")

    for name, weight in (("k", inputs.W_K), ("gate", inputs.W_gate)):
        yield (
            f"ln1.normalized * w + b -> {index}pool_{name}",
            lambda name=name, weight=weight: (project(x(), weight, None), given(f"hook_pool_{name}")),  # type: ignore[misc]
        )
    yield f"sum of softmax(gate) * k == {index}pooled_k", pooled
    yield from norm_identity(pool, "norm", of_pool, lambda: of_pool("hook_pooled_k"), label=f"{index}pool.norm")
    yield from _turned(f"{index}pooled_k", pool.cfg.rotary, keys, of_pool, "hook_rot_pooled_k")


@identities.register
def _(
    attn: CompressedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from identities.dispatch(AbstractTiedKVAttention)(attn, at, get_input, value_input)
    yield from _pool_identities(attn.pool, attn.to_pool, at, get_input)
    yield "rot_pooled_k == pooled_v", lambda: (at("pool.hook_rot_pooled_k"), at("hook_pooled_v"))
    yield (
        "q pooled_k^T * scale == pooled_scores",
        _scores(attn, at, "hook_pooled_scores", lambda: at("pool.hook_rot_pooled_k")),
    )
    if attn.cfg.indexer is not None:
        yield from _indexer_identities(attn, attn.indexer, at, get_input)


def _indexer_identities(
    attn: CompressedAttention, indexer: PoolIndexer, at: Sites, x: LazyTensor
) -> Iterator[Identity]:
    of_index = within(at, "indexer")

    def scores() -> tuple[Tensor, Tensor]:
        shown = of_index("hook_index_scores")
        q, weights = of_index("hook_index_rot_q"), of_index("hook_index_weights")
        made = indexer.scores(q, weights, of_index("pool.hook_rot_pooled_k"))
        return made[shown.isfinite()], shown[shown.isfinite()]

    def chosen() -> tuple[Tensor, Tensor]:
        shown = of_index("hook_index_scores")
        lowest = shown.topk(min(indexer.cfg.top_k, shown.shape[-1])).values[..., -1:]
        return (shown >= lowest) & shown.isfinite(), of_index("hook_index_mask")

    def seen() -> tuple[Tensor, Tensor]:
        return at("hook_pooled_scores").isfinite(), of_index("hook_index_mask")[:, None].expand(
            -1, attn.cfg.n_heads, -1, -1
        )

    yield "latent -> index_q", lambda: (project(_latent(attn, at), indexer.W_Q, None), of_index("hook_index_q"))
    yield "ln1.normalized * w + b -> index_weights", lambda: (x() @ indexer.W_weights, of_index("hook_index_weights"))
    yield from _pool_identities(indexer.pool, indexer.to_pool, of_index, x, "index_")
    yield from _turned("index_q", indexer.cfg.rotary, lambda: of_index("hook_index_q"), of_index, "hook_index_rot_q")
    yield "sum of weights * relu(q pooled_k^T) == index_scores", scores
    yield "the highest index_scores == index_mask", chosen
    yield "pooled_scores are finite where index_mask is", seen


@output_from_sites.register
def _(attn: AbstractTiedKVAttention, at: Sites) -> Tensor:
    """The output, from that of each head."""
    return at("hook_result").sum(2)


@identities.register
def _(module: RepeatedIds, at: Sites, embed: LazyTensor, tokens: Int[Tensor, "batch pos"]) -> Iterator[Identity]:
    """Identities between the sites of a run over these tokens."""
    yield "tokens == per_layer.out", lambda: (tokens[:, :, None, None].expand_as(at("hook_out")), at("hook_out"))


@choice_identities.register
def _(moe: HashMoE, at: Sites) -> Iterator[Identity]:
    """The identity of the weights: the experts are those of the token's id."""
    yield (
        "weights of expert_indices == expert_weights",
        lambda: (moe.weigh(at("hook_router_logits"), at("hook_expert_indices")), at("hook_expert_weights")),
    )


@identities.register
def _(block: HashHyperBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of a block with hyper-connections, and that of the choice of experts."""
    yield from identities.dispatch(HyperBlock)(block, at, shift)
    yield (
        "experts of per_layer_in == expert_indices",
        lambda: (block.mlp.experts_of_token[at("hook_per_layer_in")[..., 0]], at("mlp.hook_expert_indices")),
    )
