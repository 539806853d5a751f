"""Embeddings of positions, learned or computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.constants import constant

Stream = Float[Tensor, "batch pos d_model"]


class Positions(nn.Module, ABC):
    """Position embeddings: `at` returns those of given positions, `forward` those of a run's tokens."""

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | Bool[Tensor, "batch key_pos"] | None = None,
    ) -> Stream:
        """The vectors of the positions of these tokens, starting at the offset.

        With a mask of past and new tokens, positions count real tokens only, and the vectors of padding are zero.
        """
        here = slice(past_kv_pos_offset, past_kv_pos_offset + tokens.shape[1])
        if attention_mask is None:
            counted = torch.arange(here.start, here.stop, device=tokens.device)[None]
            return self.at(counted).expand(tokens.shape[0], -1, -1)
        real = attention_mask.bool()
        counted = (real.long().cumsum(1) - 1).clamp(min=0)[:, here]
        return self.at(counted).masked_fill(~real[:, here, None], 0.0)

    @abstractmethod
    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions."""


class PosEmbed(Positions):
    """A learned vector per position: the rows of `W_pos`.

    The table of a checkpoint may have `offset` rows before that of position 0. They are in `before`, which nothing reads.
    """

    axes = {"W_pos": "[pos] d_model"}

    @dataclass(frozen=True)
    class Config:
        n_ctx: int
        d_model: int
        offset: int = 0

        def build(self) -> "PosEmbed":
            return PosEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))
        if cfg.offset:
            self.before = nn.Parameter(torch.zeros(cfg.offset, cfg.d_model), requires_grad=False)

    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions."""
        return F.embedding(positions, self.W_pos)


class FixedPosEmbed(PosEmbed):
    """A `PosEmbed` that is not trained, though checkpoints contain it."""

    @dataclass(frozen=True)
    class Config(PosEmbed.Config):
        def build(self) -> "FixedPosEmbed":
            return FixedPosEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_pos.requires_grad_(False)


class SinusoidalEmbed(Positions):
    """A fixed vector per position, counted from `offset`: sines of the position in the first half, cosines in the second.
    That of the position with the number `blank` is zero.

    The pairs' wavelengths are a geometric sequence: pair i turns `10000 ** (-2i / d_model)` radians a position (Vaswani
    et al. 2017, arXiv:1706.03762).
    """

    axes: dict[str, str] = {}  # it has no weights

    @dataclass(frozen=True)
    class Config:
        d_model: int
        offset: int = 0
        blank: int | None = None

        def build(self) -> "SinusoidalEmbed":
            return SinusoidalEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if cfg.d_model % 2:
            raise ValueError(f"sines and cosines need an even d_model, got {cfg.d_model}")
        self.cfg = cfg

    def last_pair(self, n_pairs: int) -> int:
        """The number that a pair of 1/10000 radians a position has, or would have."""
        return n_pairs

    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions, in fp32."""
        n_pairs = self.cfg.d_model // 2
        frequencies = constant(positions, geometric, n_pairs, self.last_pair(n_pairs))
        numbers = (positions + self.cfg.offset)[..., None]
        turn = numbers.float() * frequencies
        vectors = torch.cat([turn.sin(), turn.cos()], -1)
        return vectors if self.cfg.blank is None else vectors.masked_fill(numbers == self.cfg.blank, 0.0)


class FairseqSinusoidalEmbed(SinusoidalEmbed):
    """A `SinusoidalEmbed` whose pair i turns `10000 ** (-i / (n - 1))` radians a position, so that the last of n pairs turns
    1/10000 (Ott et al. 2019, arXiv:1904.01038)."""

    @dataclass(frozen=True)
    class Config(SinusoidalEmbed.Config):
        def build(self) -> "FairseqSinusoidalEmbed":
            return FairseqSinusoidalEmbed(self)

    def last_pair(self, n_pairs: int) -> int:
        return n_pairs - 1


def geometric(n_pairs: int, last: int) -> Float[Tensor, " pair"]:
    """Radians per position from 1 on, of which the pair with the number `last` has 1/10000."""
    return 10000.0 ** -(torch.arange(n_pairs, dtype=torch.float32) / last)


PosEmbedConfig = PosEmbed.Config | SinusoidalEmbed.Config
