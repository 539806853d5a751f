"""Blocks with several MLPs, and with a stream that is narrower inside (MobileBERT, Sun et al. 2020, arXiv:2004.02984)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.head_inputs import INPUT_POINTS
from hooked_lm.components.blocks.block import AttentionPart, Copies, Stream
from hooked_lm.components.blocks.post_norm import PostNormPart
from hooked_lm.components.blocks.wiring import (
    NORMALIZED_MID,
    NORMALIZED_POST,
    POST,
    PRE,
    InStream,
    Sublayer,
    Sum,
    Wiring,
    added,
    attn_step,
    mlp_step,
)
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, norm_unhooked
from hooked_lm.components.norms.scales import NoNorm
from hooked_lm.hooks import HookPoint, hook_if_listening

Narrow = Float[Tensor, "batch pos d_narrow"]
NARROW = ("batch", "pos", "d_narrow")


class PostNormMLP(nn.Module):
    """`ln(x + mlp(x))`; `hook_resid_post` is the sum, `hook_normalized_resid_post` the result."""

    def __init__(self, mlp: MLP.Config, norm: NormConfig) -> None:
        super().__init__()
        self.mlp = mlp.build()
        self.hook_mlp_out, self.hook_resid_post = HookPoint(*RESIDUAL), HookPoint(*RESIDUAL)
        self.ln = norm.build()
        self.hook_normalized_resid_post = HookPoint(*RESIDUAL)

    def forward(self, x: Stream) -> Stream:
        x = self.hook_resid_post(x + self.hook_mlp_out(self.mlp(x)))
        return self.hook_normalized_resid_post(self.ln(x))


class SeveralMLPsBlock(AttentionPart, PostNormPart):
    """A post-norm block with further MLPs, `ffn.0`, `ffn.1`, ..., between attention and `mlp`."""

    @dataclass(frozen=True)
    class Config(PostNormPart.Config, AttentionPart.Config):
        n_ffn: int = 0
        ffn_norm: NormConfig = field(kw_only=True)

        @property
        def n_further_weights(self) -> int:
            """The number of entries of the matrices of further MLPs."""
            assert isinstance(self.mlp, MLP.Config), "further MLPs are not gated"
            return self.n_ffn * 2 * self.mlp.d_model * self.mlp.d_mlp

        def build(self, layer: int) -> "SeveralMLPsBlock":
            return SeveralMLPsBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_post_norms()

    def make_before_mlp(self) -> None:
        self.ffn = nn.ModuleList(PostNormMLP(self.cfg.mlp, self.cfg.ffn_norm) for _ in range(self.cfg.n_ffn))  # type: ignore[arg-type]

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.after_attention(self.hook_normalized_resid_mid(self.ln1(resid)))
        return self.hook_normalized_resid_post(self.ln2(self.hook_resid_post(resid)))

    def wiring(self) -> Wiring:
        steps, stream = list(self.wired(attn_step(self, norm="")).steps[:3]), NORMALIZED_MID  # up to the first MLP
        for i in range(len(self.ffn)):
            part = f"ffn.{i}"
            ffn = Sublayer(f"{part}.mlp", stream, f"{part}.hook_mlp_out")
            stream = f"{part}.{NORMALIZED_POST}"
            steps += [ffn, added(f"{part}.{POST}", ffn), InStream(f"{part}.ln", f"{part}.{POST}", stream)]
        mlp = mlp_step(self, stream, "")
        return Wiring((*steps, mlp, added(POST, mlp), InStream("ln2", POST, NORMALIZED_POST)))

    def after_attention(self, resid: Stream) -> Stream:
        """The stream after all MLPs, before the norm of the last."""
        for ffn in self.ffn:
            resid = ffn(resid)
        return resid + self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid))


class Bottleneck(nn.Module):
    """`ln(x W + b)`, with `W` [d_model, d_narrow]; `hook_out` is the result."""

    axes = {"W": "[d_model] d_narrow"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        norm: NormConfig

        def build(self) -> "Bottleneck":
            return Bottleneck(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.norm.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.norm.d_model))
        self.ln = cfg.norm.build(NARROW)
        self.hook_out = HookPoint(*NARROW)

    def forward(self, x: Float[Tensor, "batch pos *head d_model"]) -> Float[Tensor, "batch pos *head d_narrow"]:
        return self.hook_out(self.ln(F.linear(x, self.W.T, self.b)))

    def of_copies(self, x: Float[Tensor, "batch pos head d_model"]) -> Float[Tensor, "batch pos head d_narrow"]:
        """The same for one copy of the stream per head, without the hook points unless a hook there edits its value."""
        edited = any(isinstance(point, HookPoint) and point.is_edited for point in self.modules())
        return self(x) if edited else norm_unhooked(self.ln, F.linear(x, self.W.T, self.b))


class UnreadBottleneck(Bottleneck):
    """The weights of a bottleneck that is not run, without its sites."""

    def __init__(self, cfg: Bottleneck.Config) -> None:
        super().__init__(cfg)
        del self.hook_out
        self.ln = NoNorm(NoNorm.Config(cfg.norm.d_model))


class NarrowBlock(SeveralMLPsBlock):
    """A block that computes in a narrower stream: `x = bottleneck(resid)`, attention and MLPs on x, `ln3(resid + x W_up + b_up)`.

    `hook_resid_pre`, `hook_resid_post` and `hook_normalized_resid_post` are the wide stream, and so are the copies of it for each
    head; the sites of the sublayers, of `ln1` and of `ln2` are narrow. `bottleneck.hook_out` is the narrow stream before
    attention, `hook_narrow_post` that after all MLPs, `hook_normalized_narrow_post` the same after `ln2`. `hook_narrow_out` is
    what the block adds to the wide stream. `W_up` is [d_narrow, d_model].
    """

    axes = {"W_up": "[d_narrow] d_model"}

    @dataclass(frozen=True)
    class Config(SeveralMLPsBlock.Config):
        """Queries and keys read the stream through `qk_bottleneck`, values the wide stream. With `attends_narrow` all read the
        narrow stream; the weights of a `qk_bottleneck` are then kept and not used."""

        bottleneck: Bottleneck.Config = field(kw_only=True)
        qk_bottleneck: Bottleneck.Config | None = None
        attends_narrow: bool = False
        ln3: NormConfig = field(kw_only=True)

        @property
        def d_narrow(self) -> int:
            """The width of the inner stream."""
            return self.bottleneck.norm.d_model

        @property
        def n_further_weights(self) -> int:
            """The number of entries of the matrices of further MLPs, and of those between the streams."""
            n_between = 2 + (self.qk_bottleneck is not None)
            return super().n_further_weights + n_between * self.ln3.d_model * self.d_narrow

        def build(self, layer: int) -> "NarrowBlock":
            return NarrowBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.bottleneck = self.cfg.bottleneck.build()
        self.make_attention()
        if self.cfg.qk_bottleneck is not None:
            kind = UnreadBottleneck if self.cfg.attends_narrow else Bottleneck
            self.qk_bottleneck = kind(self.cfg.qk_bottleneck)
            self.move_to_end("attn", "hook_attn_out")
        self.make_post_norms()
        self.hook_narrow_post = self.hook_resid_post
        del self.hook_resid_post, self.hook_normalized_resid_post
        self.move_to_end("ln2")
        self.hook_normalized_narrow_post = HookPoint(*NARROW)
        for name, point in self.named_modules():
            if isinstance(point, HookPoint) and name not in ("hook_resid_pre", *INPUT_POINTS):
                point.dims = tuple("d_narrow" if axis == "d_model" else axis for axis in point.dims)
        d_model = self.cfg.ln3.d_model
        self.W_up, self.b_up = nn.Parameter(torch.empty(self.cfg.d_narrow, d_model)), nn.Parameter(torch.zeros(d_model))
        self.hook_narrow_out, self.hook_resid_post = HookPoint(*RESIDUAL), HookPoint(*RESIDUAL)
        self.ln3 = self.cfg.ln3.build()
        self.hook_normalized_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        narrow = self.bottleneck(resid)
        narrow = self.hook_resid_mid(narrow + self.attn_out(resid, context, narrow))
        narrow = self.hook_narrow_post(self.after_attention(self.hook_normalized_resid_mid(self.ln1(narrow))))
        narrow = self.hook_normalized_narrow_post(self.ln2(narrow))
        resid = self.hook_resid_post(resid + self.hook_narrow_out(F.linear(narrow, self.W_up.T, self.b_up)))
        return self.hook_normalized_resid_post(self.ln3(resid))

    def wiring(self) -> Wiring:
        wide = Sum(POST, PRE, ("hook_narrow_out",)), InStream("ln3", POST, NORMALIZED_POST)
        return Wiring(wide, "hook_narrow_out is a narrow stream of sublayers between two matrices")

    def attn_out(self, resid: Stream, context: Context | None, shared: Narrow | None = None) -> Narrow:
        """The output of attention to the narrow stream; `shared` is that stream before, if it is already computed."""
        context = context or Context(resid.shape[1], resid.device)
        query, key, value = self.attn_inputs(resid, resid, context)
        narrow, bottleneck = self.bottleneck(resid) if shared is None else shared, self.bottleneck
        if self.cfg.qk_bottleneck is not None and not self.cfg.attends_narrow:
            bottleneck = self.qk_bottleneck
            narrow = bottleneck(resid)

        def narrowed(x: Copies) -> Tensor:
            return bottleneck.of_copies(x) if x.ndim == 4 else narrow

        if self.cfg.qk_bottleneck is not None or self.cfg.attends_narrow:
            query, key = narrowed(query), narrowed(key)
        value = narrowed(value) if self.cfg.attends_narrow else value
        return self.attn_to_stream(self.attn(query, key, value, context, self.layer))
