"""Post-norm blocks whose sums are weighted (DeepNorm, Wang et al. 2022, arXiv:2203.00555)."""

from dataclasses import dataclass

from torch import nn

from hooked_lm.components.blocks.block import AttentionPart, Stream
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.post_norm import EQUAL, PostNormPart, Weights
from hooked_lm.components.blocks.wiring import Wiring, attn_step, mixer_step
from hooked_lm.components.context import Context
from hooked_lm.hooks import hook_if_listening


class DeepNormPart(PostNormPart):
    """What both kinds of blocks have; `hook_attn_out`, `hook_mixer_out` and `hook_mlp_out` are before the weights."""

    @dataclass(frozen=True)
    class Config(PostNormPart.Config):
        mid_weights: Weights = EQUAL
        post_weights: Weights = EQUAL

    cfg: Config
    ln1: nn.Module

    def after_mixing(self, resid: Stream, out: Stream) -> Stream:
        """The stream after the block, for the stream before it and the output of attention or of the mixer."""
        resid = self.hook_resid_mid(weighted(self.cfg.mid_weights, resid, out))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        mlp_out = self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid))
        resid = self.hook_resid_post(weighted(self.cfg.post_weights, resid, mlp_out))
        return self.hook_normalized_resid_post(self.ln2(resid))


class DeepNormBlock(AttentionPart, DeepNormPart):
    """`x = ln1(a resid + b attn(resid))`, then `ln2(c x + d mlp(x))`, with (a, b) `mid_weights` and (c, d) `post_weights`."""

    @dataclass(frozen=True)
    class Config(DeepNormPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "DeepNormBlock":
            return DeepNormBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_post_norms()

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.after_mixing(resid, self.attn_out(resid, context, resid))

    def wiring(self) -> Wiring:
        return self.wired(attn_step(self, norm=""), self.cfg.mid_weights, self.cfg.post_weights)


class DeepNormMixerBlock(MixerPart, DeepNormPart):
    """The same with a mixer instead of attention."""

    @dataclass(frozen=True)
    class Config(DeepNormPart.Config, MixerPart.Config):
        def build(self, layer: int) -> "DeepNormMixerBlock":
            return DeepNormMixerBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_mixer()
        self.make_post_norms()

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.after_mixing(resid, self.mixer_out(resid, context))

    def wiring(self) -> Wiring:
        return self.wired(mixer_step(self, norm=""), self.cfg.mid_weights, self.cfg.post_weights)


def weighted(weights: Weights, resid: Stream, out: Stream) -> Stream:
    """The sum of the stream and the output of a sublayer, with these weights."""
    a, b = weights
    return a * resid + b * out
