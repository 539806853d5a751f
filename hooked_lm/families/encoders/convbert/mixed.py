"""Mixed attention (Jiang et al. 2020, arXiv:2008.02496): beside heads that attend, heads that convolve a span of tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import KEY, QUERY, PerHead, SelfAttention, Stream, project
from hooked_lm.components.attention.projection import add_projections, projection
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.run_settings import RunSettings
from hooked_lm.hooks import HookPoint, is_listening

Copies = Float[Tensor, "batch pos *head d_model"]  # the stream, or one copy of it per head
ValueCopies = Float[Tensor, "batch pos *value_head d_model"]
Kernels = Float[Tensor, "batch pos head offset"]


class SpanConv(nn.Module):
    """`z[pos] = sum over o of kernel[pos, o] * v[pos + o - n_offsets // 2]` for each head, then `W_O` [head, d_head, d_model].

    The kernels depend on the text: `softmax((q * k) W_kernel + b_kernel)` over offsets, where q are the queries of attention and
    k sees a span: the stream is convolved over positions, each feature by its column of `W_depth` [offset, d_model], then
    projected by `W_K`. `W_kernel` is [head, d_head, kernel_head, offset]: the kernel of a head reads all heads. Outside of the
    text, and at padding, the stream and the values are zero.
    """

    axes = {
        "W_depth": "[offset] channel; it is a convolution",
        "W_K": "head [channel] d_head",
        "W_V": "head [d_model] d_head",
        "W_kernel": "[head d_head] kernel_head offset",
        "W_O": "[head d_head] d_model",
    }

    settings = RunSettings()

    def __init__(self, cfg: "MixedAttention.Config") -> None:
        super().__init__()
        n_heads, d_head, n_offsets = cfg.n_heads, cfg.d_head, cfg.n_offsets
        self.cfg = cfg
        self.W_depth = nn.Parameter(torch.empty(cfg.d_model, n_offsets).T)
        self.W_K, self.W_V = (projection(n_heads, cfg.d_model, d_head) for _ in range(2))
        self.b_K, self.b_V = (nn.Parameter(torch.zeros(n_heads, d_head)) for _ in range(2))
        kernel = torch.empty(n_heads, n_offsets, n_heads, d_head)
        self.W_kernel = nn.Parameter(kernel.permute(2, 3, 0, 1))
        self.b_kernel = nn.Parameter(torch.zeros(n_heads, n_offsets))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, cfg.d_model))
        self.hook_k = HookPoint(*KEY)
        self.hook_kernel_scores, self.hook_kernel = (HookPoint(*QUERY[:-1], "offset") for _ in range(2))
        self.hook_v, self.hook_z = HookPoint(*KEY), HookPoint(*QUERY)
        self.hook_result = HookPoint("batch", "pos", "head", "d_model", on_demand=True)

    def forward(self, q: PerHead, key_input: Copies, value_input: ValueCopies, context: Context) -> Stream:
        k = self.hook_k(self.keys(key_input, context))
        kernel = self.hook_kernel(self.hook_kernel_scores(self.kernel_scores(q, k)).softmax(-1))
        v = self.hook_v(project(value_input, self.W_V, self.b_V))
        z = self.hook_z(self.convolved(kernel, v, context))
        if is_listening(self.hook_result) or (self.settings.attn_result and not self.settings.fused):
            return self.hook_result(torch.einsum("bpnh,nhm->bpnm", z, self.W_O)).sum(2)
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T)

    def keys(self, x: Copies, context: Context) -> PerHead:
        """The span-aware keys."""
        x = without_padding(x, context)
        channels = x.flatten(2).mT
        weight = self.W_depth.T[:, None].repeat(channels.shape[1] // x.shape[-1], 1, 1)
        spans = F.conv1d(channels, weight, padding="same", groups=len(weight)).mT
        return project(spans.unflatten(2, x.shape[2:]), self.W_K, self.b_K)

    def kernel_scores(self, q: PerHead, k: PerHead) -> Kernels:
        """The kernels before the softmax."""
        weight = self.W_kernel.flatten(2).flatten(0, 1)
        return F.linear((q * k).flatten(2), weight.T, self.b_kernel.flatten()).unflatten(-1, self.b_kernel.shape)

    def convolved(self, kernel: Kernels, v: PerHead, context: Context) -> PerHead:
        """The sum of the values around each position, times its kernel; one product per offset, summed in at least fp32."""
        n_pos, n_offsets = v.shape[1], self.cfg.n_offsets
        values = F.pad(upcast(without_padding(v, context)), (0, 0, 0, 0, n_offsets // 2, n_offsets // 2))
        weights = upcast(kernel)[..., None].unbind(3)
        z = weights[0] * values[:, :n_pos]
        for offset in range(1, n_offsets):
            z = torch.addcmul(z, weights[offset], values[:, offset : offset + n_pos])
        return z.to(v.dtype)


class MixedAttention(SelfAttention):
    """Heads that attend and, in `conv`, as many that convolve; the output is the sum of what all of them add.

    The convolving heads use the queries of the attending ones. Their keys and values read the inputs of keys and values; of
    per-head copies, those of the attending head with their number.
    """

    @dataclass(frozen=True)
    class Config(SelfAttention.Config):
        """`n_heads` heads attend and as many convolve, each over `n_offsets` positions, an odd number, its own in the middle."""

        d_model: int
        n_heads: int
        d_head: int
        n_offsets: int = 9
        scale: float | None = None
        causal: bool = False
        qkv_bias: ClassVar[bool] = True
        out_bias, rotary = True, None

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            heads = self.n_heads * self.d_head
            return 7 * self.d_model * heads + self.n_offsets * (self.d_model + self.n_heads * heads)

        def build(self) -> "MixedAttention":
            return MixedAttention(self)

    def __init__(self, cfg: Config) -> None:
        if cfg.n_offsets % 2 == 0:
            raise ValueError(f"a kernel of {cfg.n_offsets} positions has no middle; give an odd number")
        super().__init__()
        self.cfg = cfg
        add_projections(self, cfg, cfg.d_model)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        self.make_mixing(cfg.d_head)
        self.conv = SpanConv(cfg)

    def forward(
        self,
        query_input: Copies,
        key_input: Float[Tensor, "batch pos *key_head d_model"] | None = None,
        value_input: ValueCopies | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """Each input is the stream, or one copy of it per head; by default all are the first."""
        context = context or Context(query_input.shape[1], query_input.device)
        key_input = query_input if key_input is None else key_input
        value_input = query_input if value_input is None else value_input
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(project(key_input, self.W_K, self.b_K))
        v = self.hook_v(project(value_input, self.W_V, self.b_V))
        attended = self.output(self.mix(q, k, v, context, layer))
        return attended + self.conv(q, key_input, value_input, context)


def without_padding(x: Float[Tensor, "batch pos *axes"], context: Context) -> Float[Tensor, "batch pos *axes"]:
    """The value with zeros at padding."""
    return x if context.real is None else x.masked_fill(~context.real.unflatten(1, (-1, *[1] * (x.ndim - 2))), 0.0)
