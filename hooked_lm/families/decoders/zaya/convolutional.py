"""Compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476): queries and keys are convolved over positions."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import KEY, QUERY, Attention, PerHead, ProjectedAttention, Stream
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm
from hooked_lm.components.ssm.convolution import CausalConvolution, Window, after_window
from hooked_lm.components.ssm.mixer import carried
from hooked_lm.hooks import HookPoint

AllHeads = Float[Tensor, "batch pos all_heads d_head"]  # queries, keys and values side by side
Keys = Float[Tensor, "batch pos kv_head d_head"]


class ConvolutionalAttention(ProjectedAttention):
    """Attention with queries `conv_q(q) + m` and keys `conv_k(k) + mean of m over the group`, where `m = (q + k) / 2`,
    `q = x W_Q + b_Q` and `k = x W_K + b_K`; the second half of the values, over the features of all heads, is that of the token
    before.

    `W_V` is `W_V_current` and `W_V_delayed`, [d_model, half], side by side. The first token has no token before: its second half
    is the bias.

    `hook_q_proj` and `hook_k_proj` are q and k, before the convolutions; `hook_q`, `hook_k` and `hook_v` are what attention uses.
    """

    axes = dict.fromkeys(("W_V_current", "W_V_delayed"), "[d_model] half; it is half of W_V")

    key_value_parts = (*Attention.key_value_parts, "hook_q_proj", "hook_k_proj")
    mixes_inputs = True
    mixes_linearly = False  # the bias of values is two parameters, which cannot be moved as one

    @dataclass(frozen=True)
    class Config(Attention.Config):
        conv_width: int = 2  # of the convolution of each channel
        head_conv_width: int = 2  # of that of all channels of a head

        @property
        def n_taps(self) -> int:
            """How many earlier tokens are read."""
            return max(self.conv_width + self.head_conv_width - 2, 1)

        def build(self) -> "ConvolutionalAttention":
            return ConvolutionalAttention(self)

    cfg: Config
    W_V_current: Tensor
    W_V_delayed: Tensor
    b_V_current: Tensor | None
    b_V_delayed: Tensor | None

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        half, odd = divmod(cfg.n_kv * cfg.d_head, 2)
        if odd:
            raise ValueError(f"{cfg.n_kv} key/value heads of width {cfg.d_head} have no half of their features")
        del self._parameters["W_V"], self._parameters["b_V"]
        for part in ("current", "delayed"):
            self.register_parameter(f"W_V_{part}", nn.Parameter(torch.empty(half, cfg.d_model).T))
            self.register_parameter(f"b_V_{part}", nn.Parameter(torch.zeros(half)) if cfg.qkv_bias else None)
        later = dict(self._modules)
        self._modules.clear()  # sites are listed in the order of computation
        self.hook_q_proj, self.hook_k_proj = HookPoint(*QUERY), HookPoint(*KEY)
        self.conv_q, self.conv_k = (HeadConvolution(n, cfg) for n in (cfg.n_heads, cfg.n_kv))
        self._modules.update(later)

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:  # type: ignore[override]
        """The weight of values, of the token's and of those of the token before."""
        both = torch.cat([self.W_V_current.T, self.W_V_delayed.T])
        return both.unflatten(0, (self.cfg.n_kv, -1)).transpose(1, 2)

    @property
    def b_V(self) -> Float[Tensor, "kv_head d_head"] | None:  # type: ignore[override]
        """The bias of values."""
        if self.b_V_current is None or self.b_V_delayed is None:
            return None
        return torch.cat([self.b_V_current, self.b_V_delayed]).unflatten(0, (self.cfg.n_kv, -1))

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch pos *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch pos *value_head d_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The inputs are as in `Attention`."""
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q_proj(self._projected(query_input, self.W_Q, self.b_Q))
        k = self.hook_k_proj(self._project_kv(query_input if key_input is None else key_input, self.W_K, self.b_K))
        v = self._project_kv(query_input if value_input is None else value_input, self.W_V, None)
        q, k, v = self.split(context.scan(layer, self.convolved, torch.cat([q, k, v], 2)))
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(self.with_bias(v))
        if self.cfg.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.cfg.rotary is not None:
            q = self.hook_rot_q(self.cfg.rotary.rotate(q, context.query_angles(self.cfg.rotary)))
            k = self.hook_rot_k(self.cfg.rotary.rotate(k, context.key_angles(self.cfg.rotary)))
        k, v = context.update_kv(layer, k, v)
        return self.output(self.mix(q, k, v, context, layer))

    def with_bias(self, v: Keys) -> Keys:
        """Values with their bias."""
        return v if self.b_V is None else v + self.b_V.repeat_interleave(v.shape[2] // self.cfg.n_kv, 0)

    def split(self, heads: AllHeads) -> tuple[PerHead, Keys, Keys]:
        """Queries, keys and values, from all of them side by side."""
        n_kv = (heads.shape[2] - self.cfg.n_heads) // 2
        q, k, v = heads.split([self.cfg.n_heads, n_kv, n_kv], 2)
        return q, k, v

    def convolved(self, heads: AllHeads, context: Context, layer: int = 0) -> AllHeads:
        """Queries, keys and values (without bias) of the projections side by side; the window is that of past tokens."""

        def run(window: Window | None, _: Tensor | None) -> tuple[Tensor, Window, Window]:
            mixed = partial(self._mixed_inputs, heads.shape[2])
            out, window = after_window(mixed, heads.flatten(2), self.cfg.n_taps, window, context.new_real())
            return out.view_as(heads), window, window

        return carried(run, len(heads), context, layer)

    def _mixed_inputs(
        self, n: int, inputs: Float[Tensor, "batch taps_and_pos width"]
    ) -> Float[Tensor, "batch pos width"]:
        """The same, where the window precedes the projections."""
        cfg, taps = self.cfg, self.cfg.n_taps
        q, k, v = self.split(inputs.unflatten(-1, (n, cfg.d_head)))
        n_kv = k.shape[2]
        mean = (q[:, taps:] + k[:, taps:].repeat_interleave(cfg.n_heads // n_kv, 2)) / 2
        of_group = mean.unflatten(2, (cfg.n_kv, -1)).mean(3).repeat_interleave(n_kv // cfg.n_kv, 2)
        first = taps - (cfg.conv_width + cfg.head_conv_width - 2)
        made = [self.conv_q(q[:, first:]) + mean, self.conv_k(k[:, first:]) + of_group]
        is_delayed = self._is_delayed(v.device).repeat_interleave(n_kv // cfg.n_kv, 0)
        return torch.cat([*made, torch.where(is_delayed, v[:, taps - 1 : -1], v[:, taps:])], 2).flatten(2)

    def _is_delayed(self, device: torch.device) -> Bool[Tensor, "kv_head d_head"]:
        """Which features of values are those of the token before."""
        width = self.cfg.n_kv * self.cfg.d_head
        return (torch.arange(width, device=device) >= width // 2).view(self.cfg.n_kv, -1)


class HeadConvolution(nn.Module):
    """Two causal convolutions, first of each channel, then of the channels of each head: products by `W_head[head, tap]`.

    `W_head` is [head, tap, d_head, d_head], `b_head` [head, d_head]. Before the first token the inputs of the first are zero, and
    those of the second therefore its bias.
    """

    axes = {"W_head": "head [tap d_in] d_head; it is a convolution"}

    def __init__(self, n_heads: int, cfg: ConvolutionalAttention.Config) -> None:
        super().__init__()
        self.n_heads, self.width = n_heads, cfg.head_conv_width
        self.channels = CausalConvolution.Config(n_heads * cfg.d_head, cfg.conv_width).build()
        self.W_head = nn.Parameter(torch.empty(n_heads, self.width, cfg.d_head, cfg.d_head))
        self.b_head = nn.Parameter(torch.zeros(n_heads, cfg.d_head))

    def forward(self, x: Float[Tensor, "batch taps_and_pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        """The values after the first ones, which only the others read; a head may have several copies."""
        if (copies := x.shape[2] // self.n_heads) > 1:
            apart = x.unflatten(2, (self.n_heads, copies)).movedim(3, 1).flatten(0, 1)
            return self(apart).unflatten(0, (-1, copies)).movedim(1, 3).flatten(2, 3)
        made = self.channels.convolve(x.flatten(2)).to(x.dtype).unflatten(-1, (self.n_heads, -1))
        n_pos = made.shape[1] - self.width + 1
        taps = torch.cat([made[:, tap : tap + n_pos] for tap in range(self.width)], -1)
        return torch.einsum("bpht,hte->bphe", taps, self.W_head.flatten(1, 2)) + self.b_head


class HeadScaleNorm(RMSNorm):
    """`x / scale * w` with one weight for each head, [head, 1]: vectors of the length `w * sqrt(d_head)`."""

    @dataclass(frozen=True)
    class Config(RMSNorm.Config):
        @property
        def shape(self) -> tuple[int, ...]:
            """The shape of the weight."""
            assert self.n_heads is not None, "each head has a weight"
            return (self.n_heads, 1)

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "HeadScaleNorm":
            return HeadScaleNorm(self, dims)

    def gain_of_copies(self, gain: Float[Tensor, "*heads 1"], normalized: Tensor) -> Float[Tensor, "*copies 1"]:
        return gain.repeat_interleave(normalized.shape[-2] // len(gain), 0)
