"""The context of a decoder that reads images among its tokens."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache


class ImageContext(Context):
    """Positions and masks of a run whose tokens include images.

    `image_of` is the number of the image that each new token is part of, counted in its row, -1 for text.
    """

    def __init__(
        self,
        n_pos: int,
        device: torch.device,
        real: Bool[Tensor, "batch key_pos"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> None:
        super().__init__(n_pos, device, real, cache)
        self.image_of: Int[Tensor, "batch pos"] | None = None
        self.deepstack: list[Float[Tensor, "batch pos d_model"]] = []
