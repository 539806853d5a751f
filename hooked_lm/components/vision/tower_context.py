"""The context of a vision tower: where the patches of its images are."""

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.vision.patches import Patches


class TowerContext(Context):
    """Positions and masks of one run of a tower over images, with `n_class_tokens` positions before the patches.

    `cells` are the rows and columns of the patches [image, patch, 2], `grid` the numbers of both [image, 2].
    """

    def __init__(self, patches: Patches, n_class_tokens: int = 0) -> None:
        n_patches, real = patches.vectors.shape[1], patches.real
        padded = bool((patches.n_patches < n_patches).any())
        mask = torch.cat([real.new_ones(len(real), n_class_tokens), real], 1) if padded else None
        super().__init__(n_class_tokens + n_patches, patches.vectors.device, mask)
        self.n_class_tokens = n_class_tokens
        self.grid: Int[Tensor, "image 2"] = patches.grid
        self.cells: Int[Tensor, "image patch 2"] = patches.cells
