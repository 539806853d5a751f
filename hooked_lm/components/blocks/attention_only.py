"""Blocks without an MLP."""

from dataclasses import dataclass

from hooked_lm.components.blocks.block import AttentionPart, Stream
from hooked_lm.components.blocks.wiring import POST, Wiring, added, attn_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint


class AttentionOnlyBlock(AttentionPart):
    """`resid + attn(ln1(resid))`."""

    @dataclass(frozen=True)
    class Config(AttentionPart.Config):
        def build(self, layer: int) -> "AttentionOnlyBlock":
            return AttentionOnlyBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.attn_out(resid, context))

    def wiring(self) -> Wiring:
        attn = attn_step(self)
        return Wiring((attn, added(POST, attn)))
