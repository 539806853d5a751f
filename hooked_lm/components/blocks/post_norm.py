"""Blocks whose norms are in the stream (Vaswani et al. 2017, arXiv:1706.03762)."""

from dataclasses import dataclass

from hooked_lm.components.blocks.block import AttentionPart, Copies, MLPPart, Stream
from hooked_lm.components.context import Context
from hooked_lm.components.norm import RESIDUAL
from hooked_lm.hooks import HookPoint, hook_if_listening


class PostNormBlock(AttentionPart, MLPPart):
    """`x = ln1(resid + attn(resid))`, then `ln2(x + mlp(x))`: the norms are in the stream (Vaswani et al. 2017).

    `hook_resid_mid` and `hook_resid_post` are the sums before these norms; `hook_normalized_resid_mid` and
    `hook_normalized_resid_post` are the stream after them, which the MLP and the next block read.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "PostNormBlock":
            return PostNormBlock(self, layer)

    cfg: Config

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.hook_resid_pre = HookPoint(*RESIDUAL)
        self.make_attention(cfg)
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self._modules["ln1"] = self._modules.pop("ln1")  # to the end: sites are listed in the order of computation
        self.hook_normalized_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp(cfg)
        self.hook_resid_post = HookPoint(*RESIDUAL)
        self._modules["ln2"] = self._modules.pop("ln2")
        self.hook_normalized_resid_post = HookPoint(*RESIDUAL)

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        resid = self.hook_resid_post(resid + self.mlp_written(hook_if_listening(self.hook_mlp_in, resid)))
        return self.hook_normalized_resid_post(self.ln2(resid))

    def read(self, copies: Copies, at_sites: bool = True) -> Copies:
        """The input of attention: the stream, or copies of it, without a norm."""
        return copies
