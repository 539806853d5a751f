"""Multi-head and grouped-query attention (Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023,
arXiv:2305.13245).

Nobody listens to the scores or the pattern: the fused kernel. Somebody does: the same in steps. Keys and values stay
[kv_head]: grouped heads are never copied out.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norm import NormConfig, build_norm, wide
from hooked_lm.components.rotary import Rotary
from hooked_lm.hooks import HookPoint, is_listening

QUERY = ("batch", "pos", "head", "d_head")
KEY = ("batch", "pos", "kv_head", "d_head")
SCORES = ("batch", "head", "query_pos", "key_pos")

Stream = Float[Tensor, "batch pos d_model"]
PerHead = Float[Tensor, "batch pos head d_head"]


class Attention(nn.Module):
    """`z = softmax(q k^T * scale + mask) v`, and `W_O` back into the stream.

    `W_Q` is [head, d_model, d_head], `W_K` and `W_V` [kv_head, d_model, d_head], `W_O` [head, d_head, d_model]; a bias
    may be None. The strides of the weights are those of one matrix product. With `ungrouped` set, keys and values are
    made, shown and edited once for each query head.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        n_key_value_heads: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = False
        out_bias: bool = False
        rotary: Rotary | None = None
        qk_norm: NormConfig | None = None
        window: int | None = None  # how many positions back a query sees, itself included
        soft_cap: float | None = None
        causal: bool = True

        @property
        def n_kv(self) -> int:
            return self.n_key_value_heads or self.n_heads

        def build(self) -> "Attention":
            return Attention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if cfg.n_heads % cfg.n_kv:
            raise ValueError(f"{cfg.n_heads} heads cannot share {cfg.n_kv} key/value heads evenly")
        self.cfg = cfg
        self.ungrouped = False
        self.scale = cfg.d_head**-0.5 if cfg.scale is None else cfg.scale
        self.W_Q = _projection(cfg.n_heads, cfg)
        self.W_K = _projection(cfg.n_kv, cfg)
        self.W_V = _projection(cfg.n_kv, cfg)
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.qkv_bias else None
        self.b_K = nn.Parameter(torch.zeros(cfg.n_kv, cfg.d_head)) if cfg.qkv_bias else None
        self.b_V = nn.Parameter(torch.zeros(cfg.n_kv, cfg.d_head)) if cfg.qkv_bias else None
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.out_bias else None

        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        if cfg.qk_norm is not None:
            self.q_norm, self.k_norm = build_norm(cfg.qk_norm, QUERY), build_norm(cfg.qk_norm, KEY)
        if cfg.rotary is not None:
            self.hook_rot_q, self.hook_rot_k = HookPoint(*QUERY), HookPoint(*KEY)
        self.hook_attn_scores, self.hook_pattern = HookPoint(*SCORES), HookPoint(*SCORES)
        self.hook_z = HookPoint(*QUERY)
        self.hook_result = HookPoint("batch", "pos", "head", "d_model", on_demand=True)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch pos *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the normalised stream, or one copy of it per (key/value) head; by default all the same.

        `layer` says which entry of the context's key/value cache is this layer's.
        """
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(self._project_kv(query_input if key_input is None else key_input, self.W_K, self.b_K))
        v = self.hook_v(self._project_kv(query_input if value_input is None else value_input, self.W_V, self.b_V))
        if self.cfg.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.cfg.rotary is not None:
            angles = context.rotary(self.cfg.rotary)
            q = self.hook_rot_q(self.cfg.rotary.rotate(q, angles))
            k = self.hook_rot_k(self.cfg.rotary.rotate(k, angles))
        if context.cache is not None:
            k, v = context.cache[layer].append(k, v)
        if self.cfg.soft_cap is not None or is_listening(self.hook_attn_scores, self.hook_pattern):
            z = self.attend_in_steps(q, k, v, context)
        else:
            z = self.attend_fused(q, k, v, context)
        return self.output(self.hook_z(z))

    @property
    def n_kv(self) -> int:
        """How many key/value heads there are at the hook points."""
        return self.cfg.n_heads if self.ungrouped else self.cfg.n_kv

    def _project_kv(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """Keys or values; ungrouped, by a copy of the weight for each query head."""
        if self.n_kv != W.shape[0]:
            group = self.n_kv // W.shape[0]
            W, b = W.repeat_interleave(group, 0), None if b is None else b.repeat_interleave(group, 0)
        return project(x, W, b)

    def attend_fused(
        self,
        q: PerHead,
        k: Float[Tensor, "batch key_pos kv_head d_head"],
        v: Float[Tensor, "batch key_pos kv_head d_head"],
        context: Context,
    ) -> PerHead:
        """Mixed values by the fused kernel."""
        mask = context.mask(self.cfg.causal, self.cfg.window)
        is_causal = self.cfg.causal and mask is None
        if context.n_pos == 1:  # a last token sees all; a branch, as the compiler knows n_pos only as a symbol
            is_causal = False
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=k.shape[2] != q.shape[2],
        )
        return z.transpose(1, 2)

    def attend_in_steps(
        self,
        q: PerHead,
        k: Float[Tensor, "batch key_pos kv_head d_head"],
        v: Float[Tensor, "batch key_pos kv_head d_head"],
        context: Context,
    ) -> PerHead:
        """Mixed values by way of scores and pattern. The query heads of a group are rows of one product."""
        batch, n_pos, n_heads, d_head = q.shape
        n_key, n_kv = k.shape[1:3]
        grouped = (batch * n_kv, n_heads // n_kv * n_pos)
        scores_shape = (batch, n_heads, n_pos, n_key)

        queries = q.transpose(1, 2).reshape(*grouped, d_head)
        keys = k.permute(0, 2, 3, 1).flatten(0, 1)
        mask = context.additive_mask(self.cfg.causal, self.cfg.window, q.dtype)
        if self.cfg.soft_cap is None:
            scores = torch.baddbmm(_rows(mask, n_heads, n_kv), queries, keys, alpha=self.scale).view(scores_shape)
        else:
            scores = (torch.bmm(queries, keys) * (self.scale / self.cfg.soft_cap)).view(scores_shape)
            scores = self.cfg.soft_cap * scores.tanh() + mask

        scores = self.hook_attn_scores(scores)
        pattern = self.hook_pattern(wide(scores).softmax(-1).to(v.dtype))
        z = torch.bmm(pattern.reshape(*grouped, n_key), v.transpose(1, 2).flatten(0, 1))
        return z.view(batch, n_heads, n_pos, -1).transpose(1, 2)

    def output(self, z: PerHead) -> Stream:
        """From mixed values back into the stream; the sum over heads is taken apart only if somebody listens."""
        if is_listening(self.hook_result):
            result = self.hook_result(torch.einsum("bpnh,nhm->bpnm", z, self.W_O))
            return result.sum(2) if self.b_O is None else result.sum(2) + self.b_O
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)


def _rows(mask: Float[Tensor, "#batch 1 query_pos key_pos"], n_heads: int, n_kv: int) -> Tensor:
    """The mask of the grouped product: [rows, key_pos] if all prompts share it, else one for each of its batches."""
    batch, _, n_pos, n_key = mask.shape
    if batch == 1:
        return mask[0].expand(n_heads // n_kv, n_pos, n_key).reshape(-1, n_key)
    return mask.expand(batch, n_heads, n_pos, n_key).reshape(batch * n_kv, -1, n_key)


def _projection(n_heads: int, cfg: Attention.Config) -> nn.Parameter:
    """[head, d_model, d_head], laid out in memory as the [head * d_head, d_model] matrix of one product."""
    return nn.Parameter(torch.empty(n_heads, cfg.d_head, cfg.d_model).transpose(1, 2))


def project(
    x: Float[Tensor, "batch pos *head d_model"],
    W: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"] | None,
) -> PerHead:
    """Queries, keys or values of a stream shared by all heads, or of one copy per head."""
    if x.ndim == 4:
        per_head = torch.einsum("bpnm,nmh->bpnh", x, W)
        return per_head if b is None else per_head + b
    weight = W.transpose(1, 2).flatten(0, 1)
    return F.linear(x, weight, None if b is None else b.flatten()).unflatten(-1, (W.shape[0], W.shape[2]))
