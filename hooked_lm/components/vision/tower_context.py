"""The context of a vision tower: where the patches of its images are."""

import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.context import Angles, Context
from hooked_lm.components.embeddings.axis_rotary import AxisRotary
from hooked_lm.components.embeddings.rotary import Rotary
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
        self.n_before = n_before
        self.grids = patches.grids
        self.cells: Int[Tensor, "image patch 2"] = patches.cells

    def query_angles(self, rotary: Rotary) -> Angles:
        """The angles of the queries, which are those of their rows and columns in an `AxisRotary`; class tokens have 0."""
        if not isinstance(rotary, AxisRotary):
            return super().query_angles(rotary)
        places = F.pad(self.cells.permute(2, 0, 1), (self.n_before, 0))
        return self.once(rotary, lambda: rotary.angles_on_axes(places))

    def mask(self, causal: bool, window: int | None) -> Bool[Tensor, "batch 1 query_pos key_pos"] | None:
        """Which keys a query may attend to; None if to all."""
        return super().mask(causal, window) if self.hidden is None else self.full_mask(causal, window)

    def _full_mask(self, causal: bool, window: int | None) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
        allowed = super()._full_mask(causal, window)
        return allowed if self.hidden is None else allowed & ~self.hidden[:, None, None, :]
