"""Attention of every kind against its formula, one query and one head at a time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi, Chunks
from hooked_lm.components.attention.position_scale import PositionScale, PositionScaledAttention
from hooked_lm.components.context import Context
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention
from hooked_lm.families.decoders.mimo_v2_flash.value_width import ValueWidthAttention
from hooked_lm.families.decoders.olmoe.clipped import NormThenClipAttention
from hooked_lm.hooks import HookPoint
from tests.close import assert_apart, assert_close

PLAIN = Attention.Config(d_model=12, n_heads=4, d_head=6, n_key_value_heads=2, qkv_bias=True, out_bias=True)
KINDS = {
    "plain": PLAIN,
    "bidirectional": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=2),
    "window both ways": replace(PLAIN, window=2, causal=False),
    "scale": replace(PLAIN, scale=0.7),
    "soft cap": replace(PLAIN, soft_cap=0.5),
    "sinks": replace(PLAIN, sinks=True),
    "sinks and soft cap": replace(PLAIN, sinks=True, soft_cap=0.5),
    "alibi": replace(PLAIN, position_bias=Alibi(4)),
    "alibi in a window": replace(PLAIN, position_bias=Alibi(4, scale=0.5), window=3),
    "clip": replace(PLAIN, clip=0.8),
    "clip after norms": NormThenClipAttention.Config(
        **vars(replace(PLAIN, clip=0.8, qk_norm=RMSNorm.Config(6, eps=0.1)))
    ),
    "norm": replace(PLAIN, qk_norm=RMSNorm.Config(6, eps=0.1)),
    "norm of each head": replace(
        PLAIN,
        qk_norm=LayerNorm.Config(6, eps=0.1, n_heads=4),
        k_norm=LayerNorm.Config(6, eps=0.1, n_heads=2),
    ),
    "norm of all heads": replace(
        PLAIN,
        qk_norm=RMSNorm.Config(6, eps=0.1, n_heads=4, joint=True),
        k_norm=RMSNorm.Config(6, eps=0.1, n_heads=2, joint=True),
    ),
    "gate": GatedAttention.Config(**vars(PLAIN), gate_bias=True),
    "gate of each head": GatedAttention.Config(**vars(PLAIN), gate_act_fn="silu", gate_per_head=True),
    "chunks": replace(PLAIN, position_bias=Chunks(2)),
    "chunks in a window both ways": replace(PLAIN, position_bias=Chunks(3), window=2, causal=False),
    "scores by position": PositionScaledAttention.Config(**vars(PLAIN), position_scale=PositionScale(0.8, 2, 1)),
    "scores by position in steps": PositionScaledAttention.Config(
        **vars(replace(PLAIN, soft_cap=0.5)), position_scale=PositionScale(0.8, 2, 1)
    ),
    "narrow values": ValueWidthAttention.Config(**vars(PLAIN), d_value=4),
    "wide values": ValueWidthAttention.Config(**vars(PLAIN), d_value=9, value_scale=1.7),
    "scaled values": ValueWidthAttention.Config(**vars(PLAIN), d_value=6, value_scale=1.7),
    "two of two experts": RoutedAttention.Config(**vars(PLAIN), n_experts=2, top_k=2),
    "one of two experts": RoutedAttention.Config(**vars(PLAIN), n_experts=2, top_k=1),
    "norm of z": replace(PLAIN, z_norm=RMSNorm.Config(6, eps=0.1, n_heads=4, joint=True)),
}


def built(cfg: Attention.Config) -> Attention:
    attn = cfg.build().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in attn.parameters():
        parameter.data.normal_(std=0.7, generator=generator)
    for name, part in attn.named_modules():
        if isinstance(part, HookPoint):
            part.name = name
    return attn.requires_grad_(False)


def normalised(x: Tensor, norm: object) -> Tensor:
    """[head, d_head] of one position."""
    if isinstance(norm, LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + norm.cfg.eps).sqrt() * norm.w + norm.b
    if isinstance(norm, RMSNorm):
        square = x.pow(2).mean() if norm.cfg.joint else x.pow(2).mean(-1, keepdim=True)
        return x / (square + norm.cfg.eps).sqrt() * norm.w
    return x


def by_hand(attn: Attention, x: Tensor) -> Tensor:
    """The formula for one prompt [pos, d_model]."""
    cfg, clip = attn.cfg, attn.cfg.clip or float("inf")
    q, k, v = (
        torch.stack([sum(x[:, m, None] * W[n, m] for m in range(12)) + b[n] for n in range(len(W))], 1)
        for W, b in ((attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K), (attn.W_V, attn.b_V))
    )
    if not isinstance(attn, NormThenClipAttention):
        q, k = q.clamp(-clip, clip), k.clamp(-clip, clip)
    v = v.clamp(-clip, clip)
    q = torch.stack([normalised(row, getattr(attn, "q_norm", None)) for row in q]).clamp(-clip, clip)
    k = torch.stack([normalised(row, getattr(attn, "k_norm", None)) for row in k]).clamp(-clip, clip)
    out = []
    for i in range(len(x)):
        z = []
        for head in range(4):
            terms, values = [], []
            for j in range(len(x)):
                distance = i - j if cfg.causal else abs(i - j)
                if distance < 0 or (cfg.window is not None and distance >= cfg.window):
                    continue
                if isinstance(cfg.position_bias, Chunks) and i // cfg.position_bias.size != j // cfg.position_bias.size:
                    continue
                score = float(q[i, head] @ k[j, head // 2]) * (cfg.scale or 6**-0.5)
                if isinstance(attn, PositionScaledAttention):
                    score *= 1 + 0.8 * math.log1p((i + 1) // 2)
                if cfg.soft_cap is not None:
                    score = cfg.soft_cap * math.tanh(score / cfg.soft_cap)
                if isinstance(cfg.position_bias, Alibi):
                    score -= cfg.position_bias.scale * 2.0 ** (-2 * (head + 1)) * distance
                terms.append(torch.tensor(score, dtype=torch.float64).exp())
                values.append(v[j, head // 2] * getattr(cfg, "value_scale", 1.0))
            total = sum(terms) + (attn.sinks[head].exp() if cfg.sinks else 0.0)
            z.append(sum(term * value for term, value in zip(terms, values, strict=True)) / total)
        mixed = normalised(torch.stack(z), norm_of(attn, "z_norm"))
        if isinstance(attn, GatedAttention):
            gate = torch.stack([x[i] @ attn.W_gate[head] for head in range(4)])
            gate = gate if attn.b_gate is None else gate + attn.b_gate
            mixed = mixed * (gate * gate.sigmoid() if cfg.gate_per_head else gate.sigmoid())
        if isinstance(attn, RoutedAttention):  # two heads for each key/value head, one of each expert
            logits = x[i] @ attn.W_router
            weights = logits.softmax(-1) if attn.cfg.top_k == 2 else (logits == logits.max()).double()
            mixed = mixed * weights.repeat(2)[:, None]
        out.append(sum(mixed[head] @ attn.W_O[head] for head in range(4)) + attn.b_O)
    return torch.stack(out)


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listens", [False, True])
def test_the_formula(kind: str, listens: bool) -> None:
    attn, x = built(KINDS[kind]), torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if listens:
        for part in attn.modules():
            if isinstance(part, HookPoint):
                part.add_hook(lambda value, hook: None)
    expected = torch.stack([by_hand(attn, row) for row in x])
    in_fp32 = isinstance(attn, PositionScaledAttention)  # logarithms of positions are, on every processor differently
    assert_close(attn(x), expected, dtype=torch.float32 if in_fp32 else None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "narrow values", "wide values")])
def test_each_kind_is_another(kind: str) -> None:
    """What a kind adds can be seen: the formula of the plain one does not hold for it."""
    attn, x = built(KINDS[kind]), torch.randn(1, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = built(PLAIN)
    plain.load_state_dict({name: value for name, value in attn.state_dict().items() if name in plain.state_dict()})
    assert_apart(attn(x), plain(x))


def test_a_text_of_one_chunk_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, masked = F.scaled_dot_product_attention, []

    def spy(*args: Tensor, **kwargs: Any) -> Tensor:
        masked.append(kwargs["attn_mask"] is not None)
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attn, x = built(replace(PLAIN, position_bias=Chunks(4))), torch.randn(1, 5, 12, dtype=torch.float64)
    assert_close(attn(x[:, :4]), attn(x)[:, :4])
    assert masked == [False, True]


@pytest.mark.parametrize("n_heads", [1, 2, 6, 8, 12])
def test_slopes(n_heads: int) -> None:
    slopes = Alibi(n_heads).slopes()
    lower = max(n for n in (1, 2, 4, 8) if n <= n_heads)
    assert slopes[lower - 1] == 2**-8
    assert slopes[0] == 2 ** (-8 / lower)
    assert len(slopes.unique()) == n_heads


def test_alibi_counts_real_positions() -> None:
    real = torch.tensor([[False, True, True], [True, True, True]])
    bias = Alibi(2).bias(Context(3, torch.device("cpu"), real), torch.float32)
    assert (bias[0, 0, 0, 1:] == bias[1, 0, 0, :2]).all()
