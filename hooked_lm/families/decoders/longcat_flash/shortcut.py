"""Blocks in pairs: experts beside the first block's MLP have a shortcut to the end of the second (Cai et al. 2024,
arXiv:2404.05019), as in LongCat-Flash (Meituan 2025, arXiv:2509.01322)."""

from dataclasses import dataclass, field, replace

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Sublayer, Sum, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint, hook_if_listening

NAME = "shortcut"


class ShortcutStart(AttentionPart, MLPPart):
    """A pre-norm block, and experts `shortcut(ln2(resid))` whose output the next block adds."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        shortcut: MoE.Config = field(kw_only=True)

        def build(self, layer: int) -> "ShortcutStart":
            return ShortcutStart(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.shortcut = self.cfg.shortcut.build()
        self.move_to_end("mlp", "hook_mlp_out")
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        context = context or Context(resid.shape[1], resid.device)
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        normalized = self.ln2(hook_if_listening(self.hook_mlp_in, resid))
        context.keep_rows(NAME, self.layer, self.shortcut(normalized))
        return self.hook_resid_post(resid + self.apply_mlp(normalized))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self)
        shortcut = Sublayer(NAME, MID, f"{NAME}.hook_out", "ln2")
        return Wiring((attn, added(MID, attn), shortcut, mlp, added(POST, mlp)))


class ShortcutEnd(AttentionPart, MLPPart):
    """A pre-norm block that adds the output of the experts of the block before, at `hook_shortcut_out`.

    `hook_mlp_out` is the sum of it and the output of the block's own MLP.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "ShortcutEnd":
            return ShortcutEnd(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_shortcut_out = HookPoint(*RESIDUAL)
        self.move_to_end("hook_mlp_out")
        self.hook_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        out = self.mlp(self.ln2(hook_if_listening(self.hook_mlp_in, resid)))
        return self.hook_resid_post(resid + self.hook_mlp_out(out + self.hook_shortcut_out(self.of_experts(context))))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), replace(mlp_step(self), writes="own_mlp_out")
        both = Sum("hook_mlp_out", mlp.writes, ("hook_shortcut_out",))
        return Wiring((attn, added(MID, attn), mlp, both, Sum(POST, MID, (both.gives,))))

    def of_experts(self, context: Context | None) -> Stream:
        """The output of the experts of the block before; ValueError if that did not run."""
        try:
            found = None if context is None else context.rows_of(NAME, self.layer - 1)
        except KeyError:
            found = None
        if found is None:
            raise ValueError(
                f"layer {self.layer} adds the output of the experts of layer {self.layer - 1}, which did not run; "
                f"start at layer {self.layer - 1} or an earlier one"
            )
        return found
