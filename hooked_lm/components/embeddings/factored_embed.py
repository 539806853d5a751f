"""Embeddings and unembeddings as products of two matrices, through a space that is narrower than the stream."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import Embed, Logits, Stream, Unembed, columns


class FactoredEmbed(Embed):
    """An embedding narrower than the stream, `W_E` [d_vocab, d_embed], and `W_proj` [d_embed, d_model] into the stream
    (Lan et al. 2019, arXiv:1909.11942)."""

    axes = {"W_E": "[d_vocab] d_embed", "W_proj": "[d_embed] d_model"}

    @dataclass(frozen=True)
    class Config(Embed.Config):
        d_embed: int = field(kw_only=True)
        bias: bool = False

        def build(self) -> "FactoredEmbed":
            return FactoredEmbed(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg, cfg.d_embed)
        self.W_proj = nn.Parameter(torch.empty(cfg.d_embed, cfg.d_model))
        self.b_proj = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

    def projected(self, rows: Float[Tensor, "*rows d_embed"]) -> Float[Tensor, "*rows d_model"]:
        """Rows of `W_E` as vectors of the stream: a product that is computed at each call."""
        return F.linear(rows, self.W_proj.T, self.b_proj)


class TiedVocab(Unembed):
    """Mixed into an unembedding with `W_vocab` [d_embed, d_vocab]: the transpose of the embedding's `W_E`."""

    _embed: tuple[Embed]

    def __init__(self, cfg: Unembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple, so that the embedding is no submodule
        super().__init__(cfg)

    def _make_vocab(self) -> None:
        """Makes no parameter."""

    @property
    def W_vocab(self) -> Float[Tensor, "d_embed d_vocab"]:
        return self._embed[0].W_E.T


class FactoredUnembed(Unembed):
    """An unembedding from a narrower space: `(x W_proj) W_vocab + b_U` with `W_proj` [d_model, d_embed] and `W_vocab`
    [d_embed, d_vocab]. `W_U` is their product, computed at each access."""

    axes = {"W_proj": "[d_model] d_embed", "W_vocab": "[d_embed] d_vocab"}

    @dataclass(frozen=True)
    class Config(Unembed.Config):
        d_embed: int = field(kw_only=True)

        def build(self, embed: Embed) -> "FactoredUnembed":
            return TiedFactoredUnembed(self, embed) if self.tied else FactoredUnembed(self)

    cfg: Config

    def _make_weight(self) -> None:
        self.W_proj = nn.Parameter(torch.empty(self.cfg.d_model, self.cfg.d_embed))
        self._make_vocab()

    def _make_vocab(self) -> None:
        self.W_vocab = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_embed).T)

    def product(self, x: Stream, tokens: Int[Tensor, " token"] | None = None) -> Logits:
        """`x W_U + b_U`, without computing `W_U`."""
        return columns(F.linear(x, self.W_proj.T), self.W_vocab, self.b_U, tokens)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self.W_proj @ self.W_vocab


class TiedFactoredUnembed(TiedVocab, FactoredUnembed):  # type: ignore[misc]  # a property in the place of a parameter
    """A `FactoredUnembed` whose `W_vocab` is the transpose of the embedding's `W_E`."""

    cfg: FactoredUnembed.Config
