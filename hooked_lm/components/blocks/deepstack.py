"""Deepstack (Meng et al. 2024, arXiv:2406.04334): after the first layers of a decoder, features of images from the middle of
their tower are added to the stream."""

from dataclasses import dataclass
from typing import Any

import torch

from hooked_lm.components.blocks.block import PreNormBlock, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Sum, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.hooks import HookPoint, is_listening


class DeepstackBlock(PreNormBlock):
    """A pre-norm block, then `resid + deepstack`: the features at positions of images, 0 at all others."""

    @dataclass(frozen=True)
    class Config(PreNormBlock.Config):
        def build(self, layer: int) -> "DeepstackBlock":
            return DeepstackBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        super().make_parts()
        self.hook_deepstack = HookPoint(*RESIDUAL)
        self.move_to_end("hook_resid_post")

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(resid + self.attn_out(resid, context))
        return self.hook_resid_post(self.with_deepstack(resid + self.mlp_out(resid), context))

    def wiring(self) -> Wiring:
        attn, mlp = attn_step(self), mlp_step(self)
        return Wiring((attn, added(MID, attn), mlp, Sum(POST, MID, (mlp.writes, "hook_deepstack"))))

    def with_deepstack(self, resid: Stream, context: Any) -> Stream:
        """The stream with the features of images, which a block that is called alone does not have."""
        alone = context is None or type(context) is Context
        added = None if alone else context.deepstack(self.layer)
        if is_listening(self.hook_deepstack):
            added = self.hook_deepstack(torch.zeros_like(resid) if added is None else added.to(resid.dtype))
        return resid if added is None else resid + added.to(resid.dtype)
