"""From queries, keys and values to what attention gives: scores, pattern, mixed values, output.

All kinds of attention end here, however they come by queries and keys. Nobody listens to the scores or the pattern: the
fused kernel. Somebody does: the same in steps. Grouped heads are never copied out.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.position_bias import PositionBias
from hooked_lm.components.context import Context
from hooked_lm.components.known_attributes import KnownAttributes, order_parameters
from hooked_lm.components.norm import NormConfig, add_norm, norm_of, wide
from hooked_lm.hooks import HookPoint, is_listening

QUERY = ("batch", "pos", "head", "d_head")
KEY = ("batch", "pos", "kv_head", "d_head")
SCORES = ("batch", "head", "query_pos", "key_pos")
PROJECTIONS = ("W_Q", "W_K", "W_V", "W_UQ", "W_UK", "W_UV")  # [head, ..., d_head]

Stream = Float[Tensor, "batch pos d_model"]
PerHead = Float[Tensor, "batch pos head d_head"]
Mixed = Float[Tensor, "batch pos head d_value"]
Keys = Float[Tensor, "batch key_pos kv_head d_head"]
Values = Float[Tensor, "batch key_pos kv_head d_value"]


class Attend(KnownAttributes):
    """`z = softmax(q k^T * scale + bias + mask) v`, and `W_O` [head, d_value, d_model] back into the stream.

    What the subclasses share: they make queries, keys and values, and call `mix` and `output`. With `sinks` each head has
    a learned score that takes its share of the softmax and mixes in nothing (Xiao et al. 2023, arXiv:2309.17453). A
    `z_norm` normalises the mixed values before `W_O`.
    """

    makes_keys = True  # whether keys and values are made of what this reads
    kv_source_layer: int | None = None  # the layer whose keys and values this reads instead
    # what belongs to keys and values alone: their sites, and the weights that make them
    of_keys: tuple[str, ...] = ("hook_k", "hook_v", "hook_rot_k", "k_norm", "v_norm", "W_K", "W_V")

    def make_mixing(
        self,
        n_heads: int,
        d_value: int,
        d_model: int,
        scale: float,
        out_bias: bool,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        position_bias: PositionBias | None = None,
        z_norm: NormConfig | None = None,
    ) -> None:
        self.scale, self.causal, self.window, self.soft_cap = scale, causal, window, soft_cap
        self.position_bias = None if position_bias is None else position_bias.build()
        self.W_O = nn.Parameter(torch.empty(n_heads, d_value, d_model))
        self.b_O = nn.Parameter(torch.zeros(d_model)) if out_bias else None
        self.sinks = nn.Parameter(torch.zeros(n_heads)) if sinks else None
        self.hook_attn_scores, self.hook_pattern = HookPoint(*SCORES), HookPoint(*SCORES)
        self.hook_z = HookPoint(*QUERY)
        add_norm(self, "z_norm", z_norm, QUERY)
        self.hook_result = HookPoint("batch", "pos", "head", "d_model", on_demand=True)
        order_parameters(self)

    def make_contiguous(self) -> None:
        """Give the weights of heads that are not one matrix in memory (those of a file may lie between others) one of their
        own: every run would have to copy them into one."""
        for name, weight in self.named_parameters(recurse=False):
            if name in PROJECTIONS and weight.stride(0) != weight.shape[2] * weight.stride(2):
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)

    def mix(self, q: PerHead, k: Keys, v: Values, context: Context, layer: int = 0) -> Mixed:
        """Mixed values, at their site."""
        in_steps = self.soft_cap is not None or self.sinks is not None or not self.manner.fused
        in_steps = in_steps or is_listening(self.hook_attn_scores, self.hook_pattern)
        return self.hook_z(context.attend_rows(layer, self.mix_in_steps if in_steps else self.mix_fused, q, k, v))

    def mix_fused(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """Mixed values by the fused kernel."""
        mask: Tensor | None
        if self.position_bias is not None:
            mask, is_causal = self.additive_mask(context, q.dtype), False
        else:
            mask = context.mask(self.causal, self.window)
            is_causal = self.causal and mask is None
        if context.n_pos == 1:  # a last token sees all; a branch, as the compiler knows n_pos only as a symbol
            is_causal = False
        d_value, missing = v.shape[-1], q.shape[-1] - v.shape[-1]
        if missing > 0:  # without zeros that make values as wide as queries there is no fused kernel on a CPU
            v = F.pad(v, (0, missing))
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=k.shape[2] != q.shape[2],
        ).transpose(1, 2)
        return z[..., :d_value].contiguous() if missing > 0 else z

    def mix_in_steps(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """Mixed values by way of scores and pattern. The query heads of a group are rows of one product."""
        batch, n_pos, n_heads, d_head = q.shape
        n_key, n_kv = k.shape[1:3]
        grouped = (batch * n_kv, n_heads // n_kv * n_pos)
        scores_shape = (batch, n_heads, n_pos, n_key)

        queries = q.transpose(1, 2).reshape(*grouped, d_head)
        keys = k.permute(0, 2, 3, 1).flatten(0, 1)
        mask = self.additive_mask(context, q.dtype)
        if self.soft_cap is None:
            rows = _rows(mask, batch, n_pos, n_heads, n_kv)
            scores = torch.baddbmm(rows, queries, keys, alpha=self.scale).view(scores_shape)
        else:
            scores = (torch.bmm(queries, keys) * (self.scale / self.soft_cap)).view(scores_shape)
            scores = self.soft_cap * scores.tanh() + mask

        pattern = self.hook_pattern(self.softmax(self.hook_attn_scores(scores)).to(v.dtype))
        z = torch.bmm(pattern.reshape(*grouped, n_key), v.transpose(1, 2).flatten(0, 1))
        return z.view(batch, n_heads, n_pos, -1).transpose(1, 2)

    def additive_mask(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch #head query_pos key_pos"]:
        """What is added to the scores: minus infinity where a key may not be seen, and the bias of its position."""
        mask = context.additive_mask(self.causal, self.window, dtype)
        return mask if self.position_bias is None else mask + self.position_bias.bias(context, dtype)

    def softmax(
        self, scores: Float[Tensor, "batch head query_pos key_pos"]
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The pattern, in at least fp32; what goes to the sinks is left out."""
        if self.sinks is None:
            return wide(scores).softmax(-1)
        sinks = wide(self.sinks)[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([wide(scores), sinks], -1).softmax(-1)[..., :-1]

    def output(self, z: Mixed) -> Stream:
        """From mixed values back into the stream; the sum over heads is taken apart only if something listens."""
        z = norm_of(self, "z_norm")(z)
        if is_listening(self.hook_result) or (self.manner.results and not self.manner.fused):
            result = self.hook_result(torch.einsum("bpnh,nhm->bpnm", z, self.W_O))
            return result.sum(2) if self.b_O is None else result.sum(2) + self.b_O
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)


