"""A block with a second stream, of global tokens (PEGASUS-X; Phang et al. 2022, arXiv:2208.04347)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, PreNormBlock, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.norm import NormConfig, build_norm, norm_unhooked
from hooked_lm.families.encoder_decoders.pegasus_x.block_local import INPUT, OUTPUT
from hooked_lm.hooks import HookPoint

GLOBAL = ("batch", "global_token", "d_model")
KEPT = "stream of global tokens"  # in the context of a run

GlobalStream = Float[Tensor, "batch global_token d_model"]


class GlobalStreamBlock(AttentionPart, MLPPart):
    """A pre-norm block which also updates the stream g of global tokens: `g + attn(ln1_global(g))`, then `g + mlp(ln2(g))`.

    Weights are those of the text's tokens, but for the norm before attention, `ln1_global`. The first block holds what g starts
    from, `W_global` [global_token, d_model]. Sites of g are `hook_global_...`, [batch, global_token, d_model], and those of its
    neurons `hook_global_mlp_pre` and `hook_global_mlp_post`.
    """

    axes = {"W_global": "[token] d_model; its rows are looked up"}
    further_streams = ("global_resid",)  # `hook_global_resid_post` is the next block's `hook_global_resid_pre`

    @dataclass(frozen=True)
    class Config(PreNormBlock.Config):
        ln1_global: NormConfig | None = None
        n_global: int = 0  # how many global tokens start here; 0 in all blocks but the first

        def __post_init__(self) -> None:
            if not isinstance(self.mlp, MLP.Config) or self.mlp.mid_norm or self.ln1_post or self.ln2_post:
                raise ValueError("a block with global tokens has a plain MLP, and no norms after its sublayers")

        def build(self, layer: int) -> "GlobalStreamBlock":  # type: ignore[override]
            return GlobalStreamBlock(self, layer)

    cfg: Config
    mlp: MLP

    def make_parts(self) -> None:
        n_global, d_model = self.cfg.n_global, self.cfg.attn.d_model
        self.W_global = nn.Parameter(torch.empty(n_global, d_model)) if n_global else None
        self.hook_global_resid_pre = HookPoint(*GLOBAL)
        self.ln1_global = build_norm(self.cfg.ln1_global, GLOBAL)
        self.make_attention()
        self.hook_resid_mid = HookPoint("batch", "pos", "d_model")
        self.hook_global_attn_out, self.hook_global_resid_mid = HookPoint(*GLOBAL), HookPoint(*GLOBAL)
        self.make_mlp()
        self.hook_resid_post = HookPoint("batch", "pos", "d_model")
        self.hook_global_mlp_pre = HookPoint("batch", "global_token", "d_mlp")
        self.hook_global_mlp_post = HookPoint("batch", "global_token", "d_mlp")
        self.hook_global_mlp_out, self.hook_global_resid_post = HookPoint(*GLOBAL), HookPoint(*GLOBAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        context = context or Context(resid.shape[1], resid.device)
        resid = self.hook_resid_pre(resid)
        g = self.hook_global_resid_pre(self.entering(resid, context))
        context.keep_rows(INPUT, self.layer, self.ln1_global(g))
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        out = context.rows_of(OUTPUT, self.layer)
        assert out is not None, "attention keeps it"
        g = self.hook_global_resid_mid(g + self.hook_global_attn_out(self.scaled(out)))
        resid = self.hook_resid_post(resid + self.mlp_out(resid))
        g = self.hook_global_resid_post(g + self.hook_global_mlp_out(self.scaled(self.global_mlp(g))))
        context.keep_rows(KEPT, self.layer, g)
        return resid

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self)
        steps = attn, added(MID, attn), mlp, added(POST, mlp)
        return Wiring(steps, "attention and the MLP also update the stream of global tokens")

    def entering(self, resid: Stream, context: Context) -> GlobalStream:
        """The stream of global tokens before the block."""
        if self.W_global is not None:
            return self.W_global.to(resid.device).expand(resid.shape[0], -1, -1).contiguous()
        before = context.rows_of(KEPT, self.layer - 1)
        assert before is not None, "the block before keeps it"
        return before

    def global_mlp(self, g: GlobalStream) -> GlobalStream:
        """The output of the MLP for the global tokens."""
        x, mlp = norm_unhooked(self.ln2, g), self.mlp
        pre = self.hook_global_mlp_pre(F.linear(x, mlp.W_in.T, mlp.b_in))
        return F.linear(self.hook_global_mlp_post(mlp.act_fn(pre)), mlp.W_out.T, mlp.b_out)
