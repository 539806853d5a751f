"""What stands behind the blocks of an encoder: heads for masked tokens, for whole texts and for each token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.activations import activation
from hooked_lm.components.norm import NormConfig, build_norm
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]


class MLMHead(nn.Module):
    """`ln(act(x W + b))`, which the unembedding of a masked language model reads; `W` is [d_model, d_out]."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_out: int
        act_fn: str
        ln: NormConfig | None
        bias: bool = True

        def build(self) -> "MLMHead":
            return MLMHead(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.act = cfg, activation(cfg.act_fn)
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.d_out))
        self.b = nn.Parameter(torch.zeros(cfg.d_out)) if cfg.bias else None
        self.hook_pre = HookPoint("batch", "pos", "d_embed")
        self.ln = build_norm(cfg.ln, ("batch", "pos", "d_embed"))

    def forward(self, x: Stream) -> Float[Tensor, "batch pos d_embed"]:
        return self.ln(self.act(self.hook_pre(F.linear(x, self.W.T, self.b))))


class Pooler(nn.Module):
    """One vector for a text: `ln(act(x W + b))` of its first token, or of the mean over its tokens."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        act_fn: str = "tanh"
        ln: NormConfig | None = None
        mean: bool = False
        bias: bool = True

        def build(self) -> "Pooler":
            return Pooler(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.act = cfg, activation(cfg.act_fn)
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None
        self.ln = build_norm(cfg.ln, ("batch", "d_model"))
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, x: Stream, real: Bool[Tensor, "batch pos"] | None = None) -> Float[Tensor, "batch d_model"]:
        pooled = mean_pooled(x, real) if self.cfg.mean else first_token(x, real)
        return self.hook_pooler_out(self.ln(self.act(F.linear(pooled, self.W.T, self.b))))


class LinearHead(nn.Module):
    """`x W + b` at the site `hook_out`, of what a pooler gives or of each token; `W` is [d_model, n_labels]."""

    site = "hook_out"

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_labels: int
        per_token: bool = False

        def build(self) -> "LinearHead":
            return LinearHead(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.n_labels))
        self.b = nn.Parameter(torch.zeros(cfg.n_labels))
        dims = ("batch", "pos", "label") if cfg.per_token else ("batch", "label")
        setattr(self, self.site, HookPoint(*dims))

    def forward(self, x: Float[Tensor, "batch *pos d_model"]) -> Float[Tensor, "batch *pos label"]:
        return getattr(self, self.site)(F.linear(x, self.W.T, self.b))


class NSPHead(LinearHead):
    """The same for whether one text follows another: its site is `hook_nsp_out`, label 0 is "follows"."""

    site = "hook_nsp_out"

    @dataclass(frozen=True)
    class Config(LinearHead.Config):
        n_labels: int = 2

        def build(self) -> "NSPHead":
            return NSPHead(self)


def first_token(x: Stream, real: Bool[Tensor, "batch pos"] | None) -> Float[Tensor, "batch d_model"]:
    """The vector of each row's first real token."""
    if real is None:
        return x[:, 0]
    return x[torch.arange(len(x), device=x.device), real.long().argmax(1)]


def mean_pooled(x: Stream, real: Bool[Tensor, "batch pos"] | None) -> Float[Tensor, "batch d_model"]:
    """The mean over each row's real tokens."""
    if real is None:
        return x.mean(1)
    weights = real[..., None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)
