"""Blocks with attention alone or an MLP alone."""

from dataclasses import dataclass

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import POST, PRE, Wiring, added, attn_step, mlp_step
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


class MLPOnlyBlock(MLPPart):
    """`resid + mlp(ln2(resid))`: a layer of a model whose attention and MLPs are layers of their own."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config):
        def build(self, layer: int) -> "MLPOnlyBlock":
            return MLPOnlyBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        mlp = mlp_step(self, PRE)
        return Wiring((mlp, added(POST, mlp)))
