"""The indexer of DeepSeek sparse attention (DeepSeek-AI 2025, arXiv:2512.02556): cheap scores choose the keys of each query."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import project
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint, is_listening

QUERY = ("batch", "pos", "index_head", "d_index")
KEY = ("batch", "pos", "d_index")
SCORES = ("batch", "query_pos", "key_pos")

Queries = Float[Tensor, "batch pos index_head d_index"]
Weights = Float[Tensor, "batch pos index_head"]
Keys = Float[Tensor, "batch key_pos d_index"]
Angles = tuple[Float[Tensor, "#batch pos 1 width"], Float[Tensor, "#batch pos 1 width"]]


class Indexer(nn.Module):
    """The `top_k` keys of each query with the highest `(n_heads * d_head) ** -0.5 * sum over h of w_h relu(q_h . k)`.

    The queries q are `l W_Q` for the input l of the attention's queries, the weights w `x W_weights`, and the key, common to
    all heads, `norm(x W_K)`; rotary applies to the first features of queries and keys, with `rotary_last` to the last. With one
    copy of x or l per head of the attention, the indexer gets their mean. No gradient passes through the choice.

    `hook_index_mask` has the keys that are chosen and that the query may attend to. An edit can choose others, but not later
    ones or padding.
    """

    axes = {
        "W_Q": "head [d_query] d_head",
        "W_K": "[d_model] d_head",
        "W_weights": "[d_model] head; it decides, as a router does",
    }

    @dataclass(frozen=True)
    class Config:
        """`d_query` is the width of the input of queries."""

        d_model: int
        d_query: int
        n_heads: int
        d_head: int
        top_k: int
        rotary: Rotary
        eps: float = 1e-6
        rotary_last: bool = False

        def build(self) -> "Indexer":
            return Indexer(self)

    key_parts: tuple[str, ...] = ("hook_index_k", "hook_index_rot_k", "k_norm", "W_K")

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_Q = projection(cfg.n_heads, cfg.d_query, cfg.d_head)
        self.W_K = nn.Parameter(torch.empty(cfg.d_model, cfg.d_head))
        self.W_weights = nn.Parameter(torch.empty(cfg.d_model, cfg.n_heads))
        self.hook_index_q, self.hook_index_rot_q = HookPoint(*QUERY), HookPoint(*QUERY)
        self.hook_index_weights = HookPoint(*QUERY[:-1])
        self.hook_index_k = HookPoint(*KEY)
        self.k_norm = LayerNorm.Config(cfg.d_head, cfg.eps).build(KEY)
        self.hook_index_rot_k = HookPoint(*KEY)
        self.hook_index_scores, self.hook_index_mask = HookPoint(*SCORES), HookPoint(*SCORES)

    def queries(
        self,
        x: Float[Tensor, "batch pos *head d_model"],
        latent: Float[Tensor, "batch pos *head d_query"],
        angles: Angles,
    ) -> tuple[Queries, Weights]:
        """Queries after rotary, and the weight of each head."""
        q = self.hook_index_q(project(mean_copy(latent), self.W_Q, None))
        q = self.hook_index_rot_q(self.rotated(q, angles))
        return q, self.hook_index_weights(F.linear(mean_copy(x), self.W_weights.T))

    def keys(self, x: Float[Tensor, "batch pos *head d_model"], angles: Angles) -> Float[Tensor, "batch pos d_index"]:
        """Keys of the new tokens, after their norm and rotary."""
        k = self.k_norm(self.hook_index_k(F.linear(mean_copy(x), self.W_K.T)))
        return self.hook_index_rot_k(self.rotated(k[:, :, None], angles)[:, :, 0])

    def rotated(self, x: Queries, angles: Angles) -> Queries:
        """The vectors with rotary applied to their first or last features."""
        rotary = self.cfg.rotary
        return rotate_last(rotary, x, angles) if self.cfg.rotary_last else rotary.rotate(x, angles)

    def mask(
        self, q: Queries, weights: Weights, k: Keys, context: Context, causal: bool, window: int | None
    ) -> Bool[Tensor, "batch query_pos key_pos"] | None:
        """The chosen keys of each query; None if all keys are chosen and nothing listens."""
        if k.shape[1] <= self.cfg.top_k and not is_listening(self.hook_index_scores, self.hook_index_mask):
            return None
        allowed = context.additive_mask(causal, window, torch.float32).amax(1)
        return self.choose(self.scores(q, weights, k) + allowed)

    def choose(self, scores: Float[Tensor, "batch query_pos key_pos"]) -> Bool[Tensor, "batch query_pos key_pos"]:
        """The keys with the highest scores, of those whose score is not minus infinity."""
        visible = scores > float("-inf")
        scores = self.hook_index_scores(scores)
        chosen = scores.topk(min(self.cfg.top_k, scores.shape[-1]), -1).indices
        return self.hook_index_mask(torch.zeros_like(visible).scatter(-1, chosen, True) & visible)

    def scores(self, q: Queries, weights: Weights, k: Keys) -> Float[Tensor, "batch query_pos key_pos"]:
        """The scores of all keys, without a mask, in at least fp32."""
        products = torch.einsum("bqhd,bkd->bqhk", upcast(q), upcast(k)).relu()
        scale = (self.cfg.n_heads * self.cfg.d_head) ** -0.5
        return torch.einsum("bqh,bqhk->bqk", upcast(weights) * scale, products)


def among(chosen: Bool[Tensor, "batch query_pos key_pos"] | None, context: Context, q: Tensor) -> Context:
    """The context of queries `q` that attend to these keys; None: to all."""
    if chosen is None:
        return context
    return context.adding(torch.zeros_like(chosen, dtype=q.dtype).masked_fill_(~chosen, float("-inf"))[:, None])


def rotate_last(
    rotary: Rotary, x: Float[Tensor, "batch pos head d_head"], angles: Angles
) -> Float[Tensor, "batch pos head d_head"]:
    """The vectors with rotary applied to their last features."""
    n_other = x.shape[-1] - rotary.dim
    return torch.cat([x[..., :n_other], rotary.rotate(x[..., n_other:], angles)], -1)


def mean_copy(x: Float[Tensor, "batch pos *head width"]) -> Float[Tensor, "batch pos width"]:
    return x if x.ndim == 3 else x.mean(2)
