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
    that stand for images; None: all with the id of image tokens. `is_suffix` marks the tokens after a prompt, for a model that
    reads prompts in both directions; None: all are of the prompt. It and the mask may include cached tokens.

    >>> inputs = VisionInputs(torch.tensor([[1, 9, 9, 2]]), {"pixel_values": torch.zeros(1, 3, 4, 8)})
    >>> inputs.repeated(2).tokens.shape, inputs.repeated(2).images["pixel_values"].shape
    (torch.Size([2, 4]), torch.Size([2, 3, 4, 8]))
    """

    tokens: Any
    images: Mapping[str, Any] = field(default_factory=dict)
    attention_mask: Int[Tensor, "batch all_pos"] | Bool[Tensor, "batch all_pos"] | None = None
    is_image: Bool[Tensor, "batch pos"] | None = None
    is_suffix: Bool[Tensor, "batch suffix_pos"] | None = None

    def repeated(self, n: int) -> "VisionInputs":
        """The same rows, `n` times one after the other."""
        images = {name: torch.cat([value] * n) for name, value in self.images.items()}
        names = ("attention_mask", "is_image", "is_suffix")
        marks = {name: x if (x := getattr(self, name)) is None else x.repeat(n, 1) for name in names}
        return replace(self, tokens=self.tokens.repeat(n, 1), images=images, **marks)
