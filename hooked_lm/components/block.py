"""Blocks: how attention and MLP stand on the residual stream. A difference of structure is a different class."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention import Attention
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import MLPConfig, on_demand
from hooked_lm.components.norm import RESIDUAL, NormConfig, build_norm, plain_norm
from hooked_lm.hooks import HookPoint, is_listening

Stream = Float[Tensor, "batch pos d_model"]
Inputs = tuple[
    Float[Tensor, "batch pos *head d_model"],
    Float[Tensor, "batch pos *key_head d_model"],
    Float[Tensor, "batch pos *value_head d_model"],
]


class AttentionPart(nn.Module):
    """The half of a block that reads and writes the stream through attention."""

    @dataclass(frozen=True)
    class Config:
        """A norm that is None is none; `ln1_post` normalises what is added, and `residual_scale` multiplies it."""

        attn: Attention.Config
        ln1: NormConfig | None = None
        ln1_post: NormConfig | None = None
        residual_scale: float = 1.0

    cfg: Config
    layer: int

    def make_attention(self, cfg: Config) -> None:
        self.ln1 = build_norm(cfg.ln1)
        per_head, per_kv_head = ("batch", "pos", "head", "d_model"), ("batch", "pos", "kv_head", "d_model")
        self.hook_attn_in = HookPoint(*per_head, on_demand=True)
        self.hook_q_input = HookPoint(*per_head, on_demand=True)
        self.hook_k_input = HookPoint(*per_kv_head, on_demand=True)
        self.hook_v_input = HookPoint(*per_kv_head, on_demand=True)
        self.attn = cfg.attn.build()
        self.ln1_post = build_norm(cfg.ln1_post)
        self.hook_attn_out = HookPoint(*RESIDUAL)

    def attn_out(self, resid: Stream, context: Context | None) -> Stream:
        """What attention adds to the stream."""
        query, key, value = self.attn_inputs(resid)
        if context is not None and context.pos_embed is not None:
            query, key = _plus(query, context.pos_embed), _plus(key, context.pos_embed)
        out = self.ln1_post(self.attn(query, key, value, context, self.layer))
        return self.hook_attn_out(_scaled(out, self.cfg.residual_scale))

    def attn_inputs(self, resid: Stream) -> Inputs:
        """The normalised stream for queries, keys and values; where somebody listens, one copy of it per head.

        The sites of `ln1` belong to the shared stream. The copies are normalised past them.
        """
        shared = self.ln1(resid)
        query = key = value = shared
        n_heads, n_kv = self.attn.cfg.n_heads, self.attn.n_kv
        if is_listening(self.hook_attn_in):
            copies = self.hook_attn_in(_repeated(resid, n_heads))
            # the keys and values of a group of heads read the mean of the group's copies
            grouped = copies if n_kv == n_heads else copies.unflatten(2, (n_kv, -1)).mean(3)
            query = plain_norm(self.ln1, copies)
            key = value = plain_norm(self.ln1, grouped)
        else:
            copies = grouped = resid
        if is_listening(self.hook_q_input):
            query = plain_norm(self.ln1, self.hook_q_input(_repeated(copies, n_heads)))
        if is_listening(self.hook_k_input):
            key = plain_norm(self.ln1, self.hook_k_input(_repeated(grouped, n_kv)))
        if is_listening(self.hook_v_input):
            value = plain_norm(self.ln1, self.hook_v_input(_repeated(grouped, n_kv)))
        return query, key, value


class MLPPart(nn.Module):
    """The half of a block that reads and writes the stream through an MLP."""

    @dataclass(frozen=True)
    class Config(AttentionPart.Config):
        """The same for the MLP, beside those of attention."""

        mlp: MLPConfig = field(kw_only=True)
        ln2: NormConfig | None = None
        ln2_post: NormConfig | None = None

    cfg: Config

    def make_mlp(self, cfg: Config) -> None:
        self.hook_mlp_in = HookPoint(*RESIDUAL, on_demand=True)
        self.ln2 = build_norm(cfg.ln2)
        self.mlp = cfg.mlp.build()
        self.ln2_post = build_norm(cfg.ln2_post)
        self.hook_mlp_out = HookPoint(*RESIDUAL)

    def mlp_out(self, resid: Stream) -> Stream:
        """What the MLP adds to the stream."""
        out = self.ln2_post(self.mlp(self.ln2(on_demand(self.hook_mlp_in, resid))))
        return self.hook_mlp_out(_scaled(out, self.cfg.residual_scale))


class AttentionOnlyBlock(AttentionPart):
    """`resid + attn(ln1(resid))`."""

    @dataclass(frozen=True)
    class Config(AttentionPart.Config):
        def build(self, layer: int) -> "AttentionOnlyBlock":
            return AttentionOnlyBlock(self, layer)

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hook_resid_pre = HookPoint(*RESIDUAL)
        self.make_attention(cfg)
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.attn_out(resid, context))


class PreNormBlock(AttentionPart, MLPPart):
    """`resid + attn(ln1(resid))`, then `resid + mlp(ln2(resid))`."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config):
        def build(self, layer: int) -> "PreNormBlock":
            return PreNormBlock(self, layer)

    cfg: Config

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hook_resid_pre = HookPoint(*RESIDUAL)
        self.make_attention(cfg)
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp(cfg)
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        return self.hook_resid_post(resid + self.mlp_out(resid))


class ParallelBlock(AttentionPart, MLPPart):
    """`resid + attn(ln1(resid)) + mlp(ln2(resid))`: both read the same stream (GPT-J, Wang and Komatsuzaki 2021)."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config):
        def build(self, layer: int) -> "ParallelBlock":
            return ParallelBlock(self, layer)

    cfg: Config

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hook_resid_pre = HookPoint(*RESIDUAL)
        self.make_attention(cfg)
        self.make_mlp(cfg)
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.attn_out(resid, context) + self.mlp_out(resid))


BlockConfig = AttentionOnlyBlock.Config | PreNormBlock.Config | ParallelBlock.Config


def _scaled(x: Stream, scale: float) -> Stream:
    return x if scale == 1.0 else x * scale


def _repeated(x: Tensor, n: int) -> Tensor:
    """One private copy per head of a stream; a stream that is per head already is copied as it is."""
    return x.clone() if x.ndim == 4 else x[:, :, None].repeat(1, 1, n, 1)


def _plus(x: Tensor, pos_embed: Stream) -> Tensor:
    return x + (pos_embed[:, :, None] if x.ndim == 4 else pos_embed)
