"""Attention within blocks of tokens, with a second stream of global tokens (PEGASUS-X; Phang et al. 2022, arXiv:2208.04347)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.attention import steps
from hooked_lm.components.attention.global_tokens import check_only
from hooked_lm.components.attention.multihead import (
    Attention,
    Mixed,
    PerHead,
    ProjectedAttention,
    Stream,
    fused,
    project,
)
from hooked_lm.components.attention.position_bias import Chunks
from hooked_lm.components.context import Context
from hooked_lm.hooks import HookPoint

INPUT, OUTPUT = "input of global tokens", "output of global tokens"  # kept in the context of a run
GLOBAL = ("batch", "global_token", "head", "d_head")
KINDS = {  # of scores and patterns -> their axes of queries and keys
    "_to_global": ("query_pos", "global_key"),
    "": ("query_pos", "key_pos"),
    "_among_global": ("global_token", "global_key"),
    "_from_global": ("global_token", "key_pos"),
}
Pair = Sequence[Tensor]  # of global tokens, then of the tokens of the text


class BlockLocalAttention(ProjectedAttention):
    """Attention of each token to those of its block and to all global tokens, and of these to everything, with the same weights.

    `position_bias` has the size of the blocks. The input of the global tokens is in the context, where their output is put.
    A query has one softmax over two groups of keys, which have sites of their own: of a token's query, `hook_pattern_to_global`
    are the columns of global tokens and `hook_pattern` those of tokens; of a global token's, `hook_pattern_among_global` and
    `hook_pattern_from_global`. Scores have the same four.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        """Only `position_bias`, `scale` and biases may differ from the defaults, beside the sizes."""

        causal: bool = False

        def __post_init__(self) -> None:
            check_only(self, "position_bias", "scale", "qkv_bias", "out_bias")
            if not isinstance(self.position_bias, Chunks):
                raise ValueError(f"attention within blocks needs their size in position_bias, got {self.position_bias}")

        def build(self) -> "BlockLocalAttention":
            return BlockLocalAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for name in "qkv":
            setattr(self, f"hook_{name}_global", HookPoint(*GLOBAL))
        for kind, axes in KINDS.items():
            for name in ("attn_scores", "pattern"):
                setattr(self, f"hook_{name}{kind}", HookPoint("batch", "head", *axes))
        self.hook_z_global = HookPoint(*GLOBAL)
        of_text, of_global = self._points("_to_global", ""), self._points("_among_global", "_from_global")
        in_order = (*of_text, *of_global, self.hook_z_global, self.hook_z, self.hook_result)
        names = {id(point): name for name, point in self._modules.items()}
        for point in in_order:
            self._modules[names[id(point)]] = self._modules.pop(names[id(point)])

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch key_row *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        assert context is not None, "the context of a block with global tokens"
        global_input = context.rows_of(INPUT, layer)
        assert global_input is not None, "its block keeps it"
        inputs = [query_input if x is None else x for x in (query_input, key_input, value_input)]
        q, k, v = self._projected_by(inputs, "")
        q_global, k_global, v_global = self._projected_by([global_input] * 3, "_global")
        keys, values = (k_global, k), (v_global, v)
        if (
            self._is_explicit("_to_global", "")
            or context.real is not None
            or context.n_key <= self.cfg.position_bias.size
        ):
            z = self.mixed(q, keys, values, self.additive_mask(context, q.dtype), "_to_global", "")
        else:
            z = self.mixed_by_blocks(q, keys, values)
        hidden = None if context.real is None else ~context.real[:, None, None, :]
        z_global = self.mixed(q_global, keys, values, _additive(hidden, q.dtype), "_among_global", "_from_global")
        z_global = self.hook_z_global(z_global)
        context.keep_rows(OUTPUT, layer, F.linear(z_global.flatten(2), self.W_O.flatten(0, 1).T, self.b_O))
        return self.output(self.hook_z(z))

    def _projected_by(self, inputs: Sequence[Tensor], suffix: str) -> list[PerHead]:
        """Queries, keys and values at their sites."""
        weights = (self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V)
        made = [project(x, W, b) for x, (W, b) in zip(inputs, weights, strict=True)]
        return [getattr(self, f"hook_{name}{suffix}")(x) for name, x in zip("qkv", made, strict=True)]

    def _points(self, *kinds: str) -> list[HookPoint]:
        """The sites of the scores and patterns of some kinds."""
        return [getattr(self, f"hook_{name}{kind}") for name in ("attn_scores", "pattern") for kind in kinds]

    def _is_explicit(self, *kinds: str) -> bool:
        return not self.may_fuse(*self._points(*kinds))

    def mixed(self, q: Tensor, keys: Pair, values: Pair, mask: Tensor | None, *kinds: str) -> Mixed:
        """The mixed values of queries; `mask` is added to the scores of the text's tokens."""
        if not self._is_explicit(*kinds):
            mask = None if mask is None else F.pad(mask, (keys[0].shape[1], 0))
            return fused(q, torch.cat(tuple(keys), 1), torch.cat(tuple(values), 1), mask, self.scale)
        *score_points, to_global, to_text = self._points(*kinds)
        scores = [torch.einsum("bqnh,bknh->bnqk", q, k) * self.scale for k in keys]
        scores = [scores[0], scores[1] if mask is None else scores[1] + mask]
        scores = [point(x) for point, x in zip(score_points, scores, strict=True)]
        pattern = steps.softmax(torch.cat(scores, -1), None).to(q.dtype).split([x.shape[-1] for x in scores], -1)
        patterns = to_global(pattern[0].contiguous()), to_text(pattern[1].contiguous())
        parts = [torch.einsum("bnqk,bknh->bqnh", x, v) for x, v in zip(patterns, values, strict=True)]
        return parts[0] + parts[1]

    def mixed_by_blocks(self, q: PerHead, keys: Pair, values: Pair) -> Mixed:
        """The mixed values of the queries of a text without padding, each block with its own keys only."""
        bias, (batch, n_pos), n_global = self.cfg.position_bias, q.shape[:2], keys[0].shape[1]
        ends = bias.offset, -(n_pos + bias.offset) % bias.size

        def blocks(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, 0, *ends)).unflatten(1, (-1, bias.size)).flatten(0, 1)

        def with_global(pair: Pair) -> Tensor:
            own = blocks(pair[1])
            return torch.cat([pair[0].repeat_interleave(len(own) // batch, 0), own], 1)

        there = F.pad(torch.ones(n_pos, dtype=torch.bool, device=q.device), ends).view(-1, 1, 1, bias.size)
        mask = F.pad(there, (n_global, 0), value=True).repeat(batch, 1, 1, 1) if any(ends) else None
        z = fused(blocks(q), with_global(keys), with_global(values), mask, self.scale)
        return z.unflatten(0, (batch, -1)).flatten(1, 2)[:, ends[0] : ends[0] + n_pos]


def _additive(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
