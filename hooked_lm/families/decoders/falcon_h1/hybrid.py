"""Blocks with attention and a mixer side by side."""

from dataclasses import dataclass

from hooked_lm.components.attention.head_inputs import norm_shows_copies
from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.wiring import MID, POST, Wiring, added, attn_step, mixer_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.components.partial_context import PartialContext
from hooked_lm.hooks import HookPoint, is_listening


class HybridBlock(AttentionPart, MixerPart, MLPPart):
    """`resid + attn(x) + mixer(x)` with `x = ln1(resid)`, then `resid + mlp(ln2(resid))`: attention and a mixer have one input.

    Each sublayer has a scale of its own, which multiplies its output.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, MixerPart.Config, AttentionPart.Config):
        attn_scale: float = 1.0
        mixer_scale: float = 1.0
        mlp_scale: float = 1.0

        def __post_init__(self) -> None:
            if self.ln1_post is not None or self.ln2_post is not None or self.residual_scale != 1.0:
                raise ValueError(
                    "a hybrid block has a scale for each sublayer, and no residual_scale or norms after them"
                )

        def build(self, layer: int) -> "HybridBlock":
            return HybridBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_mixer()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        shared = self.ln1(resid)
        attn_out = self.attn_out(resid, context, shared)
        resid = self.hook_resid_mid(resid + attn_out + self.mixer_out(resid, context, shared))
        return self.hook_resid_post(resid + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        attn = attn_step(self, scale=self.cfg.attn_scale)
        mixer = mixer_step(self, scale=self.cfg.mixer_scale)
        mlp = mlp_step(self, scale=self.cfg.mlp_scale)
        return Wiring((attn, mixer, added(MID, attn, mixer), mlp, added(POST, mlp)))

    def mixer_out(self, resid: Stream, context: Context | None, shared: Stream | None = None) -> Stream:
        """The output of the mixer to the stream; `shared` is the normalised stream, if it is already computed."""
        context = context or Context(resid.shape[1], resid.device)
        if shared is None or is_listening(self.hook_mixer_in):
            shared = self.attn_norm(self.hook_mixer_in(resid.clone()), norm_shows_copies(self, context))
        out = context.scan(self.layer, self.mixer, shared.to(self.mixer_dtype(resid)))
        return self.hook_mixer_out(times(out, self.cfg.mixer_scale))

    def make_keys(self, resid: Stream, context: PartialContext) -> None:  # type: ignore[override]
        """Computes the state after some tokens, and their keys and values."""
        resid = self.hook_resid_pre(resid)
        shared = self.ln1(resid)
        self.mixer_out(resid, context, shared)
        AttentionPart.make_keys(self, resid, context, shared)

    def attn_to_stream(self, out: Stream) -> Stream:
        """The output of attention to the stream, for this output of its module."""
        return self.hook_attn_out(times(out, self.cfg.attn_scale))

    def apply_mlp(self, normalized_resid: Stream, *beside: object) -> Stream:
        """The output of the MLP to the stream, for the normalised stream."""
        return self.hook_mlp_out(times(self.mlp(normalized_resid, *beside), self.cfg.mlp_scale))


def times(out: Stream, scale: float) -> Stream:
    """`scale * out`."""
    return out if scale == 1.0 else out * scale
