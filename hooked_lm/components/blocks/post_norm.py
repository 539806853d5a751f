"""Blocks whose norms are in the stream (Vaswani et al. 2017, arXiv:1706.03762)."""

from dataclasses import dataclass, replace

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import (
    MID,
    NORMALIZED_MID,
    NORMALIZED_POST,
    POST,
    PRE,
    InStream,
    Sublayer,
    Wiring,
    added,
    attn_step,
    mlp_step,
)
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint, hook_if_listening

Weights = tuple[float, float]  # of the stream and of the output of a sublayer, in their sum
EQUAL: Weights = (1.0, 1.0)


class PostNormPart(MLPPart):
    """The half of a block with an MLP, and the norms in the stream after the mixing of tokens and after the MLP."""

    mixing_norm = ""

    def make_post_norms(self) -> None:
        """Adds the parts after those that mix the tokens."""
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.move_to_end("ln1")
        self.hook_normalized_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)
        self.move_to_end("ln2")
        self.hook_normalized_resid_post = HookPoint(*RESIDUAL)

    def wired(self, mixing: Sublayer, mid: Weights = EQUAL, post: Weights = EQUAL) -> Wiring:
        """The wiring of the block for this step of its attention or mixer, with the weights of both sums."""
        mlp = mlp_step(self, NORMALIZED_MID, "")
        sums = replace(added(MID, mixing), weights=mid), replace(added(POST, mlp), weights=post)
        norms = InStream("ln1", MID, NORMALIZED_MID), InStream("ln2", POST, NORMALIZED_POST)
        return Wiring((mixing, sums[0], norms[0], mlp, sums[1], norms[1]))


class PostNormBlock(AttentionPart, PostNormPart):
    """`x = ln1(resid + attn(resid))`, then `ln2(x + mlp(x))`: the norms are in the stream (Vaswani et al. 2017).

    `hook_resid_mid` and `hook_resid_post` are the sums before these norms; `hook_normalized_resid_mid` and
    `hook_normalized_resid_post` are the stream after them, which the MLP and the next block read.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "PostNormBlock":
            return PostNormBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_post_norms()

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        resid = self.hook_resid_post(resid + self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid)))
        return self.hook_normalized_resid_post(self.ln2(resid))

    def wiring(self) -> Wiring:
        return self.wired(attn_step(self, norm=""))


class NormedResidualBlock(AttentionPart, MLPPart):
    """`x = ln1(resid); x + attn(x)`, then `y = ln2(x); y + mlp(y)`: sublayers add to the normalised stream.

    `apply_residual_connection_post_layernorm` of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) and BLOOM.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "NormedResidualBlock":
            return NormedResidualBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        normalized = self.ln1(resid)
        resid = self.hook_resid_mid(normalized + self.attn_out(resid, context, normalized))
        normalized = self.ln2(hook_if_listening(self.hook_mlp_in, resid))
        return self.hook_resid_post(normalized + self.apply_mlp(normalized))

    def wiring(self) -> Wiring:
        attn, mlp, before, between = attn_step(self), mlp_step(self), "normalized_pre", "normalized_mid"
        attn_sum, mlp_sum = added(MID, attn, stream=before), added(POST, mlp, stream=between)
        return Wiring((InStream("ln1", PRE, before), attn, attn_sum, InStream("ln2", MID, between), mlp, mlp_sum))
