"""A post-norm block with a convolution of its input (DeBERTa-v2, He et al. 2020, arXiv:2006.03654)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from hooked_lm.components.activations import Activation, activation
from hooked_lm.components.blocks.block import AttentionPart, Stream
from hooked_lm.components.blocks.post_norm import PostNormPart
from hooked_lm.components.blocks.wiring import NORMALIZED_POST, POST, InStream, Sum, Wiring, attn_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig
from hooked_lm.hooks import HookPoint, hook_if_listening


class ConvPostNormBlock(AttentionPart, PostNormPart):
    """`ln3(block(resid) + act(conv(resid)))`: a post-norm block plus a convolution of its input over positions.

    `W_conv` is [offset, d_model, d_model] (with groups, [offset, d_model / groups, d_model]). `hook_resid_conv` is the sum
    before `ln3`, `hook_normalized_resid_post` the stream after it.
    """

    axes = {"W_conv": "[offset d_in] d_out; it is a convolution"}

    @dataclass(frozen=True)
    class Config(PostNormPart.Config, AttentionPart.Config):
        ln3: NormConfig = field(kw_only=True)
        n_offsets: int = 3  # the width of the convolution, in positions
        n_groups: int = 1
        conv_act_fn: Activation = "tanh"

        def build(self, layer: int) -> "ConvPostNormBlock":
            return ConvPostNormBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.make_post_norms()
        cfg, d_model = self.cfg, self.cfg.ln3.d_model
        self.W_conv = nn.Parameter(torch.empty(d_model, d_model // cfg.n_groups, cfg.n_offsets).permute(2, 1, 0))
        self.b_conv = nn.Parameter(torch.zeros(d_model))
        self.hook_conv_pre = HookPoint(*RESIDUAL)
        self.conv_act = activation(cfg.conv_act_fn)
        self.hook_conv_out = HookPoint(*RESIDUAL)
        self.hook_resid_conv = HookPoint(*RESIDUAL)
        self.ln3 = cfg.ln3.build()
        self.move_to_end("hook_normalized_resid_post")

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = source = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context, resid))
        resid = self.hook_normalized_resid_mid(self.ln1(resid))
        resid = self.ln2(self.hook_resid_post(resid + self.apply_mlp(hook_if_listening(self.hook_mlp_in, resid))))
        pre = self.hook_conv_pre(self.convolved(source, context))
        resid = self.hook_resid_conv(resid + self.hook_conv_out(self.conv_act(pre)))
        return self.hook_normalized_resid_post(self.ln3(resid))

    def wiring(self) -> Wiring:
        steps = self.wired(attn_step(self, norm="")).steps[:-1]  # but for the norm at the end
        summed = Sum("hook_resid_conv", "after_ln2", ("hook_conv_out",))
        ends = InStream("ln2", POST, "after_ln2"), summed, InStream("ln3", summed.gives, NORMALIZED_POST)
        return Wiring((*steps, *ends), "hook_conv_out is a convolution of the stream that enters the block")

    def convolved(self, x: Stream, context: Context | None = None) -> Stream:
        """The convolution, with zeros for padding."""
        if context is not None and context.real is not None:
            x = x * context.real[..., None]
        weight, padding = self.W_conv.permute(2, 1, 0), (self.cfg.n_offsets - 1) // 2
        return F.conv1d(x.mT, weight, self.b_conv, padding=padding, groups=self.cfg.n_groups).mT
