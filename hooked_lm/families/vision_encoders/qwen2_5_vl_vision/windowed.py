"""Attention within windows of an image (Swin, Liu et al. 2021, arXiv:2103.14030; here without shifts, as in Qwen2.5-VL)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.attention.multihead import Attention, Keys, Mixed, PerHead, Values, fused
from hooked_lm.components.context import Context
from hooked_lm.components.vision.patches import on_device
from hooked_lm.components.vision.tower_context import TowerContext


class PatchWindowAttention(Attention):
    """Attention of patches to those in the same window of `side` x `side` patches, counted from the upper left.

    Scores and pattern cover all patches of an image: those of other windows have a weight of 0.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        side: int = 1

        def build(self) -> "PatchWindowAttention":
            return PatchWindowAttention(self)

    mixes_rows_alone = False

    cfg: Config

    def additive_mask(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "image 1 query_pos key_pos"]:
        """0 for the keys in the window of a query, minus infinity elsewhere."""

        def make() -> Tensor:
            window, _ = windows_of(context, self.cfg.side)
            same = window[:, :, None] == window[:, None, :]
            if context.real is not None:
                diagonal = torch.eye(context.n_pos, dtype=torch.bool, device=context.device)
                same = same & context.real[:, None, :] | diagonal
            return torch.zeros(same.shape, dtype=dtype, device=context.device).masked_fill_(~same, float("-inf"))[
                :, None
            ]

        return context.once(("windows", self.cfg.side, dtype), make)

    def mix_fused(self, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        """The mixed values, window by window."""
        places, filled, slots = context.once(("windows", self.cfg.side), lambda: grouped(context, self.cfg.side))
        image = torch.arange(len(places), device=places.device)[:, None, None]
        queries, keys, values = (x[image, places].flatten(0, 1) for x in (q, k, v))
        mask = None if filled is None else filled.flatten(0, 1)[:, None, None]
        z = fused(queries, keys, values, mask, self.scale)
        return z.unflatten(0, places.shape[:2]).flatten(1, 2)[image[..., 0], slots]


def windows_of(context: Context, side: int) -> tuple[Int[Tensor, "image pos"], Int[Tensor, "image pos"]]:
    """The window of each patch and its place in it, both row by row."""
    assert isinstance(context, TowerContext), "windows are those of an image"
    row, column = context.cells.unbind(-1)
    in_columns = on_device([-(-columns // side) for _, columns in context.grids], context.device)
    window = row // side * in_columns[:, None] + column // side
    return window, row % side * side + column % side


def grouped(
    context: Context, side: int
) -> tuple[Int[Tensor, "image window place"], Bool[Tensor, "image window place"] | None, Int[Tensor, "image pos"]]:
    """The patches of each window, which of these places are filled (None: all), and where in the windows each patch is.

    Padding has the place of the first patch. Windows that an image does not have hold its first patch.
    """
    assert isinstance(context, TowerContext), "windows are those of an image"
    window, inside = windows_of(context, side)
    n_windows = max(-(-rows // side) * -(-columns // side) for rows, columns in context.grids)
    slots, n_slots = window * side**2 + inside, n_windows * side**2
    all_filled = all(rows * columns == n_slots for rows, columns in context.grids)
    if context.real is not None:
        slots = torch.where(context.real, slots, n_slots)
    pos = torch.arange(context.n_pos, device=context.device).expand_as(slots)
    places = slots.new_full((len(slots), n_slots + 1), -1).scatter(1, slots, pos)[:, :-1].unflatten(1, (n_windows, -1))
    filled = places >= 0
    filled[..., 0] |= ~filled.any(-1)
    slots = torch.where(slots < n_slots, slots, 0)
    return places.clamp(min=0), None if all_filled else filled, slots
