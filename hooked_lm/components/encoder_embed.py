"""What stands before the blocks of an encoder: the sum of token, position and token-type embeddings, normalised."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.embed import Embed, PosEmbed
from hooked_lm.components.norm import NormConfig, build_norm
from hooked_lm.hooks import HookPoint, is_listening

Stream = Float[Tensor, "batch pos d_model"]
EMBEDDING = ("batch", "pos", "d_embed")


class TokenTypeEmbed(nn.Module):
    """A learned vector for each type of token, the rows of `W_token_type` [n_types, d_embed]: which sentence it is in."""

    def __init__(self, n_types: int, d_embed: int) -> None:
        super().__init__()
        self.W_token_type = nn.Parameter(torch.empty(n_types, d_embed))

    def forward(self, types: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_embed"]:
        return F.embedding(types, self.W_token_type)


class EncoderEmbed(nn.Module):
    """`ln(W_E[token] + W_pos[position] + W_token_type[type])`, by `W_proj` [d_embed, d_model] into the stream if it is wider.

    Positions, types, norm and projection may be absent.
    """

    @dataclass(frozen=True)
    class Config:
        """`ln` normalises the sum, [d_embed]; with `d_model` given, a projection with bias leads there."""

        embed: Embed.Config
        pos_embed: PosEmbed.Config | None = None
        n_types: int | None = None
        ln: NormConfig | None = None
        d_model: int | None = None

        @property
        def d_out(self) -> int:
            """The width of the stream."""
            return self.d_model or self.embed.d_model

        def build(self) -> "EncoderEmbed":
            return EncoderEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        d_embed = cfg.embed.d_model
        self.embed = cfg.embed.build()
        self.hook_embed = HookPoint(*EMBEDDING)
        if cfg.pos_embed is not None:
            self.pos_embed = cfg.pos_embed.build()
            self.hook_pos_embed = HookPoint(*EMBEDDING)
        if cfg.n_types is not None:
            self.token_type_embed = TokenTypeEmbed(cfg.n_types, d_embed)
            self.hook_token_type_embed = HookPoint(*EMBEDDING)
        self.ln = build_norm(cfg.ln, EMBEDDING)
        if cfg.d_model is not None:
            self.W_proj = nn.Parameter(torch.empty(d_embed, cfg.d_model))
            self.b_proj = nn.Parameter(torch.zeros(cfg.d_model))

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_embed"]:
        """The token embedding, to which an unembedding may be tied."""
        return self.embed.W_E

    def forward(
        self, tokens: Int[Tensor, "batch pos"], types: Int[Tensor, "batch pos"] | None, context: Context
    ) -> Stream:
        total = self.hook_embed(self.token_rows(tokens, context))
        if self.cfg.n_types is not None:
            types = torch.zeros_like(tokens) if types is None else types
            total = total + self.hook_token_type_embed(self.token_type_embed(types))
        if self.cfg.pos_embed is not None:
            added = self.pos_embed(context.positions)
            if is_listening(self.hook_pos_embed):
                added = self.hook_pos_embed(added.expand_as(total).contiguous())
            total = total + added
        return self.written(self.ln(total), context)

    def token_rows(self, tokens: Int[Tensor, "batch pos"], context: Context) -> Float[Tensor, "batch pos d_embed"]:
        """What the tokens alone give."""
        return self.embed(tokens)

    def written(self, normalized: Float[Tensor, "batch pos d_embed"], context: Context) -> Stream:
        """What enters the stream."""
        return normalized if self.cfg.d_model is None else F.linear(normalized, self.W_proj.T, self.b_proj)


class TokenDropoutEmbed(EncoderEmbed):
    """The same for models that were trained with tokens dropped (ESM; Lin et al. 2022, doi:10.1126/science.ade2574).

    Masked tokens embed as zero, and the others are scaled as if a share of `dropped` of them were missing; padding
    enters the stream as zero.
    """

    @dataclass(frozen=True)
    class Config(EncoderEmbed.Config):
        mask_id: int = 32
        dropped: float = 0.12

        def build(self) -> "TokenDropoutEmbed":
            return TokenDropoutEmbed(self)

    cfg: Config

    def token_rows(self, tokens: Int[Tensor, "batch pos"], context: Context) -> Float[Tensor, "batch pos d_embed"]:
        """What the tokens alone give."""
        masked = tokens == self.cfg.mask_id
        real = torch.ones_like(masked) if context.real is None else context.real
        missing = (masked & real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
        rows = self.embed(tokens).masked_fill(masked[..., None], 0.0)
        return (rows * ((1 - self.cfg.dropped) / (1 - missing))[..., None]).to(rows.dtype)
