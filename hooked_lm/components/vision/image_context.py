"""What a decoder reads of images, a vector for each image token, and the context of a run with images among its tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.masks import Mask
from hooked_lm.components.vision.patches import first_ones


class ImageContext(Context):
    """Positions and masks of a run whose tokens include images. The `ImageRule`s of a model set what differs from text.

    `axis_positions` are positions in time, row and column; None: on each axis they are `positions`, as on text alone.
    `shift` is what earlier images add to the position of the text after them, in each row.

    New tokens with the same number in `groups` see each other in both directions, those with -1 see what is before them; None:
    all are causal. With `windows_end_groups` a token sees no further back in its group than the window of a layer. `suffix` marks
    the tokens after a prompt.

    `deepstack_terms` are what images add to the stream after the first layers, 0 at all other positions.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shift: Int[Tensor, " batch"] | None = None if self.cache is None else last_shift(self.cache)
        self.groups: Int[Tensor, "batch pos"] | None = None
        self.windows_end_groups = True
        self.suffix: Bool[Tensor, "batch pos"] | None = None
        self.deepstack_terms: tuple[Float[Tensor, "batch pos d_model"], ...] = ()
        if self.shift is not None:
            self.axis_positions = (self.positions + self.shift[:, None]).expand(3, -1, -1)

    @property
    def needs_mask(self) -> bool:
        return self.groups is not None

    def changed_mask(self, allowed: Bool[Tensor, "#batch 1 query_pos key_pos"], window: int | None) -> Mask:
        together = self.seen_together(window)
        return allowed if together is None else allowed | together[:, None]

    def seen_together(self, window: int | None = None) -> Bool[Tensor, "batch query_pos key_pos"] | None:
        """Which keys a query may attend to since both are in one group; None if there are no groups."""
        if self.groups is None:
            return None
        together = (self.groups[:, :, None] == self.groups[:, None]) & (self.groups[:, :, None] >= 0)
        if window is not None and self.windows_end_groups:
            together = together.triu(1)  # later keys are within any window
        return F.pad(together, (self.n_past, 0))

    def deepstack(self, layer: int) -> Float[Tensor, "batch pos d_model"] | None:
        """What images add to the stream after a layer; None if there are none."""
        return self.deepstack_terms[layer] if layer < len(self.deepstack_terms) else None


def last_shift(cache: KeyValueCache) -> Int[Tensor, " batch"] | None:
    """What the images in a cache add to the positions of the text after them; None without images.

    Those of tokens that are not in it, of a run that failed or with a frozen cache, are forgotten.
    """
    shifts = cache.position_shifts = {n: x for n, x in cache.position_shifts.items() if n <= cache.length}
    return shifts[max(shifts)] if shifts else None


@dataclass(frozen=True)
class ImageFeatures:
    """The vectors of image tokens [image, token, d_model].

    `counts` are the numbers of those of each image that are no padding, which is at the end; None: all. `cells` are the row and
    column of each token in the grid of its image [image, token, 2], -1 for a token that is no place of it, such as a class token.
    `deepstack` are further vectors of the tokens, which the first layers of the decoder add to its stream.
    """

    vectors: Float[Tensor, "image token d_model"]
    cells: Int[Tensor, "image token 2"]
    counts: tuple[int, ...] | None = None
    deepstack: tuple[Float[Tensor, "image token d_model"], ...] = ()

    @property
    def n_tokens(self) -> list[int]:
        """The number of tokens of each image."""
        n_images, longest = self.cells.shape[:2]
        return [longest] * n_images if self.counts is None else list(self.counts)

    @property
    def real(self) -> Bool[Tensor, "image token"] | None:
        """Which tokens are no padding; None: all."""
        return None if self.counts is None else first_ones(self.counts, self.cells.shape[1], self.cells.device)

    def in_order(self, vectors: Num[Tensor, "image token *width"]) -> Num[Tensor, "all_tokens *width"]:
        """Vectors of all images, one image after the other, without padding."""
        if self.counts is None:
            return vectors.flatten(0, 1)
        return torch.cat([of_image[:n] for of_image, n in zip(vectors, self.counts, strict=True)])
