"""Projectors: from the stream of a vision tower to the tokens of a language model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.activations import Activated, Activation, activation
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.vision.image_context import ImageFeatures
from hooked_lm.components.vision.patches import Patches, cells_in
from hooked_lm.hooks import HookPoint

IMAGE = ("batch", "pos", "d_model")

Stream = Float[Tensor, "image pos d_vision"]


class MLPProjector(Activated):
    """`act(x W_in + b_in) W_out + b_out` for each patch (LLaVA-1.5, Liu et al. 2023, arXiv:2310.03744).

    `hook_in` [image, patch, d_vision] is what it reads of the tower: without class tokens, unless it `keeps_class_tokens`.
    """

    axes = {"W_in": "[d_vision] d_hidden", "W_out": "[d_hidden] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vision: int
        d_model: int
        act_fn: Activation = "gelu"
        bias: bool = True
        keeps_class_tokens: bool = False

        def build(self) -> "MLPProjector":
            return MLPProjector(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        self.W_in = nn.Parameter(torch.empty(cfg.d_vision, cfg.d_model))
        self.b_in = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))
        self.b_out = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.hook_pre = HookPoint("batch", "pos", "d_model")
        self.hook_post = HookPoint("batch", "pos", "d_model")
        self.act_fn = activation(cfg.act_fn)
        self.hook_out = HookPoint("batch", "pos", "d_model")

    def forward(self, x: Stream, patches: Patches, n_class_tokens: int) -> ImageFeatures:
        x = self.hook_in(x if self.cfg.keeps_class_tokens else x[:, n_class_tokens:])
        post = self.hook_post(self.act_fn(self.hook_pre(F.linear(x, self.W_in.T, self.b_in))))
        out = self.hook_out(F.linear(post, self.W_out.T, self.b_out))
        n_before = out.shape[1] - patches.vectors.shape[1]
        counts = None if patches.counts is None else tuple(n + n_before for n in patches.counts)
        return self.of_images(ImageFeatures(out, cells_of(patches, n_before), counts), patches)

    def of_images(self, features: ImageFeatures, patches: Patches) -> ImageFeatures:
        """What the decoder reads, from the vectors of the patches."""
        return features


class LinearProjector(nn.Module):
    """`x W + b` for each patch; `hook_in` [image, patch, d_vision] is what it reads of the tower, without class tokens."""

    axes = {"W": "[d_vision] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vision: int
        d_model: int

        def build(self) -> "LinearProjector":
            return LinearProjector(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        self.W = nn.Parameter(torch.empty(cfg.d_vision, cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_out = HookPoint(*IMAGE)

    def forward(self, x: Stream, patches: Patches, n_class_tokens: int) -> ImageFeatures:
        x = self.hook_in(x[:, n_class_tokens:])
        return ImageFeatures(self.hook_out(F.linear(x, self.W.T, self.b)), cells_of(patches))


class PoolingProjector(nn.Module):
    """`ln(mean(x)) W`, the mean over squares of `size` x `size` patches (Gemma 3, Gemma Team 2025, arXiv:2503.19786).

    `hook_in` [image, patch, d_vision] is what it reads of the tower, with `rows` x `columns` patches; `hook_pooled` [image,
    token, d_vision] are the means. Patches at the right and below that fill no square are not read.
    """

    axes = {"W": "[d_vision] d_model"}

    @dataclass(frozen=True)
    class Config:
        rows: int
        columns: int
        size: int
        d_model: int
        ln: RMSNorm.Config

        def build(self) -> "PoolingProjector":
            return PoolingProjector(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in = HookPoint("batch", "pos", "d_vision")
        self.hook_pooled = HookPoint("batch", "pos", "d_vision")
        self.ln = cfg.ln.build(("batch", "pos", "d_vision"))
        self.W = nn.Parameter(torch.empty(cfg.ln.d_model, cfg.d_model))
        self.hook_out = HookPoint(*IMAGE)

    def forward(self, x: Stream, patches: Patches, n_class_tokens: int) -> ImageFeatures:
        pooled = self.hook_pooled(self.pooled(self.hook_in(x[:, n_class_tokens:])))
        out = self.hook_out(F.linear(self.ln(pooled), self.W.T))
        size, device = self.cfg.size, patches.vectors.device
        grids = [(rows // size, columns // size) for rows, columns in patches.grids]
        return ImageFeatures(out, cells_in(grids, pooled.shape[1], device))

    def pooled(self, x: Stream) -> Float[Tensor, "image token d_vision"]:
        """The mean of each square of patches, row by row."""
        grid = x.mT.unflatten(2, (self.cfg.rows, self.cfg.columns))
        return F.avg_pool2d(grid, self.cfg.size).flatten(2).mT


def cells_of(patches: Patches, n_class_tokens: int = 0) -> Int[Tensor, "image token 2"]:
    """The rows and columns of patches, -1 for the class tokens before them."""
    return F.pad(patches.cells, (0, 0, n_class_tokens, 0), value=-1)
