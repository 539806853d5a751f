"""Self-attention and cross attention in one softmax (T5Gemma 2, Zhang et al. 2025, arXiv:2512.14856): a query attends to the keys
of its own stack and to those of the encoder's output together, with one set of weights."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hooked_lm.components.attention.cross import SOURCE_KEY
from hooked_lm.components.attention.multihead import QUERY, SCORES, Attention, Keys, Mixed, PerHead, Values, fused
from hooked_lm.components.attention.steps import mixed, products, softmax
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.context import Context, KeysValues
from hooked_lm.components.norms.norm import norm_of, norm_unhooked
from hooked_lm.components.stack_context import EncodedSource, StackContext
from hooked_lm.hooks import HookPoint


class SourceHalf(nn.Module):
    """The half of a `MergedAttention` that is about the encoder's output; its weights are those of the attention.

    `hook_k` (before the norm of keys; there is no rotary) and `hook_v` are [batch, key_pos, kv_head, d_head], over the positions
    of the source. `hook_attn_scores` and `hook_pattern` are the columns of the source in the one softmax, and `hook_z` is the
    part of the mixed values that they give.
    """

    _attn: tuple["MergedAttention"]

    def __init__(self, attn: "MergedAttention") -> None:
        super().__init__()
        object.__setattr__(self, "_attn", (attn,))  # a tuple, so that the attention is no submodule
        self.hook_k, self.hook_v = HookPoint(*SOURCE_KEY), HookPoint(*SOURCE_KEY)
        self.hook_attn_scores, self.hook_pattern = HookPoint(*SCORES), HookPoint(*SCORES)
        self.hook_z = HookPoint(*QUERY)

    @property
    def attn(self) -> "MergedAttention":
        """The attention."""
        return self._attn[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn, name) if name in ("W_Q", "W_K", "W_V", "W_O") else super().__getattr__(name)

    def per_query_head(self, weight: Tensor) -> Tensor:
        """The weight of each query head's key or value."""
        return self.attn.per_query_head(weight)

    def keys_values(self, source: EncodedSource) -> KeysValues:
        """The normalised keys, and the values, of the source."""
        attn = self.attn
        k = self.hook_k(attn.project_kv(source.resid, attn.W_K, attn.b_K))
        v = self.hook_v(attn.project_kv(source.resid, *attn.value_weights))
        return norm_unhooked(norm_of(attn, "k_norm"), k), v


class MergedAttention(Attention):
    """`z = softmax([q k^T, q k_source^T] * scale + mask) [v, v_source]`: one softmax over own keys and the encoder's.

    `hook_attn_scores` and `hook_pattern` are the columns of own keys, [batch, head, query_pos, key_pos], as in other decoders;
    those of the source are at the sites of `source_half`, as in cross attention. A row of both together sums to one. `hook_z` is
    the sum of both parts, which `W_O` reads.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        def build(self) -> "MergedAttention":
            return MergedAttention(self)

    mixes_rows_alone = False
    _source_half: tuple[SourceHalf]

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        object.__setattr__(self, "_source_half", (SourceHalf(self),))  # a module of the block

    @property
    def source_half(self) -> SourceHalf:
        """The sites of the source."""
        return self._source_half[0]

    project_kv = Attention._project_kv

    def more_sites(self) -> tuple[nn.Module, ...]:
        """The sites of the half of the source."""
        half = self.source_half
        return half.hook_attn_scores, half.hook_pattern, half.hook_z

    def source_kv(self, context: StackContext) -> KeysValues:
        """The keys and values of the source."""
        source = context.source
        assert source is not None, "merged attention without an encoder's output"
        return source.keys_values(self.layer_id or 0, lambda: self.source_half.keys_values(source))

    def mix_fused(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """The mixed values, by the fused kernel."""
        assert isinstance(context, StackContext), "merged attention needs the context of a stack"
        source_k, source_v = self.source_kv(context)
        mask = context.once(("merged mask", self.causal, self.window), lambda: self._mask(context))
        return fused(q, torch.cat([k, source_k], 1), torch.cat([v, source_v], 1), mask, self.scale)

    def _mask(self, context: StackContext) -> Bool[Tensor, "batch 1 query_pos all_key_pos"]:
        own, of_source = context.full_mask(self.causal, self.window), context.source_context.full_mask(False, None)
        batch = max(len(own), len(of_source))
        return torch.cat([own.expand(batch, -1, -1, -1), of_source.expand(batch, -1, own.shape[2], -1)], -1)

    def mix_in_steps(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """The same in steps, with scores and pattern of both halves at their hook points."""
        assert isinstance(context, StackContext), "merged attention needs the context of a stack"
        half, (source_k, source_v) = self.source_half, self.source_kv(context)
        mask_of_source = context.source_context.additive_mask(False, None, q.dtype)
        own = self.hook_attn_scores(products(q, k) * self.scale + self.additive_mask(context, q.dtype))
        of_source = half.hook_attn_scores(products(q, source_k) * self.scale + mask_of_source)
        pattern = softmax(torch.cat([own, of_source], -1), self.sinks).to(v.dtype)
        own, of_source = self.hook_pattern(pattern[..., : k.shape[1]]), half.hook_pattern(pattern[..., k.shape[1] :])
        return mixed(own, v) + half.hook_z(mixed(of_source, source_v))


class MergedBlock(PreNormBlock):
    """A `PreNormBlock` with a `MergedAttention`, whose sites of the encoder's output are those of `cross_attn`, as elsewhere."""

    @dataclass(frozen=True)
    class Config(PreNormBlock.Config):
        def build(self, layer: int) -> "MergedBlock":
            return MergedBlock(self, layer)

    def make_before_mlp(self) -> None:
        assert isinstance(self.attn, MergedAttention), "a MergedBlock is built from a MergedAttention.Config"
        self.cross_attn = self.attn.source_half
        self.move_to_end("hook_resid_mid")