def _rows(
    mask: Float[Tensor, "#batch #head #query_pos key_pos"], batch: int, n_pos: int, n_heads: int, n_kv: int
) -> Tensor:
    """The mask of the grouped product: [rows, key_pos] if all prompts and heads share it, else one for each product."""
    if mask.shape[:2] == (1, 1):
        return mask[0].expand(n_heads // n_kv, n_pos, -1).reshape(-1, mask.shape[-1])
    return mask.expand(batch, n_heads, n_pos, -1).reshape(batch * n_kv, -1, mask.shape[-1])


def projection(n_heads: int, d_model: int, d_head: int) -> nn.Parameter:
    """[head, d_model, d_head], laid out in memory as the [head * d_head, d_model] matrix of one product."""
    return nn.Parameter(torch.empty(n_heads, d_head, d_model).transpose(1, 2))


def project(
    x: Float[Tensor, "batch pos *head d_model"],
    W: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"] | None,
) -> PerHead:
    """Queries, keys or values of a stream shared by all heads, or of one copy per head."""
    if x.ndim == 4:
        projected = torch.einsum("bpnm,nmh->bpnh", x, W)
        return projected if b is None else projected + b
    weight = W.transpose(1, 2).flatten(0, 1)
    return F.linear(x, weight, None if b is None else b.flatten()).unflatten(-1, (W.shape[0], W.shape[2]))
