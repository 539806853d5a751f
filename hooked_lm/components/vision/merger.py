"""Mergers: squares of neighbouring patches become one token of a language model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.activations import Activation, activation
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.components.vision.image_features import ImageFeatures
from hooked_lm.components.vision.patches import Patches
from hooked_lm.hooks import HookPoint


class PatchMerger(nn.Module):
    """`act(x W_in + b_in) W_out + b_out`, where `x` are the patches of a square side by side, normalised one by one.

    A square has `merge` x `merge` patches; with `norm_after` it is normalised as a whole. `hook_in` are patches
    [image, patch, d_vision] and `hook_merged` squares [image, token, d_merged], both row by row (Qwen2-VL, arXiv:2409.12191).
    """

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
        merged, cells, real = side_by_side(x if self.cfg.norm_after else norm(x), patches, self.cfg.merge)
        merged = self.hook_merged(norm(merged) if self.cfg.norm_after else merged)
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(merged, self.W_in.T, self.b_in))))
        out = self.hook_out(F.linear(post, self.W_out.T, self.b_out))
        return ImageFeatures(out, cells, real)


class LinearMerger(nn.Module):
    """`x W`, where `x` are the patches of a square of `merge` x `merge` side by side.

    `hook_in` and `hook_merged` are as in `PatchMerger` ("pixel shuffle" in Idefics3, Laurençon et al. 2024, arXiv:2408.12637).
    """

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
        merged, cells, real = side_by_side(x, patches, self.cfg.merge)
        return ImageFeatures(self.hook_out(F.linear(self.hook_merged(merged), self.W.T)), cells, real)


class MergingProjector(nn.Module):
    """`act(y W_in + b_in) W_out + b_out` with `y = x W_merge`, where `x` are the patches of a square side by side, normalised one
    by one (Mistral Small 3.1, Mistral AI 2025). `hook_merged` are the squares, `hook_mlp_in` is `y`.
    """

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
        merged, cells, real = side_by_side(x, patches, self.cfg.merge)
        merged = self.hook_mlp_in(F.linear(self.hook_merged(merged), self.W_merge.T))
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(merged, self.W_in.T, self.b_in))))
        out = self.hook_out(F.linear(post, self.W_out.T, self.b_out))
        return ImageFeatures(out, cells, real)


def side_by_side(
    x: Float[Tensor, "image patch d_vision"], patches: Patches, merge: int
) -> tuple[Float[Tensor, "image token d_merged"], Int[Tensor, "image token 2"], Bool[Tensor, "image token"] | None]:
    """The patches of each square side by side, its row and column, and which squares are no padding; None: all.

    Raises ValueError for an image that squares do not fill.
    """
    cells, real, squares = squares_of(patches.grid, merge)
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    return x[rows, squares].flatten(2), cells, None if bool(real.all()) else real


def squares_of(
    grid: Int[Tensor, "image 2"], merge: int
) -> tuple[Int[Tensor, "image token 2"], Bool[Tensor, "image token"], Int[Tensor, "image token patch"]]:
    """The row and column of each square of patches, which are no padding, and the patches of each.

    Raises ValueError for an image that squares do not fill.

    >>> squares_of(torch.tensor([[2, 4]]), 2)[2].tolist()
    [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    for n_rows, n_columns in grid[(grid % merge).any(1)].tolist():
        raise ValueError(f"an image of {n_rows} x {n_columns} patches cannot be cut into squares of {merge} x {merge}")
    rows, columns = (grid // merge).unbind(1)
    n_squares = rows * columns
    token = torch.arange(max(n_squares.tolist(), default=0), device=grid.device)
    real, width = token < n_squares[:, None], columns[:, None]
    cells = torch.stack([token // width, token % width], -1)
    inside = torch.arange(merge, device=grid.device)
    row, column = cells[..., :1] * merge + inside, cells[..., 1:] * merge + inside
    squares = (row[..., None] * (width * merge)[..., None, None] + column[..., None, :]).flatten(2)
    return cells, real, squares.masked_fill(~real[..., None], 0)
