"""The beginning of a vision tower: patches become vectors, class tokens are put before them, positions are added."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.vision.patches import Patches, cut

Stream = Float[Tensor, "batch pos d_model"]
Mode = Literal["bicubic", "bilinear"]


class PatchEmbed(nn.Module):
    """`pixels W_E + b_E` for each patch (Dosovitskiy et al. 2020, arXiv:2010.11929), with `W_E` [d_patch, d_model].

    The pixels of a patch are in the order channel, frame, row, column: a patch of a video spans several frames, and an image is
    repeated in each. `W_cls` [class, d_model] and `W_reg` [register, d_model] (Darcet et al. 2023, arXiv:2309.16588) are vectors
    without a patch, in this order before those of patches. With `mask_token` the checkpoint has a vector `W_mask` for patches
    that training hides, which the model does not use.
    """

    axes = {
        "W_E": "[d_patch] d_model",
        "W_cls": "[class_token] d_model",
        "W_reg": "[register] d_model",
        "W_mask": "d_model",
    }

    @dataclass(frozen=True)
    class Config:
        d_model: int
        patch_size: int
        n_channels: int = 3
        bias: bool = True
        n_class_tokens: int = 0
        n_registers: int = 0
        mask_token: bool = False
        n_frames: int = 1
        image_size: tuple[int, int] | None = None  # height and width in training, which patches need not fill

        def build(self) -> "PatchEmbed":
            return PatchEmbed(self)

        @property
        def n_before(self) -> int:
            """The number of positions before those of patches."""
            return self.n_class_tokens + self.n_registers

        @property
        def d_patch(self) -> int:
            """The number of values of a patch."""
            return self.n_channels * self.n_frames * self.patch_size**2

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_patch, cfg.d_model))
        self.b_E = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        if cfg.n_class_tokens:
            self.W_cls = nn.Parameter(torch.empty(cfg.n_class_tokens, cfg.d_model))
        if cfg.n_registers:
            self.W_reg = nn.Parameter(torch.empty(cfg.n_registers, cfg.d_model))
        if cfg.mask_token:
            self.W_mask = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, vectors: Float[Tensor, "image patch d_patch"]) -> Stream:
        return F.linear(vectors.to(self.W_E.dtype), self.W_E.T, self.b_E)

    def with_class_tokens(self, embed: Stream) -> Float[Tensor, "batch all_pos d_model"]:
        """The vectors of patches after those of the class tokens and registers."""
        before = [self._parameters[name] for name in ("W_cls", "W_reg") if name in self._parameters]
        return (
            torch.cat([*(x.expand(len(embed), -1, -1) for x in before if x is not None), embed], 1) if before else embed
        )

    def patches(self, pixels: Float[Tensor, "image channel height width"]) -> Patches:
        """The images as patches; see `cut`. Raises ValueError for another number of channels."""
        if pixels.ndim != 4 or pixels.shape[1] != self.cfg.n_channels:
            raise ValueError(
                f"pixels must be [image, channel, height, width] with {self.cfg.n_channels} channels, got "
                f"{tuple(pixels.shape)}"
            )
        return cut(pixels, self.cfg.patch_size)

    def check_filled(self, pixels: Float[Tensor, "image channel height width"]) -> None:
        """Raises ValueError for images that patches do not fill, unless the tower was trained on that size."""
        (height, width), size = pixels.shape[2:], self.cfg.patch_size
        if (height % size or width % size) and (height, width) != self.cfg.image_size and min(height, width) >= size:
            raise ValueError(
                f"images of {height} x {width} pixels are not filled by patches of {size} x {size}: what is left at the right or "
                "below would not be read; resize or pad them"
            )


class ImagePosEmbed(nn.Module):
    """A learned vector for each class token and each cell of a grid: `W_pos` [class + row * column, d_model].

    Images of another size have vectors between those of the cells, by `interpolation` in at least fp32, with `antialias` smoothed
    where the grid is coarser; if it is None they are refused. Registers, between class tokens and patches, have none.
    With `align_corners` the cells in the corners of any grid have the vectors of those in the corners of this one.
    """

    axes = {"W_pos": "[pos] d_model"}

    @dataclass(frozen=True)
    class Config:
        rows: int
        columns: int
        d_model: int
        n_class_tokens: int = 0
        interpolation: Mode | None = None
        antialias: bool = False
        n_registers: int = 0
        align_corners: bool = False

        def build(self) -> "ImagePosEmbed":
            return ImagePosEmbed(self)

        @property
        def n_vectors(self) -> int:
            """The number of learned vectors."""
            return self.n_class_tokens + self.rows * self.columns

        @property
        def n_ctx(self) -> int:
            """The number of positions of an image of this size."""
            return self.n_vectors + self.n_registers

        @property
        def fits_all(self) -> bool:
            """Whether there are positions for images of any size."""
            return self.interpolation is not None

        def misfit(self, patches: Patches) -> str | None:
            """Which image has no positions; None if all have some."""
            other = next((size for size in patches.grids if size != (self.rows, self.columns)), None)
            if other is None or self.fits_all:
                return None
            return (
                f"an image of {other[0]} x {other[1]} patches does not fit: this tower has positions for {self.rows} x "
                f"{self.columns}; resize it"
            )

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_pos = nn.Parameter(torch.empty(cfg.n_vectors, cfg.d_model))

    def forward(self, patches: Patches, interpolation: Mode | None = None) -> Float[Tensor, "#image pos d_model"]:
        """The vectors of the patches of each image, and of the positions before them.

        Raises ValueError for an image of another size, unless there is an interpolation.
        """
        n_patches, sizes = patches.vectors.shape[1], set(patches.grids)
        own, interpolation = (self.cfg.rows, self.cfg.columns), self.cfg.interpolation or interpolation
        if sizes == {own}:
            return self.with_registers(self.W_pos)[None]
        if interpolation is None:
            raise ValueError(self.cfg.misfit(patches))
        classes, cells = self.W_pos.tensor_split([self.cfg.n_class_tokens])
        table = cells.view(1, *own, -1).permute(0, 3, 1, 2)
        resized = {size: self.resized(table, size, interpolation) for size in sizes}
        of_images = [resized[grid].flatten(2)[0].T for grid in patches.grids]
        padded = [F.pad(each, (0, 0, 0, n_patches - len(each))) for each in of_images]
        return torch.stack([self.with_registers(torch.cat([classes, each])) for each in padded])

    def with_registers(self, vectors: Float[Tensor, "learned d_model"]) -> Float[Tensor, "pos d_model"]:
        """The vectors of class tokens and patches, with zeros for the registers between them."""
        if not self.cfg.n_registers:
            return vectors
        classes, cells = vectors.tensor_split([self.cfg.n_class_tokens])
        return torch.cat([classes, vectors.new_zeros(self.cfg.n_registers, vectors.shape[1]), cells])

    def resized(
        self, table: Float[Tensor, "1 d_model row column"], size: tuple[int, int], mode: Mode
    ) -> Float[Tensor, "1 d_model rows columns"]:
        """The vectors of the cells for a grid of another size."""
        corners, antialias = self.cfg.align_corners, self.cfg.antialias
        resized = F.interpolate(upcast(table), size=size, mode=mode, align_corners=corners, antialias=antialias)
        return resized.to(table.dtype)


class BucketPosEmbed(nn.Module):
    """A learned vector for each cell of a square grid that is laid over the picture, whatever its size: `W_pos` [cell, d_model].

    A patch has the vector of the cell that its upper left corner lies in, by 32-bit fractions of the height and width of what is
    not hidden, as transformers computes them (Idefics2, Laurençon et al. 2024, arXiv:2405.02246). Hidden patches have the first.
    """

    axes = {"W_pos": "[pos] d_model"}

    @dataclass(frozen=True)
    class Config:
        side: int
        d_model: int

        fits_all: ClassVar[bool] = True

        def build(self) -> "BucketPosEmbed":
            return BucketPosEmbed(self)

        @property
        def rows(self) -> int:
            """The rows of the grid."""
            return self.side

        @property
        def columns(self) -> int:
            """The columns of the grid."""
            return self.side

        @property
        def n_ctx(self) -> int:
            """The number of cells."""
            return self.side**2

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(self, patches: Patches, interpolation: Mode | None = None) -> Float[Tensor, "image pos d_model"]:
        """The vectors of the patches of each image; there is none to interpolate."""
        side, seen, cells = self.cfg.side, patches.seen, patches.cells
        of_picture = torch.stack([(seen & (cells[..., 1 - axis] == 0)).sum(1) for axis in (0, 1)], 1)
        fractions = (cells.float() * (1.0 / of_picture.float())[:, None]).clamp(max=1.0 - 1e-6)
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=cells.device, dtype=torch.float32)
        row, column = torch.bucketize(fractions, bounds, right=True).unbind(-1)
        return self.W_pos[(row * side + column).masked_fill(~seen, 0)]
