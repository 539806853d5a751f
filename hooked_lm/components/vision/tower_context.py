"""The context of a vision tower: where the patches of its images are."""

import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.masks import Mask
from hooked_lm.components.vision.patches import Patches


class TowerContext(Context):
    """Positions and masks of one run of a tower over images, with `n_before` positions before the patches.

    `cells` are the rows and columns of the patches [image, patch, 2], `grids` the numbers of both of each image.
    """

    def __init__(self, patches: Patches, n_before: int = 0) -> None:
        n_patches = patches.vectors.shape[1]
        self.hidden = None if patches.hidden is None else F.pad(patches.hidden, (n_before, 0), value=False)
        mask = None if patches.counts is None else F.pad(patches.real, (n_before, 0), value=True)
        super().__init__(n_before + n_patches, patches.vectors.device, mask)
        self.grids = patches.grids
        self.cells: Int[Tensor, "image patch 2"] = patches.cells
        self.axis_positions = F.pad(self.cells.permute(2, 0, 1), (n_before, 0))  # those of class tokens are 0

    @property
    def needs_mask(self) -> bool:
        return self.hidden is not None

    def changed_mask(self, allowed: Bool[Tensor, "#batch 1 query_pos key_pos"], window: int | None) -> Mask:
        return allowed if self.hidden is None else allowed & ~self.hidden[:, None, None, :]
