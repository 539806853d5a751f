"""Mergers: squares of neighbouring patches become one token of a language model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.activations import Activated, Activation, activation
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.components.vision.image_context import ImageFeatures
from hooked_lm.components.vision.patches import Grid, Patches, cells_in
from hooked_lm.hooks import HookPoint


class PatchMerger(Activated):
    """`act(x W_in + b_in) W_out + b_out`, where `x` are the patches of a square side by side, normalised one by one.

    A square has `merge` x `merge` patches; with `norm_after` it is normalised as a whole. `hook_in` are patches
    [image, patch, d_vision] and `hook_merged` squares [image, token, d_merged], both row by row (Qwen2-VL, arXiv:2409.12191).
    """

    axes = {"W_in": "[d_merged] d_mlp", "W_out": "[d_mlp] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vision: int
        d_model: int
        norm: NormConfig
        merge: int = 2
        act_fn: Activation = "gelu"
        norm_after: bool = False
        d_mlp: int | None = None  # None: that of a square

        def build(self) -> "PatchMerger":
            return PatchMerger(self)

        @property
        def d_merged(self) -> int:
            """The width of a square."""
            return self.d_vision * self.merge**2

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        add_norm(self, "ln", cfg.norm, ("batch", "pos", "d_merged" if cfg.norm_after else "d_vision"))
        self.hook_merged = HookPoint("batch", "pos", "d_merged")
        d_mlp = cfg.d_mlp or cfg.d_merged
        self.W_in = nn.Parameter(torch.empty(cfg.d_merged, d_mlp))
        self.b_in = nn.Parameter(torch.zeros(d_mlp))
        self.W_out = nn.Parameter(torch.empty(d_mlp, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_pre = HookPoint("batch", "pos", "d_mlp")
        self.hook_post = HookPoint("batch", "pos", "d_mlp")
        self.act_fn = activation(cfg.act_fn)
        self.hook_out = HookPoint("batch", "pos", "d_model")

    def forward(self, x: Float[Tensor, "image pos d_vision"], patches: Patches, n_class_tokens: int) -> ImageFeatures:
        x, norm = self.hook_in(x[:, n_class_tokens:]), norm_of(self, "ln")
        merged = side_by_side(x if self.cfg.norm_after else norm(x), patches, self.cfg.merge)
        merged = self.hook_merged(norm(merged) if self.cfg.norm_after else merged)
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(merged, self.W_in.T, self.b_in))))
        out = self.hook_out(F.linear(post, self.W_out.T, self.b_out))
        return of_squares(out, patches, self.cfg.merge)


class LinearMerger(nn.Module):
    """`x W`, where `x` are the patches of a square of `merge` x `merge` side by side.

    `hook_in` and `hook_merged` are as in `PatchMerger` ("pixel shuffle" in Idefics3, Laurençon et al. 2024, arXiv:2408.12637).
    """

    axes = {"W": "[d_merged] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vision: int
        d_model: int
        merge: int = 2

        def build(self) -> "LinearMerger":
            return LinearMerger(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        self.hook_merged = HookPoint("batch", "pos", "d_merged")
        self.W = nn.Parameter(torch.empty(cfg.d_vision * cfg.merge**2, cfg.d_model))
        self.hook_out = HookPoint("batch", "pos", "d_model")

    def forward(self, x: Float[Tensor, "image pos d_vision"], patches: Patches, n_class_tokens: int) -> ImageFeatures:
        x = self.hook_in(x[:, n_class_tokens:])
        merged = self.hook_merged(side_by_side(x, patches, self.cfg.merge))
        return of_squares(self.hook_out(F.linear(merged, self.W.T)), patches, self.cfg.merge)


class MergingProjector(Activated):
    """`act(y W_in + b_in) W_out + b_out` with `y = x W_merge`, where `x` are the patches of a square side by side, normalised one
    by one (Mistral Small 3.1, Mistral AI 2025). `hook_merged` are the squares, `hook_mlp_in` is `y`.
    """

    axes = {"W_merge": "[d_merged] d_vision", "W_in": "[d_vision] d_hidden", "W_out": "[d_hidden] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vision: int
        d_model: int
        norm: NormConfig
        merge: int = 2
        act_fn: Activation = "gelu"
        bias: bool = False

        def build(self) -> "MergingProjector":
            return MergingProjector(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        add_norm(self, "ln", cfg.norm, ("batch", "pos", "d_vision"))
        self.hook_merged = HookPoint("batch", "pos", "d_merged")
        self.W_merge = nn.Parameter(torch.empty(cfg.d_vision * cfg.merge**2, cfg.d_vision))
        self.hook_mlp_in = HookPoint("batch", "pos", "d_vision")
        self.W_in = nn.Parameter(torch.empty(cfg.d_vision, cfg.d_model))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_pre = HookPoint("batch", "pos", "d_model")
        self.hook_post = HookPoint("batch", "pos", "d_model")
        self.act_fn = activation(cfg.act_fn)
        self.hook_out = HookPoint("batch", "pos", "d_model")

    def forward(self, x: Float[Tensor, "image pos d_vision"], patches: Patches, n_class_tokens: int) -> ImageFeatures:
        x = norm_of(self, "ln")(self.hook_in(x[:, n_class_tokens:]))
        merged = self.hook_merged(side_by_side(x, patches, self.cfg.merge))
        merged = self.hook_mlp_in(F.linear(merged, self.W_merge.T))
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(merged, self.W_in.T, self.b_in))))
        out = self.hook_out(F.linear(post, self.W_out.T, self.b_out))
        return of_squares(out, patches, self.cfg.merge)


def side_by_side(
    x: Float[Tensor, "image patch d_vision"], patches: Patches, merge: int
) -> Float[Tensor, "image token d_merged"]:
    """The patches of each square side by side, squares row by row, with zeros where an image has fewer than others.

    Raises ValueError for an image that squares do not fill.
    """
    for rows, columns in patches.grids:
        if rows % merge or columns % merge:
            raise ValueError(f"an image of {rows} x {columns} patches cannot be cut into squares of {merge} x {merge}")
    if not patches.grids:
        return x.new_zeros(0, 0, x.shape[2] * merge**2)
    if len(set(patches.grids)) == 1:
        return in_squares(x, patches.grids[0], merge)
    of_images = zip(x, patches.grids, strict=True)
    squares = [in_squares(image[None, : grid[0] * grid[1]], grid, merge)[0] for image, grid in of_images]
    return pad_sequence(squares, batch_first=True)


def in_squares(
    x: Float[Tensor, "image patch d_vision"], grid: Grid, merge: int
) -> Float[Tensor, "image token d_merged"]:
    """The patches of each square side by side, for images of one size.

    >>> in_squares(torch.arange(8)[None, :, None].float(), (2, 4), 2).tolist()
    [[[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]]
    """
    squares = x.unflatten(1, (grid[0] // merge, merge, grid[1] // merge, merge))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)


def of_squares(vectors: Float[Tensor, "image token d_model"], patches: Patches, merge: int) -> ImageFeatures:
    """The vectors of squares, with their rows and columns."""
    grids = [(rows // merge, columns // merge) for rows, columns in patches.grids]
    counts = None if len(set(grids)) <= 1 else tuple(rows * columns for rows, columns in grids)
    return ImageFeatures(vectors, cells_in(grids, vectors.shape[1], patches.vectors.device), counts)
