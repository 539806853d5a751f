"""Per-layer embeddings (Gemma 3n and Gemma 4, Google DeepMind 2025 and 2026): each layer has a small embedding of every token
as a second input, which is added to the stream through a gate."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.activations import Activation, activation
from hooked_lm.components.blocks.block import AttentionPart, Block, MLPPart, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Sublayer, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, norm_of
from hooked_lm.components.readable import check
from hooked_lm.hooks import HookPoint, hook_if_listening

ONE_LAYER = ("batch", "pos", "d_per_layer")
ALL_LAYERS = ("batch", "pos", "layer", "d_per_layer")

OneLayer = Float[Tensor, "batch pos d_per_layer"]
AllLayers = Float[Tensor, "batch pos layer d_per_layer"]


class PerLayerEmbed(nn.Module):
    """`(norm(x W_proj * d_model ** -0.5) + sqrt(d_per_layer) * W_E[token]) / sqrt(2)`, for all layers at once.

    x is the token embedding in the stream; `W_E` is [d_vocab, layer, d_per_layer], `W_proj`
    [d_model, layer, d_per_layer].
    """

    axes = {"W_E": "[d_vocab] layer d_per_layer", "W_proj": "[d_model] layer d_per_layer"}

    @dataclass(frozen=True)
    class Config:
        d_vocab: int
        d_model: int
        n_layers: int
        d_per_layer: int
        norm: NormConfig
        spare_row: int | None = None  # of tokens that have no row

        def build(self) -> "PerLayerEmbed":
            return PerLayerEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.n_layers, cfg.d_per_layer))
        self.W_proj = nn.Parameter(torch.empty(cfg.n_layers, cfg.d_per_layer, cfg.d_model).permute(2, 0, 1))
        self.norm = cfg.norm.build(ALL_LAYERS)
        self.hook_out = HookPoint(*ALL_LAYERS)

    def forward(self, tokens: Int[Tensor, "batch pos"], embed: Stream) -> AllLayers:
        return self.hook_out((self.norm(self.projected(embed)) + self.rows(tokens)) * 2**-0.5)

    def projected(self, embed: Stream) -> AllLayers:
        """The projection of the stream's embedding, for each layer, before the norm."""
        projected = F.linear(embed, self.W_proj.flatten(1).T) * self.cfg.d_model**-0.5
        return projected.unflatten(-1, (self.cfg.n_layers, self.cfg.d_per_layer))

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> AllLayers:
        """The scaled rows of `W_E`, for each layer.

        Raises ValueError for a token without a row, unless it has a `spare_row`; not inside `torch.compile`.
        """
        d_vocab, spare_row = self.cfg.d_vocab, self.cfg.spare_row
        if spare_row is not None:
            tokens = tokens.where(tokens < d_vocab, spare_row)
        elif tokens.numel():
            reason = f"has no per-layer embedding: the table has {d_vocab} rows"
            check(tokens.max() < d_vocab, f"a token id {reason}", lambda: f"token id {int(tokens.max())} {reason}")
        rows = F.embedding(tokens, self.W_E.flatten(1))
        # the scale is rounded to the dtype of the weights, as in training
        rows = rows * torch.tensor(self.cfg.d_per_layer**0.5).to(rows.dtype)
        return rows.unflatten(-1, (self.cfg.n_layers, self.cfg.d_per_layer))


class PerLayerGate(nn.Module):
    """`(act(x W_gate) * e) W_out`, where e is the per-layer embedding."""

    axes = {"W_gate": "[d_model] d_per_layer", "W_out": "[d_per_layer] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_per_layer: int
        act_fn: Activation

        def build(self) -> "PerLayerGate":
            return PerLayerGate(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.act = activation(cfg.act_fn)
        self.W_gate = nn.Parameter(torch.empty(cfg.d_model, cfg.d_per_layer))
        self.W_out = nn.Parameter(torch.empty(cfg.d_per_layer, cfg.d_model))
        self.hook_pre, self.hook_post = HookPoint(*ONE_LAYER), HookPoint(*ONE_LAYER)

    def forward(self, x: Stream, per_layer_input: OneLayer) -> Stream:
        gate = self.act(self.hook_pre(F.linear(x, self.W_gate.T)))
        return F.linear(self.hook_post(gate * per_layer_input), self.W_out.T)


def layer_input(block: Block, context: Context | None, use: str) -> Tensor:
    """What a layer reads beside the stream; ValueError, with its use in words, if the context has none."""
    found = None if context is None else context.per_layer_input(block.layer)
    if found is None:
        raise ValueError(f"layer {block.layer} {use}: pass tokens=... with the residual stream")
    return found


class PerLayerPart(Block):
    """The part of a block that adds the gated per-layer embedding.

    `hook_per_layer_resid` is the stream that the gate reads, `hook_per_layer_in` the per-layer embedding, and
    `hook_per_layer_out` what is added to the stream.
    """

    def make_per_layer(self, gate: PerLayerGate.Config, norm: NormConfig | None) -> None:
        """Adds the gate and the norm after it."""
        self.hook_per_layer_resid = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_per_layer_in = HookPoint(*ONE_LAYER)
        self.per_layer = gate.build()
        add_norm(self, "per_layer_post", norm)
        self.hook_per_layer_out = HookPoint(*RESIDUAL)

    def per_layer_out(self, resid: Stream, context: Context | None) -> Stream:
        """The gated per-layer embedding; ValueError if the context has none."""
        per_layer_input = layer_input(self, context, "adds its own embedding of the tokens")
        resid = hook_if_listening(self.hook_per_layer_resid, resid)
        out = self.per_layer(resid, self.hook_per_layer_in(per_layer_input))
        return self.hook_per_layer_out(norm_of(self, "per_layer_post")(out))


class PerLayerBlock(PerLayerPart, AttentionPart, MLPPart):
    """A pre-norm block, then `(resid + norm(gate(resid, e))) * scale` with the per-layer embedding e.

    `hook_resid_post` is the stream after the scaling, the outputs of the sublayers are before it.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        """`per_layer` is the gate; None: no per-layer embedding."""

        per_layer: PerLayerGate.Config | None = None
        per_layer_post: NormConfig | None = None

        def build(self, layer: int) -> "PerLayerBlock":
            return PerLayerBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.scale = nn.Buffer(torch.ones(1))
        if self.cfg.per_layer is not None:
            self.make_per_layer(self.cfg.per_layer, self.cfg.per_layer_post)
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        resid = resid + self.mlp_out(resid)
        if self.cfg.per_layer is not None:
            resid = resid + self.per_layer_out(resid, context)
        return self.hook_resid_post(resid * self.scale)

    def wiring(self) -> Wiring:
        attn, mlp, after = attn_step(self), mlp_step(self), "after_mlp"
        steps = (attn, added(MID, attn), mlp)
        if self.cfg.per_layer is None:
            return Wiring((*steps, replace(added(POST, mlp), times="scale")))
        at, beside = ("hook_per_layer_resid",), ("hook_per_layer_in",)
        own = Sublayer("per_layer", after, "hook_per_layer_out", post="per_layer_post", at=at, beside=beside)
        return Wiring((*steps, added(after, mlp), own, replace(added(POST, own), times="scale")))
