"""Deepstack (Meng et al. 2024, arXiv:2406.04334): the projector gives features of several depths of the tower, which are added
to the stream after the first layers of the decoder."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import MID, POST, Sum, Wiring, added, attn_step, mlp_step
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL
from hooked_lm.components.vision.image_context import ImageContext, ImageFeatures
from hooked_lm.components.vision.image_rules import ImageRule
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.components.vision.patches import Patches
from hooked_lm.hooks import HookPoint, is_listening


class DeepstackMerger(PatchMerger):
    """A merger of the tower's output, and one for each of the streams beside it, whose tokens enter the first layers of the
    decoder (see `DeepstackBlock`)."""

    @dataclass(frozen=True)
    class Config(PatchMerger.Config):
        """`depths` are the numbers of blocks after which the tower's streams go to the mergers of `deepstack`."""

        deepstack: tuple[PatchMerger.Config, ...] = ()
        depths: tuple[int, ...] = ()

        def build(self) -> "DeepstackMerger":
            return DeepstackMerger(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.deepstack = nn.ModuleList(merger.build() for merger in cfg.deepstack)

    def forward(self, x: Float[Tensor, "image pos streams"], patches: Patches, n_class_tokens: int) -> ImageFeatures:
        output, *streams = x.split(self.cfg.d_vision, -1)
        both = zip(self.deepstack, streams, strict=True)
        deepstack = tuple(merger(stream, patches, n_class_tokens).vectors for merger, stream in both)
        return replace(super().forward(output, patches, n_class_tokens), deepstack=deepstack)


@dataclass(frozen=True)
class Deepstack(ImageRule):
    """The `deepstack` vectors of images are added to the stream at their tokens, one after each of the first layers."""

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        if features is None:
            return
        context.deepstack_terms = tuple(
            each.new_zeros(*is_image.shape, each.shape[-1]).masked_scatter(is_image[..., None], features.in_order(each))
            for each in features.deepstack
        )


class DeepstackBlock(AttentionPart, MLPPart):
    """A pre-norm block, then `resid + deepstack`: the features at positions of images, 0 at all others."""

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        def build(self, layer: int) -> "DeepstackBlock":
            return DeepstackBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.make_attention()
        self.hook_resid_mid = HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_deepstack = HookPoint(*RESIDUAL)
        self.hook_resid_post = HookPoint(*RESIDUAL)

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
