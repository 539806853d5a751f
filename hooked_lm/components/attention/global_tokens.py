"""Attention within a window, apart from some tokens of global attention (Longformer; Beltagy et al. 2020, arXiv:2004.05150)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention import steps
from hooked_lm.components.attention.multihead import (
    KEY,
    QUERY,
    Attention,
    Keys,
    Mixed,
    PerHead,
    Stream,
    Values,
    fused,
    project,
)
from hooked_lm.components.attention.projection import add_projections
from hooked_lm.components.context import Context
from hooked_lm.components.readable import check, is_on_host
from hooked_lm.components.stack_context import StackContext
from hooked_lm.components.tl_call import CallContext
from hooked_lm.hooks import HookPoint, is_listening

LONG = 4  # windows, from which a text is mixed piece by piece
Heads = tuple[PerHead, Keys, Values]
Mask = Bool[Tensor, "batch pos"]


def every_third(n_pos: int) -> Bool[Tensor, " pos"]:
    """The global tokens of a check of the identities."""
    return torch.arange(n_pos) % 3 == 0


class GlobalTokens(nn.Module):
    """Which tokens of a text have global attention: those of the caller's mask, or by default none, the first token, or those
    before the first of three separators, which are a question before the text with its answer.

    `hook_mask` [batch, pos] is 1 at these tokens; a hook there chooses them in any run, sweeps among them.
    """

    @dataclass(frozen=True)
    class Config:
        default: str = "none"  # "none", "first" or "question"
        separator: int | None = None  # the token id that ends a question

        def build(self) -> "GlobalTokens":
            return GlobalTokens(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_mask = HookPoint("batch", "pos", on_demand=True)

    def forward(self, tokens: Int[Tensor, "batch pos"], mask: Tensor | None, real: Mask | None) -> Mask | None:
        """The tokens of global attention, padding not among them; None if there are none."""
        if mask is None and self.cfg.default == "none" and not is_listening(self.hook_mask):
            return None
        chosen = self.hook_mask(self.by_default(tokens, real) if mask is None else mask.long()).bool()
        chosen = chosen if real is None else chosen & real
        return None if is_on_host(chosen) and not bool(chosen.any()) else chosen

    def by_default(self, tokens: Int[Tensor, "batch pos"], real: Mask | None) -> Int[Tensor, "batch pos"]:
        """The mask of a run without one."""
        if self.cfg.default == "none":
            return torch.zeros_like(tokens)
        if self.cfg.default == "first":
            counted = torch.ones_like(tokens).cumsum(1) if real is None else real.long().cumsum(1)
            return (counted == 1).long()
        assert self.cfg.separator is not None, "a question ends at a separator"
        ends = tokens.eq(self.cfg.separator)
        reason = f"the question before a text ends at the first of three separators (token {self.cfg.separator})"
        fix = "encode pairs of question and text, or give global_attention_mask"
        right = (ends.sum(1) == 3).all()
        check(right, f"{reason}; {fix}", lambda: f"{reason}, but the texts have {ends.sum(1).tolist()}; {fix}")
        return (ends.long().cumsum(1) == 0).long()


def check_only(cfg: Attention.Config, *known: str) -> None:
    """Raises ValueError for mechanisms that attention with global tokens does not have; `known` are those that it has."""
    others = [field for field in fields(cfg) if field.name not in ("d_model", "n_heads", "d_head", *known)]
    if wrong := [field.name for field in others if getattr(cfg, field.name) != field.default]:
        raise ValueError(f"attention with global tokens does not support {wrong[0]}={getattr(cfg, wrong[0])!r}")


class WindowAttention(Attention):
    """Bidirectional attention within a window, except that all tokens attend to those of global attention, and these to all.

    Queries of other tokens see the keys of their window and of global tokens, by `W_Q`, `W_K` and `W_V`. Those of global tokens
    see all keys, by weights of their own: `W_Q_global`, `W_K_global` and `W_V_global`. In `hook_attn_scores` and `hook_pattern`
    the rows of global tokens are of the second kind, and `hook_z` is the pattern times `hook_v_global` there, and `hook_v`
    elsewhere. The sites `hook_q_global`, `hook_k_global` and `hook_v_global` are reached only in a run with global tokens.
    """

    axes = {
        "W_Q_global": "head [d_model] d_head",
        "W_K_global": "kv_head [d_model] d_head",
        "W_V_global": "kv_head [d_model] d_head",
    }

    @dataclass(frozen=True)
    class Config(Attention.Config):
        """Only `window`, `scale` and biases may differ from the defaults, beside the sizes."""

        causal: bool = False

        def __post_init__(self) -> None:
            check_only(self, "window", "scale", "qkv_bias", "out_bias")

        def build(self) -> "WindowAttention":
            return WindowAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        add_projections(self, cfg, cfg.d_model, suffix="_global")
        self.hook_q_global, self.hook_k_global, self.hook_v_global = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        for name in ("hook_attn_scores", "hook_pattern", "hook_z", "hook_result"):  # in the order of computation
            self._modules[name] = self._modules.pop(name)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch key_row *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        if not isinstance(context, StackContext) or context.global_tokens is None:
            return super().forward(query_input, key_input, value_input, context, layer)
        inputs = [query_input if x is None else x for x in (query_input, key_input, value_input)]
        local = self._projections(inputs, "", (self.hook_q, self.hook_k, self.hook_v))
        of_global = self._projections(inputs, "_global", (self.hook_q_global, self.hook_k_global, self.hook_v_global))
        fuses = self.may_fuse(self.hook_attn_scores, self.hook_pattern)
        mix = self._mixed_fused if fuses else self._mixed_in_steps
        return self.output(self.hook_z(mix(local, of_global, context.global_tokens, context)))

    def _projections(self, inputs: Sequence[Tensor], suffix: str, points: Sequence[HookPoint]) -> Heads:
        """The queries, keys and values by the weights with this suffix."""
        weights = [(getattr(self, f"W_{x}{suffix}"), getattr(self, f"b_{x}{suffix}")) for x in "QKV"]
        q, k, v = (point(project(x, W, b)) for x, (W, b), point in zip(inputs, weights, points, strict=True))
        return q, k, v

    def _mixed_in_steps(self, local: Heads, of_global: Heads, is_global: Mask, context: StackContext) -> Mixed:
        """The mixed values, with scores and pattern at their sites."""
        products = [torch.einsum("bqnh,bknh->bnqk", q, k) * self.scale for q, k, _ in (local, of_global)]
        scores = torch.where(is_global[:, None, :, None], products[1], products[0])
        scores = self.hook_attn_scores(scores.masked_fill(~self.seen(context), float("-inf")))
        pattern = self.hook_pattern(steps.softmax(scores, None).to(scores.dtype))
        z = [torch.einsum("bnqk,bknh->bqnh", pattern, v) for _, _, v in (local, of_global)]
        return torch.where(is_global[:, :, None, None], z[1], z[0])

    def _mixed_fused(self, local: Heads, of_global: Heads, is_global: Mask, context: StackContext) -> Mixed:
        """The mixed values, by the fused kernel: those of all tokens, then those of global tokens in their places."""
        q, k, v = of_global
        z, rows = self.mix_fused(*local, context), self._global_rows(context)
        keys = None if context.real is None else context.real[:, None, None, :].expand(-1, 1, rows.shape[1], -1)
        own = fused(taken(q, rows), k, v, keys, self.scale)
        own = torch.where(is_global.gather(1, rows)[:, :, None, None], own, taken(z, rows))
        return z.scatter(1, rows[:, :, None, None].expand_as(own), own)

    def _global_rows(self, context: StackContext) -> Int[Tensor, "batch most"]:
        """The positions of the global tokens, first in each row; there are as many as in the row with the most."""

        def compute() -> Tensor:
            assert context.global_tokens is not None, "a run with global tokens"
            number, n_most = context.global_tokens.long(), context.n_pos
            if is_on_host(number):
                n_most = int(number.sum(1).max())
            return number.argsort(dim=1, descending=True, stable=True)[:, :n_most]

        return context.once("rows of global tokens", compute)

    def mix_fused(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """The mixed values of queries that see their window and the global tokens, by the fused kernel."""
        assert isinstance(context, StackContext), "the context of a stack"
        is_long = self.window is not None and context.n_key > LONG * self.window and context.real is None
        if is_long and not isinstance(context, CallContext):
            return self.mixed_by_windows(q, k, v, context)
        if context.global_tokens is None:
            return super().mix_fused(q, k, v, context)
        return fused(q, k, v, self.seen(context), self.scale)

    def mixed_by_windows(self, q: PerHead, k: Keys, v: Values, context: StackContext) -> Mixed:
        """The same for a long text without padding, in pieces: each with the keys of its own and the two around it, and the
        global tokens that are further away."""
        assert self.window is not None, "attention within a window"
        (batch, n_pos), size, device = q.shape[:2], self.window, q.device
        n_pieces = -(-n_pos // size)
        rest = n_pieces * size - n_pos
        queries = F.pad(q, (0, 0, 0, 0, 0, rest)).unflatten(1, (n_pieces, size))
        keys, values = (F.pad(x, (0, 0, 0, 0, size, size + rest)).unfold(1, 3 * size, size) for x in (k, v))
        keys, values = keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 4, 2, 3)  # [batch, piece, key, head, d_head]
        query_pos = torch.arange(n_pieces * size, device=device).view(1, n_pieces, size, 1)
        key_pos = torch.arange(3 * size, device=device) + query_pos[:, :, :1] - size
        mask = ((query_pos - key_pos).abs() < size) & (key_pos >= 0) & (key_pos < n_pos) | (query_pos == key_pos)
        if context.global_tokens is not None:
            rows = self._global_rows(context)
            there, place = context.global_tokens.gather(1, rows)[:, None, None], rows[:, None, None]
            far = there & ((query_pos - place).abs() >= size)
            mask = torch.cat([mask.expand(batch, -1, -1, -1), far], -1)
            both = ((keys, taken(k, rows)), (values, taken(v, rows)))
            keys, values = (torch.cat([x, y[:, None].expand(-1, n_pieces, -1, -1, -1)], 2) for x, y in both)
        mask = mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
        z = fused(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), mask, self.scale)
        return z.unflatten(0, (batch, n_pieces)).flatten(1, 2)[:, :n_pos]

    def seen(self, context: StackContext) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
        """Which keys a query attends to."""

        def compute() -> Tensor:
            assert context.global_tokens is not None, "a run with global tokens"
            query, key = context.global_tokens[:, None, :, None], context.global_tokens[:, None, None, :]
            all_keys = query if context.real is None else query & context.real[:, None, None, :]
            return context.full_mask(False, self.window) | key | all_keys

        return context.once(("seen", self.window), compute)


def taken(x: Float[Tensor, "batch pos head d_head"], rows: Int[Tensor, "batch row"]) -> Tensor:
    """The vectors of these positions."""
    return x.gather(1, rows[:, :, None, None].expand(-1, -1, *x.shape[2:]))
