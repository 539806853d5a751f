"""Deepstack: the projector gives features of several depths of the tower (Meng et al. 2024, arXiv:2406.04334)."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.components.vision.image_features import ImageFeatures
from hooked_lm.components.vision.image_rules import ImageRule
from hooked_lm.components.vision.merger import PatchMerger
from hooked_lm.components.vision.patches import Patches


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
