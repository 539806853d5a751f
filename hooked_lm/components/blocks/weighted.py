"""Blocks that weigh the stream before they add to it, as in Doge (Shi et al. 2024, arXiv:2412.11834)."""

from dataclasses import dataclass

import torch
from torch import nn

from hooked_lm.components.blocks.block import PreNormBlock, Stream
from hooked_lm.components.blocks.post_norm import NORMS_IN_STREAM
from hooked_lm.components.context import Context


class WeightedResidualBlock(PreNormBlock):
    """`w_attn * resid + attn(ln1(resid))`, then `w_mlp * resid + mlp(ln2(resid))`, with weights [d_model]."""

    @dataclass(frozen=True)
    class Config(PreNormBlock.Config):
        def build(self, layer: int) -> "WeightedResidualBlock":
            return WeightedResidualBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        super().make_parts()
        d_model = self.cfg.attn.d_model
        self.w_attn, self.w_mlp = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.ones(d_model))

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(self.w_attn * resid + self.attn_out(resid, context))
        return self.hook_resid_post(self.w_mlp * resid + self.mlp_out(resid))


REWRITTEN_STREAMS = (
    *NORMS_IN_STREAM,
    WeightedResidualBlock,
)  # blocks after which the stream is no sum of what was written
