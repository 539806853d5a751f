"""Blocks whose attention and MLP have the same input."""

from dataclasses import dataclass

from hooked_lm.components.attention.head_inputs import norm_shows_copies
from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import POST, PRE, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint, is_listening


class ParallelBlock(AttentionPart, MLPPart):
    """`resid + attn(ln1(resid)) + mlp(ln2(resid))`: both have the same input (GPT-J, Wang and Komatsuzaki 2021)."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "ParallelBlock":
            return ParallelBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        return self.hook_resid_post(resid + self.attn_out(resid, context) + self.mlp_out(resid))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self, PRE)
        return Wiring((attn, mlp, added(POST, attn, mlp)))


class SharedNormBlock(AttentionPart, MLPPart):
    """`resid + attn(x) + mlp(x)` with `x = ln1(resid)`: a parallel block with one norm for both."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "SharedNormBlock":
            return SharedNormBlock(self, layer)

    cfg: Config
    mlp_norm = "ln1"

    def make_parts(self) -> None:
        self.make_attention()
        self.make_mlp()
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        shared = self.ln1(resid)
        attn_out = self.attn_out(resid, context, shared)
        if is_listening(self.hook_mlp_in):
            shared = self.attn_norm(self.hook_mlp_in(resid.clone()), norm_shows_copies(self, context))
        return self.hook_resid_post(resid + attn_out + self.apply_mlp(shared))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self, PRE, "ln1")
        return Wiring((attn, mlp, added(POST, attn, mlp)))
