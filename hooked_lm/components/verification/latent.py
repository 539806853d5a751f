"""Latent attention, with and without an indexer."""

from collections.abc import Iterator

from torch import Tensor

from hooked_lm.components.attention.gated import QueryGatedSparseLatentAttention
from hooked_lm.components.attention.indexer import Indexer
from hooked_lm.components.attention.latent import AbstractLatentAttention, times
from hooked_lm.components.attention.multihead import project
from hooked_lm.components.attention.sparse_latent import SharedIndexAttention, SparseLatentAttention
from hooked_lm.components.verification.attention import gate_identity, mixing_identities, same_lengths
from hooked_lm.components.verification.registry import (
    Identity,
    LazyTensor,
    Pair,
    Sites,
    add_bias,
    identities,
    norm_identity,
    norm_output,
    within,
)


@identities.register
def _(
    attn: AbstractLatentAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def latent() -> Tensor:
        return times(norm_output(attn, "kv_norm", at, lambda: at("hook_kv_latent")), attn.cfg.kv_factor)

    def keys() -> tuple[Tensor, Tensor]:
        return attn.keys(get_input(), latent()), at("hook_k")

    yield from norm_identity(attn, "kv_norm", at, lambda: at("hook_kv_latent"))
    yield (
        "ln1.normalized * w + b -> kv_latent",
        lambda: (
            add_bias(get_input() @ attn.W_DKV, attn.b_DKV),
            at("hook_kv_latent"),
        ),
    )
    if attn.cfg.kr_norm:
        yield from norm_identity(attn, "kr_norm", at, lambda: at("hook_kr"))
        yield "ln1.normalized * w + b -> kr", lambda: (add_bias(get_input() @ attn.W_KR, attn.b_KR), at("hook_kr"))
    yield "latent, x W_KR -> k", keys
    yield "latent -> v", lambda: (project(latent(), attn.W_UV, None), at("hook_v"))
    of_queries = "ln1.normalized * w + b" if attn.cfg.d_q_latent is None else "latent"
    yield f"{of_queries} -> q", lambda: (attn.queries(_q_latent(attn, at, get_input)), at("hook_q"))
    if attn.cfg.d_q_latent is not None:
        yield from norm_identity(attn, "q_norm", at, lambda: at("hook_q_latent"))
        yield (
            "ln1.normalized * w + b -> q_latent",
            lambda: (
                add_bias(get_input() @ attn.W_DQ, attn.b_DQ),
                at("hook_q_latent"),
            ),
        )
    if isinstance(attn, QueryGatedSparseLatentAttention):
        yield (
            "latent -> gate",
            lambda: (project(_q_latent(attn, at, get_input), attn.W_gate, attn.b_gate), at("hook_gate")),
        )
    else:
        yield from gate_identity(attn, at, get_input)
    scored = ("hook_q", "hook_k") if attn.cfg.rotary is None else ("hook_rot_q", "hook_rot_k")
    if attn.cfg.rotary is not None:
        for name in "qk":
            yield f"features of {name} without rotary == those of rot_{name}", _without_rotary(attn, name, at)
    yield from mixing_identities(attn, at, lambda: at(scored[0]), lambda: at(scored[1]))


def _q_latent(attn: AbstractLatentAttention, at: Sites, get_input: LazyTensor) -> Tensor:
    """What the queries are projections of."""
    if attn.cfg.d_q_latent is None:
        return get_input()
    normed = times(norm_output(attn, "q_norm", at, lambda: at("hook_q_latent")), attn.cfg.q_factor)
    return attn.read_by_queries(normed, at("hook_q_latent"))


def _without_rotary(attn: AbstractLatentAttention, name: str, at: Sites) -> Pair:
    d = attn.cfg.d_nope
    return lambda: (at(f"hook_{name}")[..., :d], at(f"hook_rot_{name}")[..., :d])


@identities.register
def _(
    attn: SparseLatentAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from identities.dispatch(AbstractLatentAttention)(attn, at, get_input, value_input)
    indexer, of_index = attn.indexer, within(at, "indexer")

    def keys() -> Tensor:
        return norm_output(indexer, "k_norm", of_index, lambda: of_index("hook_index_k"))

    def scores() -> tuple[Tensor, Tensor]:
        q, k, shown = (of_index(f"hook_index_{name}") for name in ("rot_q", "rot_k", "scores"))
        made = indexer.scores(q, of_index("hook_index_weights"), k)
        return made[shown.isfinite()], shown[shown.isfinite()]

    def chosen() -> tuple[Tensor, Tensor]:
        shown = of_index("hook_index_scores")
        lowest = shown.topk(min(attn.cfg.indexer.top_k, shown.shape[-1])).values[..., -1:]
        return (shown >= lowest) & shown.isfinite(), of_index("hook_index_mask")

    yield (
        "latent -> index_q",
        lambda: (
            project(_q_latent(attn, at, get_input)[..., : indexer.cfg.d_query], indexer.W_Q, None),
            of_index("hook_index_q"),
        ),
    )
    yield "ln1.normalized * w + b -> index_k", lambda: (get_input() @ indexer.W_K, of_index("hook_index_k"))
    yield (
        "ln1.normalized * w + b -> index_weights",
        lambda: (get_input() @ indexer.W_weights, of_index("hook_index_weights")),
    )
    yield from norm_identity(indexer, "k_norm", of_index, lambda: of_index("hook_index_k"))
    yield from index_rotary(indexer, "q", of_index, lambda: of_index("hook_index_q"))
    yield from index_rotary(indexer, "k", of_index, keys)
    yield "sum of weights * relu(q k^T) == index_scores", scores
    yield "the highest index_scores == index_mask", chosen
    yield _masked(attn, at, lambda: of_index("hook_index_mask"))


@identities.register
def _(
    attn: SharedIndexAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    yield from identities.dispatch(AbstractLatentAttention)(attn, at, get_input, value_input)
    yield _masked(attn, at, lambda: at("hook_index_mask"))


def _masked(attn: AbstractLatentAttention, at: Sites, mask: LazyTensor) -> Identity:
    def finite() -> tuple[Tensor, Tensor]:
        return at("hook_attn_scores").isfinite(), mask()[:, None].expand(-1, attn.cfg.n_heads, -1, -1)

    return "attn_scores are finite where index_mask is", finite


def index_rotary(indexer: Indexer, name: str, of_index: Sites, before: LazyTensor) -> Iterator[Identity]:
    rotary, after, n_other = indexer.cfg.rotary, f"hook_index_rot_{name}", indexer.cfg.d_head - indexer.cfg.rotary.dim
    is_last = indexer.cfg.rotary_last
    turned = slice(n_other, None) if is_last else slice(rotary.dim)
    yield (
        f"rotary(index_{name}) keeps lengths",
        same_lengths(rotary, lambda: before()[..., turned], lambda: of_index(after)[..., turned]),
    )
    if n_other:
        others = slice(n_other) if is_last else slice(rotary.dim, None)
        yield (
            f"features of index_{name} without rotary == those of index_rot_{name}",
            lambda: (before()[..., others], of_index(after)[..., others]),
        )
