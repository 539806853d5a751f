"""The input of a model that reads images: token ids, and the images among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class VisionInputs:
    """Token ids [batch, pos], and tensors of images under the names that processors of transformers give them.

    Images are in the order in which their tokens occur, row after row. `tokens` may also be text. `is_image` marks the tokens
    that stand for images; None: all with the id of image tokens.

    >>> inputs = VisionInputs(torch.tensor([[1, 9, 9, 2]]), {"pixel_values": torch.zeros(1, 3, 4, 8)})
    >>> inputs.repeated(2).tokens.shape, inputs.repeated(2).images["pixel_values"].shape
    (torch.Size([2, 4]), torch.Size([2, 3, 4, 8]))
    """

    tokens: Any
    images: Mapping[str, Any] = field(default_factory=dict)
    attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None
    is_image: Bool[Tensor, "batch pos"] | None = None

    def repeated(self, n: int) -> "VisionInputs":
        """The same rows, `n` times one after the other."""
        images = {name: torch.cat([value] * n) for name, value in self.images.items()}
        mask, is_image = (x if x is None else x.repeat(n, 1) for x in (self.attention_mask, self.is_image))
        return replace(self, tokens=self.tokens.repeat(n, 1), images=images, attention_mask=mask, is_image=is_image)
