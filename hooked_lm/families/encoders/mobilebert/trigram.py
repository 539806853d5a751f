"""Embeddings of three tokens, and the unembedding that goes with them (MobileBERT, Sun et al. 2020, arXiv:2004.02984)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import Embed, Logits, Stream, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, Ids, Vectors
from hooked_lm.components.embeddings.factored_embed import TiedVocab
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint


class TrigramEmbed(Embed):
    """`[e(next), e(token), e(previous)] W_proj + b_proj`, with the rows e of `W_E` [d_vocab, d_embed].

    Outside of the text, and for padding, e is zero. `W_proj` is [3, d_embed, d_model]: next token, token, previous token; without
    `trigram` it is [1, d_embed, d_model]. `hook_narrow_embed` is e.
    """

    axes = {"W_E": "[d_vocab] d_embed", "W_proj": "[offset d_embed] d_model"}

    @dataclass(frozen=True)
    class Config(Embed.Config):
        d_embed: int = field(kw_only=True)
        trigram: bool = True

        def build(self) -> "TrigramEmbed":
            return TrigramEmbed(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg, cfg.d_embed)
        self.W_proj = nn.Parameter(torch.empty(3 if cfg.trigram else 1, cfg.d_embed, cfg.d_model))
        self.b_proj = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_narrow_embed = HookPoint("batch", "pos", "d_embed")

    def forward(self, tokens: Ids, real: Bool[Tensor, "batch pos"] | None = None) -> Stream:
        """The vectors of the tokens; `real` marks those that are not padding, None: all."""
        rows = self.hook_narrow_embed(F.embedding(tokens, self.W_E))
        return self.projected(rows if real is None else rows.masked_fill(~real[..., None], 0.0))

    def projected(self, rows: Float[Tensor, "batch pos d_embed"]) -> Stream:
        """The output for these rows of `W_E`."""
        if self.cfg.trigram:
            rows = torch.cat([F.pad(rows[:, 1:], (0, 0, 0, 1)), rows, F.pad(rows[:, :-1], (0, 0, 1, 0))], -1)
        return F.linear(rows, self.W_proj.flatten(0, 1).T, self.b_proj)

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of the tokens."""
        return self(tokens)

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, of each alone in a text; computed at each call."""
        return self.W_E @ self.W_proj[len(self.W_proj) // 2] + self.b_proj


class TrigramEncoderEmbed(EncoderEmbed):
    """The embeddings of an encoder whose `embed` is a `TrigramEmbed`."""

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        embed: TrigramEmbed.Config

        def build(self) -> "TrigramEncoderEmbed":
            return TrigramEncoderEmbed(self)

    def vectors(self, tokens: Ids, context: StackContext) -> Vectors:
        """The token embeddings that are added to the others."""
        return self.embed(tokens, context.real)


class SplitUnembed(Unembed):
    """`x W_U + b_U` with `W_U` of two parts: the first rows are `W_vocab` [d_embed, d_vocab], the others `W_rest`.

    If tied, `W_vocab` is the transpose of the embedding's `W_E`, narrower than the stream. `W_U` is computed at each access.
    """

    axes = {"W_vocab": "[d_embed] d_vocab", "W_rest": "[d_rest] d_vocab"}

    @dataclass(frozen=True)
    class Config(Unembed.Config):
        d_embed: int = field(kw_only=True)

        def build(self, embed: Embed) -> "SplitUnembed":
            return TiedSplitUnembed(self, embed) if self.tied else SplitUnembed(self)

    cfg: Config

    def _make_weight(self) -> None:
        self._make_vocab()
        self.W_rest = nn.Parameter(torch.empty(self.cfg.d_model - self.cfg.d_embed, self.cfg.d_vocab))

    def _make_vocab(self) -> None:
        self.W_vocab = nn.Parameter(torch.empty(self.cfg.d_vocab, self.cfg.d_embed).T)

    def product(self, x: Stream, tokens: Int[Tensor, " token"] | None = None) -> Logits:
        """`x W_U + b_U`, or its columns for some tokens, without computing `W_U`."""
        some = slice(None) if tokens is None else tokens
        first, others = x.split([self.cfg.d_embed, self.cfg.d_model - self.cfg.d_embed], -1)
        bias = None if self.b_U is None else self.b_U[some]
        return F.linear(first, self.W_vocab.T[some], bias) + F.linear(others, self.W_rest.T[some])

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return torch.cat([self.W_vocab, self.W_rest])


class TiedSplitUnembed(TiedVocab, SplitUnembed):  # type: ignore[misc]  # a property in the place of a parameter
    """A `SplitUnembed` whose `W_vocab` is the transpose of the embedding's `W_E`."""

    cfg: SplitUnembed.Config
