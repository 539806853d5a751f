"""Rules of models whose images, or whole prompts, are read in both directions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.components.vision.image_features import ImageFeatures
from hooked_lm.components.vision.image_rules import ImageRule


@dataclass(frozen=True)
class BidirectionalImages(ImageRule):
    """Image tokens without others between them see each other in both directions (Gemma 3)."""

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        if is_image.shape[1] > 1 and features is not None:
            begins = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
            context.groups = torch.where(is_image, begins.long().cumsum(1), -1)


@dataclass(frozen=True)
class BidirectionalPrefix(ImageRule):
    """All tokens of a prompt see each other in both directions, also beyond windows; tokens after it see what is before them.

    Those are the tokens of `context.suffix`, and after a cache all tokens, unless they come with images. Positions start at
    `first_position` (PaliGemma, Beyer et al. 2024, arXiv:2407.07726).
    """

    reads_suffix = True
    first_position: int = 1

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        context.key_positions = context.key_positions + self.first_position
        context.positions = context.positions + self.first_position
        if is_image.shape[1] == 1 or (context.n_past and features is None):
            return
        real = context.new_real()
        outside = torch.zeros_like(is_image) if context.suffix is None else context.suffix
        outside = outside if real is None else outside | ~real
        context.groups, context.windows_end_groups = torch.where(outside, -1, 0), False
