"""Transient-global attention (Guo et al. 2021, arXiv:2112.07916): to nearby tokens, and to the sums of blocks of tokens."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import Attention, Keys, Mixed, PerHead, ProjectedAttention, Stream, Values
from hooked_lm.components.attention.relative_bias import Bias, RelativeBias
from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of, norm_unhooked
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint

BLOCKS = ("batch", "block", "kv_head", "d_head")
OF_BLOCKS = ("batch", "head", "query_pos", "block")
Ids = Int[Tensor, "#batch pos"]


def blocks_of(context: Context, size: int) -> tuple[Ids, Int[Tensor, "#batch 1"]]:
    """The block of each token, and the number of blocks of each row; without padding, as rows alone.

    A row has as many blocks as whole ones fit. The tokens after them belong to the last; in a text without any to block -1.
    """

    def make() -> tuple[Tensor, Tensor]:
        n_blocks = (context.key_positions[:, -1:] + 1) // size
        return torch.minimum(context.key_positions // size, n_blocks - 1), n_blocks

    return context.once(("blocks", size), make)


class TransientGlobalBias(RelativeBias):
    """The bias of tokens, followed by that of blocks, `W_rel_global[bucket of (block - block of the query)]`.

    `hook_bias` is the one, `hook_bias_global` the other.
    """

    axes = {"W_rel_global": "[bucket] head; its rows are looked up"}

    @dataclass(frozen=True)
    class Config(RelativeBias.Config):
        block_size: int = 16

        def build(self) -> "TransientGlobalBias":
            return TransientGlobalBias(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_rel_global = nn.Parameter(torch.empty(cfg.n_buckets, cfg.n_heads))
        self.hook_bias_global = HookPoint(*OF_BLOCKS)

    def of_all_keys(self, bias: Bias, context: Context) -> Float[Tensor, "batch head query_pos key_pos_and_block"]:
        """The bias of tokens, with that of blocks."""
        assert isinstance(context, StackContext), "blocks need the context of a stack, which has the batch size"
        ids, _ = blocks_of(context, self.cfg.block_size)
        distance = torch.arange(context.n_key // self.cfg.block_size, device=context.device) - ids[..., None]
        blocks = F.embedding(self.buckets(distance), self.W_rel_global)
        blocks = self.hook_bias_global(blocks.permute(0, 3, 1, 2).expand(context.batch, -1, -1, -1).contiguous())
        return torch.cat([bias.expand(context.batch, -1, -1, -1), blocks.to(bias.dtype)], -1)


class TransientGlobalAttention(ProjectedAttention):
    """Attention with further keys and values: those of the sum of each block of `block_size` inputs, after `global_norm`.

    One softmax is over tokens and blocks, so the rows of `hook_pattern` and `hook_pattern_global` together sum to one.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        global_norm: NormConfig = field(kw_only=True)
        block_size: int = 16

        def build(self) -> "TransientGlobalAttention":
            return TransientGlobalAttention(self)

    mixes_rows_alone = False

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.hook_attn_scores_global, self.hook_pattern_global = HookPoint(*OF_BLOCKS), HookPoint(*OF_BLOCKS)
        for name in ("hook_pattern", "hook_pattern_global", "hook_z", "hook_result"):  # in the order of computation
            self._modules[name] = self._modules.pop(name)

    def make_parts(self, d_value: int) -> None:
        self.hook_block_sum = HookPoint("batch", "block", "d_model")
        add_norm(self, "global_norm", self.cfg.global_norm, ("batch", "block", "d_model"))
        self.hook_k_global, self.hook_v_global = HookPoint(*BLOCKS), HookPoint(*BLOCKS)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch key_row *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the normalised stream, or one copy of it per head; by default all are the first."""
        assert context is not None, "the bias of blocks is that of a stack"
        key_input = query_input if key_input is None else key_input
        value_input = key_input if value_input is None else value_input
        q = self.hook_q(self._projected(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(self._project_kv(key_input, self.W_K, self.b_K))
        v = self.hook_v(self._project_kv(value_input, self.W_V, self.b_V))
        key_sums = value_sums = self.block_sums(key_input, context)
        if value_input is not key_input:
            value_sums = self.block_sums(value_input, context)
        k_global = self.hook_k_global(self._project_kv(key_sums, self.W_K, self.b_K))
        v_global = self.hook_v_global(self._project_kv(value_sums, self.W_V, self.b_V))
        k, v = torch.cat([k, k_global], 1), torch.cat([v, v_global], 1)
        return self.output(self.mix(q, k, v, context, layer))

    def block_sums(
        self, x: Float[Tensor, "batch pos *head d_model"], context: Context
    ) -> Float[Tensor, "batch block *head d_model"]:
        """The normalised sum of the inputs in each block. Hooks that only read see one stream, also of copies per head."""
        sums, norm = self.summed(x, context), norm_of(self, "global_norm")
        points = [self.hook_block_sum, *(part for part in norm.modules() if isinstance(part, HookPoint))]
        if x.ndim == 3 or any(not isinstance(point, HookPoint) or point.is_edited for point in points):
            return norm(self.hook_block_sum(sums))
        norm(self.hook_block_sum(sums.mean(2)))
        return norm_unhooked(norm, sums)

    def summed(
        self, x: Float[Tensor, "batch pos *head d_model"], context: Context
    ) -> Float[Tensor, "batch block *head d_model"]:
        """The sum of the inputs in each block, without padding."""
        ids, _ = blocks_of(context, self.cfg.block_size)
        is_in = ids[..., None] == torch.arange(context.n_key // self.cfg.block_size, device=x.device)
        is_in = is_in if context.real is None else is_in & context.real[..., None]
        return torch.einsum("bp...,bpg->bg...", x, is_in.to(x.dtype).expand(x.shape[0], -1, -1))

    def mask_of_all(self, mask: Tensor, context: Context) -> Float[Tensor, "#batch 1 query_pos key_pos_and_block"]:
        """The mask of tokens and blocks. A shorter row has fewer blocks."""

        def make() -> Tensor:
            block = torch.arange(context.n_key // self.cfg.block_size, device=context.device)
            is_absent = (block >= blocks_of(context, self.cfg.block_size)[1])[:, None, None]
            blocks = torch.zeros(is_absent.shape, dtype=mask.dtype, device=mask.device)
            blocks = blocks.masked_fill_(is_absent, -torch.inf)
            return torch.cat([mask, blocks.expand(*mask.shape[:3], -1)], -1)

        return context.once(("blocks", self.causal, self.window, self.cfg.block_size, mask.dtype), make)

    def more_sites(self) -> tuple[nn.Module, ...]:
        """The sites of scores and pattern of blocks."""
        return self.hook_attn_scores_global, self.hook_pattern_global

    def mix_in_steps(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """The mixed values, with scores and pattern at their sites."""
        k, v = (self.per_query_head(x.transpose(0, 2)) for x in (k, v))  # [head, key_pos, batch, ...]
        scores = torch.einsum("bqnh,nkbh->bnqk", q, k) * self.scale + self.additive_mask(context, q.dtype)
        tokens, blocks = scores.split([context.n_key, k.shape[1] - context.n_key], -1)
        scores = torch.cat([self.hook_attn_scores(tokens), self.hook_attn_scores_global(blocks)], -1)
        pattern = softmax(scores, None).to(v.dtype)
        tokens, blocks = pattern.split([context.n_key, k.shape[1] - context.n_key], -1)
        pattern = torch.cat([self.hook_pattern(tokens), self.hook_pattern_global(blocks)], -1)
        return torch.einsum("bnqk,nkbh->bqnh", pattern, v)
