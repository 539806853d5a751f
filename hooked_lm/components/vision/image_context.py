"""The context of a decoder that reads images among its tokens."""

from typing import Any

from jaxtyping import Int
from torch import Tensor

from hooked_lm.components.context import Angles, Context
from hooked_lm.components.embeddings.axis_rotary import AxisRotary
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.kv_cache import KeyValueCache


class ImageContext(Context):
    """Positions and masks of a run whose tokens include images. The `ImageRule`s of a model set what differs from text.

    `axis_positions` are positions in time, row and column; None: on each axis they are `positions`, as on text alone.
    `shift` is what earlier images add to the position of the text after them, in each row.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shift: Int[Tensor, " batch"] | None = None if self.cache is None else last_shift(self.cache)
        self.axis_positions: Int[Tensor, "axis batch pos"] | None = None
        if self.shift is not None:
            self.axis_positions = (self.positions + self.shift[:, None]).expand(3, -1, -1)

    def query_angles(self, rotary: Rotary) -> Angles:
        """The angles of the queries, on the axes if images have set them."""
        positions = self.axis_positions
        if positions is None or not isinstance(rotary, AxisRotary):
            return super().query_angles(rotary)
        return self.once(rotary, lambda: rotary.angles_on_axes(positions))


def last_shift(cache: KeyValueCache) -> Int[Tensor, " batch"] | None:
    """What the images in a cache add to the positions of the text after them; None without images.

    Those of tokens that are not in it, of a run that failed or with a frozen cache, are forgotten.
    """
    shifts = cache.position_shifts = {n: x for n, x in cache.position_shifts.items() if n <= cache.length}
    return shifts[max(shifts)] if shifts else None
