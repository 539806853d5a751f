"""The embedding of tokens, and the unembedding into logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, add_norm, norm_of
from hooked_lm.hooks import HookPoint, hook_if_listening

Stream = Float[Tensor, "batch pos d_model"]
Logits = Float[Tensor, "batch pos d_vocab"]


class Embed(nn.Module):
    """The rows of `W_E` [d_vocab, d_model] of the tokens, times `scale`; with a `norm`, normalised."""

    @dataclass(frozen=True)
    class Config:
        d_vocab: int
        d_model: int
        scale: float = 1.0
        norm: NormConfig | None = None

        def build(self) -> "Embed":
            return Embed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self._make_weights()
        add_norm(self, "ln", cfg.norm)

    def _make_weights(self) -> None:
        self.W_E = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        rows = self.rows(tokens)
        # the scale is rounded to the weights' precision, as the models were trained
        return norm_of(self, "ln")(
            rows if self.cfg.scale == 1.0 else rows * torch.tensor(self.cfg.scale).to(rows.dtype)
        )

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of the tokens, before scale and norm."""
        return F.embedding(tokens, self.W_E)

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, before scale and norm."""
        return self.W_E


def soft_capped(logits: Float[Tensor, "*batch d_vocab"], cap: float | None) -> Float[Tensor, "*batch d_vocab"]:
    """`cap * tanh(logits / cap)`; the logits themselves without a cap."""
    return logits if cap is None else cap * (logits / cap).tanh()


class Unembed(nn.Module):
    """`x W_U + b_U` with `W_U` [d_model, d_vocab], times `scale`. The model applies the soft cap."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_vocab: int
        bias: bool = False
        soft_cap: float | None = None
        scale: float = 1.0
        tied: bool = False

        def build(self, embed: Embed) -> "Unembed":
            from hooked_lm.components.embeddings.tied_unembed import TiedUnembed  # which is one of these

            return TiedUnembed(self, embed) if self.tied else Unembed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self._make_weight()
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab)) if cfg.bias else None
        self.hook_in = HookPoint(*RESIDUAL, on_demand=True)
        self.hook_out = HookPoint("batch", "pos", "d_vocab", on_demand=True)

    def _make_weight(self) -> None:
        self.W_U = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_model).T)

    def forward(self, residual: Stream) -> Logits:
        return self.finished(self.hook_out(self.product(hook_if_listening(self.hook_in, residual))))

    def unhooked(self, x: Stream) -> Logits:
        """The logits of `x`, without the hook points."""
        return self.finished(self.product(x))

    def some(self, x: Stream, tokens: Int[Tensor, " token"]) -> Float[Tensor, "batch pos token"]:
        """The logits of some tokens, without the hook points."""
        return self.finished(self.product(x, tokens))

    def product(self, x: Stream, tokens: Int[Tensor, " token"] | None = None) -> Logits:
        """`x W_U + b_U`, or its columns for some tokens."""
        return columns(x, self.W_U, self.b_U, tokens)

    def finished(self, logits: Logits) -> Logits:
        """The logits times `scale`."""
        return logits if self.cfg.scale == 1.0 else logits * self.cfg.scale

    def untied(self) -> "Unembed":
        """An unembedding with a parameter `W_U`; this one if it has one."""
        if isinstance(self.W_U, nn.Parameter):
            return self
        cfg = self.cfg
        own = Unembed(Unembed.Config(cfg.d_model, cfg.d_vocab, cfg.bias, cfg.soft_cap, cfg.scale))
        own.W_U = nn.Parameter(self.W_U.detach().clone())
        own.b_U, own.hook_in, own.hook_out = self.b_U, self.hook_in, self.hook_out
        return own


def columns(
    x: Stream, W: Float[Tensor, "d_model d_vocab"], b: Float[Tensor, " d_vocab"] | None, tokens: Tensor | None
) -> Float[Tensor, "batch pos token"]:
    if tokens is None:
        return F.linear(x, W.T, b)
    return F.linear(x, W.T[tokens], None if b is None else b[tokens])
