"""The blocks of an encoder-decoder's decoder: self-attention, then cross attention, then the MLP."""

from dataclasses import dataclass, field

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.blocks.block import AttentionPart, Stream
from hooked_lm.components.blocks.wiring import (
    MID,
    NORMALIZED_MID,
    NORMALIZED_POST,
    POST,
    InStream,
    Sublayer,
    Wiring,
    added,
    attn_step,
    mlp_step,
)
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.mlp import MLPConfig
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, build_norm, norm_of
from hooked_lm.components.stack_context import StackContext
from hooked_lm.components.tl_call import cross_block_context
from hooked_lm.hooks import HookPoint, hook_if_listening

MID_CROSS = "hook_resid_mid_cross"


class CrossPart(AttentionPart):
    """The three sublayers and their outputs."""

    @dataclass(frozen=True)
    class Config(AttentionPart.Config):
        """`ln1` is before self-attention, `ln2` before cross attention, `ln3` before the MLP; None: no norm. `ln2_post` and
        `ln3_post` normalise the outputs, as `ln1_post` does."""

        cross_attn: CrossAttention.Config = field(kw_only=True)
        mlp: MLPConfig | MoE.Config = field(kw_only=True)
        ln2: NormConfig | None = None
        ln3: NormConfig | None = None
        ln2_post: NormConfig | None = None
        ln3_post: NormConfig | None = None

    cfg: Config

    call_context = staticmethod(cross_block_context)

    def make_cross_attention(self) -> None:
        self.hook_cross_attn_in = HookPoint(*RESIDUAL, on_demand=True)
        self.ln2 = build_norm(self.cfg.ln2)
        self.cross_attn = self.cfg.cross_attn.build()
        self.cross_attn.layer_id = self.layer
        add_norm(self, "ln2_post", self.cfg.ln2_post)
        self.hook_cross_attn_out = HookPoint(*RESIDUAL)

    def make_mlp(self) -> None:
        self.hook_mlp_in = HookPoint(*RESIDUAL, on_demand=True)
        self.ln3 = build_norm(self.cfg.ln3)
        self.mlp = self.cfg.mlp.build()
        add_norm(self, "ln3_post", self.cfg.ln3_post)
        self.hook_mlp_out = HookPoint(*RESIDUAL)

    def apply_cross_attn(self, normalized_resid: Stream, context: StackContext) -> Stream:
        """The output of cross attention to the stream, with queries from the normalised stream."""
        out = self.cross_attn(normalized_resid, context, self.layer)
        return self.hook_cross_attn_out(self.scaled(norm_of(self, "ln2_post")(out)))

    def cross_step(self, reads: str, norm: str) -> Sublayer:
        """Cross attention, as a step of the wiring."""
        out, scale, at = "hook_cross_attn_out", self.cfg.residual_scale, ("hook_cross_attn_in",)
        return Sublayer("cross_attn", reads, out, norm, "ln2_post", scale, at, beside=("source",))

    def apply_mlp(self, normalized_resid: Stream) -> Stream:
        """The output of the MLP to the stream, for the normalised stream."""
        return self.hook_mlp_out(self.scaled(norm_of(self, "ln3_post")(self.mlp(normalized_resid))))


class PreNormCrossBlock(CrossPart):
    """`resid + attn(ln1(resid))`, then `resid + cross_attn(ln2(resid), source)`, then `resid + mlp(ln3(resid))`."""

    @dataclass(frozen=True)
    class Config(CrossPart.Config):
        def build(self, layer: int) -> "PreNormCrossBlock":
            return PreNormCrossBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_cross_attention()
        self.hook_resid_mid_cross = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: StackContext) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        cross_out = self.apply_cross_attn(self.ln2(hook_if_listening(self.hook_cross_attn_in, resid)), context)
        resid = self.hook_resid_mid_cross(resid + cross_out)
        return self.hook_resid_post(resid + self.apply_mlp(self.ln3(hook_if_listening(self.hook_mlp_in, resid))))

    def wiring(self) -> Wiring:
        attn, cross, mlp = attn_step(self), self.cross_step(MID, "ln2"), mlp_step(self, MID_CROSS, "ln3", "ln3_post")
        return Wiring((attn, added(MID, attn), cross, added(MID_CROSS, cross), mlp, added(POST, mlp)))


class PostNormCrossBlock(CrossPart):
    """`x = ln1(resid + attn(resid))`, then `y = ln2(x + cross_attn(x, source))`, then `ln3(y + mlp(y))`.

    The norms are in the stream (Vaswani et al. 2017). `hook_resid_mid`, `hook_resid_mid_cross` and `hook_resid_post` are the
    sums before them; the sites `hook_normalized_resid_...` are the stream after them.
    """

    @dataclass(frozen=True)
    class Config(CrossPart.Config):
        def build(self, layer: int) -> "PostNormCrossBlock":
            return PostNormCrossBlock(self, layer)

    cfg: Config
    mixing_norm = ""

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.move_to_end("ln1")
        self.hook_normalized_resid_mid = HookPoint(*RESIDUAL)
        self.make_cross_attention()
        self.hook_resid_mid_cross = HookPoint(*RESIDUAL)
        self.move_to_end("ln2")
        self.hook_normalized_resid_mid_cross = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)
        self.move_to_end("ln3")
        self.hook_normalized_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: StackContext) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        cross_out = self.apply_cross_attn(hook_if_listening(self.hook_cross_attn_in, resid), context)
        resid = self.hook_resid_mid_cross(resid + cross_out)
        resid = self.hook_normalized_resid_mid_cross(self.ln2(resid))
        resid = self.hook_resid_post(resid + self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid)))
        return self.hook_normalized_resid_post(self.ln3(resid))

    def wiring(self) -> Wiring:
        after_cross = "hook_normalized_resid_mid_cross"
        attn, cross = attn_step(self, norm=""), self.cross_step(NORMALIZED_MID, "")
        mlp = mlp_step(self, after_cross, "", "ln3_post")
        mid, mid_cross = InStream("ln1", MID, NORMALIZED_MID), InStream("ln2", MID_CROSS, after_cross)
        post = InStream("ln3", POST, NORMALIZED_POST)
        before = (attn, added(MID, attn), mid, cross, added(MID_CROSS, cross), mid_cross)
        return Wiring((*before, mlp, added(POST, mlp), post))


CrossBlockConfig = PreNormCrossBlock.Config | PostNormCrossBlock.Config
