"""The embeddings of an encoder: the normalised sum of token, type and position embeddings (Devlin et al. 2018,
arXiv:1810.04805)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.extra_embed import BoxEmbed, ExtraEmbed, ExtraIds, TableEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint, is_listening

Vectors = Float[Tensor, "batch pos d_embed"]
Stream = Float[Tensor, "batch pos d_model"]
Ids = Int[Tensor, "batch pos"]


class TokenTypeEmbed(nn.Module):
    """A learned vector for each token type (in BERT, the first or second text). `W_token_type` is [type, d_embed]."""

    axes = {"W_token_type": "[type] d_embed"}

    @dataclass(frozen=True)
    class Config:
        n_types: int
        d_embed: int

        def build(self) -> "TokenTypeEmbed":
            return TokenTypeEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_token_type = nn.Parameter(torch.empty(cfg.n_types, cfg.d_embed))

    def forward(self, types: Ids) -> Vectors:
        return F.embedding(types, self.W_token_type)


class EncoderEmbed(nn.Module):
    """`ln(W_E[token] + W_token_type[type] + extra[ids] + W_pos[position])`, where all but the first are optional."""

    @dataclass(frozen=True)
    class Config:
        embed: Embed.Config
        pos_embed: PosEmbed.Config | None = None
        token_type_embed: TokenTypeEmbed.Config | None = None
        norm: NormConfig | None = None
        extra: ExtraEmbed.Config | BoxEmbed.Config | TableEmbed.Config | None = None

        @property
        def extra_ids(self) -> tuple[ExtraIds, ...]:
            """The ids that tokens have beside their types."""
            return () if self.extra is None else (self.extra,)

        @property
        def d_vocab(self) -> int:
            return self.embed.d_vocab

        @property
        def d_embed(self) -> int:
            """The width of the embeddings."""
            return self.embed.d_model

        @property
        def d_model(self) -> int:
            """The width of the residual stream."""
            return self.embed.d_model

        @property
        def n_types(self) -> int:
            return 0 if self.token_type_embed is None else self.token_type_embed.n_types

        def build(self) -> "EncoderEmbed":
            return EncoderEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        dims = ("batch", "pos", "d_model" if cfg.d_embed == cfg.d_model else "d_embed")
        self.embed = cfg.embed.build()
        self.hook_embed = HookPoint(*dims)
        self.token_type_embed = None if cfg.token_type_embed is None else cfg.token_type_embed.build()
        if self.token_type_embed is not None:
            self.hook_token_type_embed = HookPoint(*dims)
        self.extra = None if cfg.extra is None else cfg.extra.build()
        if self.extra is not None:
            self.hook_extra_embed = HookPoint(*dims)
        self.pos_embed = None if cfg.pos_embed is None else cfg.pos_embed.build()
        if self.pos_embed is not None:
            self.hook_pos_embed = HookPoint(*dims)
        add_norm(self, "ln", cfg.norm, dims)

    def forward(self, input_ids: Ids, token_type_ids: Ids | None = None, context: StackContext | None = None) -> Stream:
        """Types are 0 by default; `context.real` marks padding, which is not counted in positions."""
        context = context or StackContext(len(input_ids), input_ids.shape[1], input_ids.device)
        total = self.hook_embed(self.vectors(input_ids, context))
        if self.token_type_embed is not None:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            total = total + self.hook_token_type_embed(self.token_type_embed(types))
        if self.extra is not None:
            total = total + self.hook_extra_embed(self.extra(input_ids, context))
        if self.pos_embed is not None:
            added = self.position_vectors(input_ids, context)
            if is_listening(self.hook_pos_embed):
                added = self.hook_pos_embed(added.expand_as(total).contiguous())
            total = total + added
        return self.into_stream(norm_of(self, "ln")(total))

    def vectors(self, tokens: Ids, context: StackContext) -> Vectors:
        """The token embeddings that are added to the others."""
        return self.combined(self.embed(tokens), tokens, context)

    def combined(self, rows: Vectors, tokens: Ids, context: StackContext) -> Vectors:
        """What is added to the others, from the rows of the tokens in the table."""
        return rows

    def position_vectors(self, tokens: Ids, context: StackContext) -> Vectors:
        """The position embeddings."""
        assert self.pos_embed is not None, "the model has no position embedding"
        positions = self.positions(tokens, context)
        return self.pos_embed(tokens, 0, context.real) if positions is None else self.pos_embed.at(positions)

    def positions(self, tokens: Ids, context: StackContext) -> Ids | None:
        """The positions of the tokens; None: in their order."""
        return None

    def into_stream(self, normalized: Vectors) -> Stream:
        """The residual stream, from the normalised sum."""
        return normalized

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_embed"]:
        """The embeddings of all tokens."""
        return self.embed.W_E

    def table(self) -> Float[Tensor, "d_vocab d_embed"]:
        """The embeddings of all tokens, under the name of `Embed.table`."""
        return self.embed.table()


class ProjectedEncoderEmbed(EncoderEmbed):
    """Embeddings narrower than the stream, projected by `W_proj` [d_embed, d_model] after the norm (Lan et al. 2019,
    arXiv:1909.11942)."""

    axes = {"W_proj": "[d_embed] d_stream"}

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        d_stream: int = field(kw_only=True)

        @property
        def d_model(self) -> int:
            return self.d_stream

        def build(self) -> "ProjectedEncoderEmbed":
            return ProjectedEncoderEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_proj = nn.Parameter(torch.empty(cfg.d_embed, cfg.d_stream))
        self.b_proj = nn.Parameter(torch.zeros(cfg.d_stream))

    def into_stream(self, normalized: Vectors) -> Stream:
        """The residual stream, from the normalised sum."""
        return F.linear(normalized, self.W_proj.T, self.b_proj)


class MaskScaledEncoderEmbed(EncoderEmbed):
    """Embeddings where mask tokens are zero and the others are scaled up to compensate (Lin et al. 2022, ESM-2).

    Each row is multiplied by the fraction of unmasked tokens in training, divided by the fraction in the row.
    """

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        mask_token: int = field(kw_only=True)
        trained_share: float = 0.15 * 0.8  # the fraction of masked tokens in training

        def build(self) -> "MaskScaledEncoderEmbed":
            return MaskScaledEncoderEmbed(self)

    cfg: Config

    def combined(self, rows: Vectors, tokens: Ids, context: StackContext) -> Vectors:
        """The scaled rows, zero for mask tokens."""
        masked = tokens == self.cfg.mask_token
        real = torch.ones_like(masked) if context.real is None else context.real
        share = (masked & real).sum(1).float() / real.sum(1)
        rows = rows.masked_fill(masked[..., None], 0.0)
        return (rows * (1 - self.cfg.trained_share) / (1 - share)[:, None, None]).to(rows.dtype)


class ConcatenatedEncoderEmbed(EncoderEmbed):
    """Embeddings of tokens and of further ids side by side, `hook_concat`, mapped to the width of the sum by `W_map` [d_concat,
    d_embed] (RoCBert, Su et al. 2022, ACL). `spare` are embeddings that the checkpoint has and the model does not use."""

    axes = {"W_map": "[d_concat] d_embed"}

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        parts: tuple[ExtraEmbed.Config, ...] = ()
        spare: tuple[ExtraEmbed.Config, ...] = ()

        @property
        def extra_ids(self) -> tuple[ExtraIds, ...]:
            return self.parts

        @property
        def d_concat(self) -> int:
            return self.embed.d_model + sum(part.d_embed for part in self.parts)

        def build(self) -> "ConcatenatedEncoderEmbed":
            return ConcatenatedEncoderEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        after = [name for name in self._modules if name != "embed"]
        self.parts = nn.ModuleList(part.build() for part in cfg.parts)
        self.spare = nn.ModuleList(part.build() for part in cfg.spare)
        self.W_map = nn.Parameter(torch.empty(cfg.d_concat, cfg.d_embed))
        self.b_map = nn.Parameter(torch.zeros(cfg.d_embed))
        self.hook_concat = HookPoint("batch", "pos", "d_concat")
        for name in after:  # in the order of computation
            self._modules[name] = self._modules.pop(name)

    def combined(self, rows: Vectors, tokens: Ids, context: StackContext) -> Vectors:
        """The rows with those of further ids, mapped."""
        parts = [rows, *(part(tokens, context) for part in self.parts)]
        return self.mapped(self.hook_concat(torch.cat(parts, -1)))

    def mapped(self, concatenated: Float[Tensor, "batch pos d_concat"]) -> Vectors:
        """The token embeddings, from all embeddings of a token side by side."""
        return F.linear(concatenated, self.W_map.T, self.b_map)


class TableEncoderEmbed(EncoderEmbed):
    """Embeddings whose positions are counted in each cell of a table from the first of its tokens (TAPAS, Herzig et al. 2020,
    arXiv:2004.02349). The cell is the second and the third id of a token in a `TableEmbed`: its column and its row."""

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        def build(self) -> "TableEncoderEmbed":
            return TableEncoderEmbed(self)

    def positions(self, tokens: Ids, context: StackContext) -> Ids:
        """The positions of the tokens in their cells."""
        assert self.extra is not None, "cells have ids"
        cell, position = self.extra.cfg.of(tokens, context)[..., 1:3], context.key_positions
        is_same = (cell[:, :, None] == cell[:, None]).all(-1)  # [batch, pos, other_pos]
        is_same = is_same if context.real is None else is_same & context.real[:, None]
        first = position[:, None].masked_fill(~is_same, tokens.shape[1]).amin(-1)
        return (position - first).clamp(min=0)
