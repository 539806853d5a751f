"""Compressed attention (DeepSeek-V4, DeepSeek-AI 2026): near tokens one by one, far ones through keys that pool several tokens.

In heavily compressed attention (HCA) queries see all pooled keys, in compressed sparse attention (CSA) those that an indexer
chooses.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.components.attention import steps
from hooked_lm.components.attention.indexer import Indexer, Queries, Weights, mean_copy
from hooked_lm.components.attention.latent import LatentInputs
from hooked_lm.components.attention.multihead import Keys, PerHead, Values
from hooked_lm.components.attention.sparse_latent import Packed, packed, unpacked
from hooked_lm.components.context import Context
from hooked_lm.families.decoders.deepseek_v4.key_pool import Blocks, KeyPool
from hooked_lm.families.decoders.deepseek_v4.tied_kv import AbstractTiedKVAttention, TiedKVAttention, Z
from hooked_lm.hooks import HookPoint, is_listening

BLOCK_SCORES = ("batch", "head", "query_pos", "block")

Both = Float[Tensor, "batch head query_pos key_and_block"]
PackedQueries = Float[Tensor, "batch pos head d_head_and_more"]


class PoolIndexer(Indexer):
    """An `Indexer` whose keys are pooled: it chooses among the blocks of a `KeyPool`."""

    @dataclass(frozen=True)
    class Config(Indexer.Config):
        rate: int = field(kw_only=True)
        rotary_last: bool = True

        @property
        def pool(self) -> KeyPool.Config:
            """The config of its pooled keys."""
            return KeyPool.Config(self.d_model, self.d_head, self.rate, self.rotary, True, self.eps)

        def build(self) -> "PoolIndexer":
            return PoolIndexer(self)

    cfg: Config
    key_parts = ("to_pool",)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for name in ("W_K", "hook_index_k", "k_norm", "hook_index_rot_k", "hook_index_scores", "hook_index_mask"):
            delattr(self, name)
        self.to_pool, self.pool = cfg.pool.build_inputs("d_index"), cfg.pool.build("d_index")
        dims = ("batch", "query_pos", "block")
        self.hook_index_scores, self.hook_index_mask = HookPoint(*dims), HookPoint(*dims)

    def among(
        self, q: Queries, weights: Weights, k: Blocks, visible: Bool[Tensor, "#batch query_pos block"]
    ) -> Bool[Tensor, "#batch query_pos block"]:
        """The chosen blocks of those that each query may attend to."""
        if k.shape[1] <= self.cfg.top_k and not is_listening(self.hook_index_scores, self.hook_index_mask):
            return visible
        return self.choose(self.scores(q, weights, k).masked_fill(~visible, float("-inf")))


class CompressedAttention(AbstractTiedKVAttention):
    """A `TiedKVAttention` within a window, and to pooled keys, which are also values (`pool`).

    Scores and patterns of tokens and of blocks are at separate sites, `hook_pattern` and `hook_pooled_pattern`; together with the
    sink of the head they sum to one. `hook_pooled_v` is `pool.hook_rot_pooled_k`, unless it is edited.

    The cached keys are [batch, pos, 1, width]: the key of a token, then what it adds to pooled keys and to those of the
    indexer. So blocks are pooled anew in every run.
    """

    mixes_heads = True

    key_value_parts = (*TiedKVAttention.key_value_parts, "to_pool", "indexer.to_pool")
    score_sites = (
        *("hook_attn_scores", "hook_pooled_scores", "hook_pattern", "hook_pooled_pattern"),
        *("indexer.hook_index_scores", "indexer.hook_index_mask"),
    )

    pools_keys = True  # some keys are of several tokens

    @dataclass(frozen=True)
    class Config(TiedKVAttention.Config):
        """With an `indexer` queries attend to the blocks that it chooses, else to all."""

        pool: KeyPool.Config = field(kw_only=True)
        indexer: PoolIndexer.Config | None = None

        def build(self) -> "CompressedAttention":
            return CompressedAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.hook_pooled_scores, self.hook_pooled_pattern = HookPoint(*BLOCK_SCORES), HookPoint(*BLOCK_SCORES)
        after = ("hook_pattern", "hook_pooled_pattern", "hook_rot_z", "hook_z", "hook_o_latent", "hook_result")
        for name in after:  # sites are listed in the order of computation
            self._modules[name] = self._modules.pop(name)

    def make_parts(self, d_value: int) -> None:
        self.to_pool = self.cfg.pool.build_inputs()
        if self.cfg.indexer is not None:
            self.indexer = self.cfg.indexer.build()
        self.pool, self.hook_pooled_v = self.cfg.pool.build(), HookPoint("batch", "block", "d_head")

    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Z:
        """The mixed values, for the queries, keys and values of the new tokens."""
        x, index = mean_copy(inputs.key_input), self.cfg.indexer
        parts = [k, *self.to_pool(x)]
        if index is not None:
            angles = context.query_angles(index.rotary)
            index_q, weights = self.indexer.queries(inputs.query_input, inputs.q_latent, angles)
            q = _with_more(q, torch.cat([index_q.flatten(2), weights], -1))
            parts += self.indexer.to_pool(x)
        keys, values = context.update_kv(layer, packed(*parts), v)
        return context.attend_rows(layer, self.mix_packed, q, keys, values)

    def mix_packed(self, queries: PackedQueries, keys: Packed, values: Values, context: Context) -> Z:
        """The mixed values of some rows, from what each query and each token contributes."""
        cfg, index, n_pos = self.cfg, self.cfg.indexer, keys.shape[1]
        series = (cfg.pool.n_series, cfg.d_head)
        of_index = [] if index is None else [(index.pool.n_series, index.d_head)] * 2
        k, *of_pool = unpacked(keys, (1, cfg.d_head), series, series, *of_index)
        visible = self.pool.visible(n_pos // cfg.pool.rate, context)
        if index is not None:
            more, width = queries[..., cfg.d_head :].flatten(2), index.n_heads * index.d_head
            index_q = more[..., :width].unflatten(-1, (index.n_heads, index.d_head))
            weights = more[..., width : width + index.n_heads]
            visible = self.indexer.among(index_q, weights, self.indexer.pool(*of_pool[2:], context), visible)
        pooled = self.pool(*of_pool[:2], context)
        pooled_v = self.hook_pooled_v(pooled)
        mask = self.additive_mask(context, k.dtype)
        hidden = torch.zeros(visible.shape, dtype=k.dtype, device=k.device).masked_fill_(~visible, float("-inf"))[
            :, None
        ]
        batch = max(len(mask), len(hidden))
        mask = torch.cat([mask.expand(batch, -1, -1, -1), hidden.expand(batch, -1, -1, -1)], -1)
        return steps.mix_masked(
            queries[..., : cfg.d_head],
            torch.cat([k, pooled[:, :, None]], 1),
            torch.cat([values, pooled_v[:, :, None]], 1),
            mask,
            self.scale,
            self.soft_cap,
            self.sinks,
            lambda scores: _at_sites(scores, n_pos, self.hook_attn_scores, self.hook_pooled_scores),
            lambda pattern: _at_sites(pattern, n_pos, self.hook_pattern, self.hook_pooled_pattern),
        )


def _at_sites(both: Both, n_pos: int, of_tokens: HookPoint, of_blocks: HookPoint) -> Both:
    """Scores or patterns of tokens and blocks, at their two sites if something listens."""
    if not is_listening(of_tokens, of_blocks):
        return both
    return torch.cat([of_tokens(both[..., :n_pos]), of_blocks(both[..., n_pos:])], -1)


def _with_more(q: PerHead, more: Float[Tensor, "batch pos width"]) -> PackedQueries:
    """Queries and what else a query token contributes, divided among the heads: the rows of a sweep then have both."""
    n_heads = q.shape[2]
    width = -(-more.shape[-1] // n_heads)
    filled = F.pad(more, (0, n_heads * width - more.shape[-1]))
    return torch.cat([q, filled.unflatten(-1, (n_heads, width))], -1)
