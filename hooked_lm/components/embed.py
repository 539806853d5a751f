"""Tokens and positions into the stream, and the stream out into logits."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.mlp import hook_if_listening
from hooked_lm.components.norm import RESIDUAL, NormConfig, add_norm, norm_of
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]
Logits = Float[Tensor, "batch pos d_vocab"]


class Embed(nn.Module):
    """The rows of `W_E` [d_vocab, d_model] that the tokens name, times `scale`, and then perhaps normalised."""

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
        return norm_of(self, "ln")(rows if self.cfg.scale == 1.0 else rows * torch.tensor(self.cfg.scale).to(rows))

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of the tokens, before scale and norm."""
        return F.embedding(tokens, self.W_E)

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, before scale and norm."""
        return self.W_E


class FactoredEmbed(Embed):
    """An embedding narrower than the stream, `W_E` [d_vocab, d_embed], and `W_proj` [d_embed, d_model] into the stream
    (Lan et al. 2019, arXiv:1909.11942)."""

    @dataclass(frozen=True)
    class Config(Embed.Config):
        d_embed: int = field(kw_only=True)
        bias: bool = False

        def build(self) -> "FactoredEmbed":
            return FactoredEmbed(self)

    cfg: Config

    def _make_weights(self) -> None:
        cfg = self.cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_embed))
        self.W_proj = nn.Parameter(torch.empty(cfg.d_embed, cfg.d_model))
        self.b_proj = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.bias else None

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of the tokens, before scale and norm."""
        return F.linear(F.embedding(tokens, self.W_E), self.W_proj.T, self.b_proj)

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, before scale and norm: a product that is made for each call."""
        return F.linear(self.W_E, self.W_proj.T, self.b_proj)


class Positions(nn.Module):
    """A vector for each position, `at` some or for the tokens of a run."""

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | Bool[Tensor, "batch key_pos"] | None = None,
    ) -> Stream:
        """The vectors of as many positions as there are tokens, from an offset on.

        With a mask of all tokens so far positions count real tokens only, and padding has zeros.
        """
        here = slice(past_kv_pos_offset, past_kv_pos_offset + tokens.shape[1])
        if attention_mask is None:
            counted = torch.arange(here.start, here.stop, device=tokens.device)[None]
            return self.at(counted).expand(tokens.shape[0], -1, -1)
        real = attention_mask.bool()
        counted = (real.long().cumsum(1) - 1).clamp(min=0)[:, here]
        return self.at(counted).masked_fill(~real[:, here, None], 0.0)

    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions. Each kind has its own; no ABC, as the shim's classes have another metaclass."""
        raise NotImplementedError


class PosEmbed(Positions):
    """A learned vector per position: the rows of `W_pos`, which has `offset` rows before that of position 0."""

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
        self.W_pos = nn.Parameter(torch.empty(cfg.offset + cfg.n_ctx, cfg.d_model))

    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions."""
        return F.embedding(positions + self.cfg.offset, self.W_pos)

    def table(self) -> Float[Tensor, "n_ctx d_model"]:
        """The vectors of all positions."""
        return self.W_pos[self.cfg.offset :]


class FixedPosEmbed(PosEmbed):
    """The same with vectors that are not trained, though checkpoints hold them."""

    @dataclass(frozen=True)
    class Config(PosEmbed.Config):
        def build(self) -> "FixedPosEmbed":
            return FixedPosEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_pos.requires_grad_(False)


class SinusoidalEmbed(Positions):
    """A fixed vector per position, counted from `offset`: sines of the position in the first half, cosines in the second.

    The pairs' wavelengths are a geometric sequence: pair i turns `10000 ** (-2i / d_model)` radians a position (Vaswani
    et al. 2017, arXiv:1706.03762).
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        offset: int = 0

        def build(self) -> "SinusoidalEmbed":
            return SinusoidalEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if cfg.d_model % 2:
            raise ValueError(f"sines and cosines need an even d_model, got {cfg.d_model}")
        self.cfg = cfg

    def exponents(self) -> Float[Tensor, " half"]:
        """Of 10000, one for each pair."""
        return torch.arange(0, self.cfg.d_model, 2, dtype=torch.float32) / self.cfg.d_model

    def at(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of these positions, in fp32."""
        frequencies = 10000.0 ** -self.exponents().to(positions.device)
        turn = (positions + self.cfg.offset)[..., None].float() * frequencies
        return torch.cat([turn.sin(), turn.cos()], -1)


class FairseqSinusoidalEmbed(SinusoidalEmbed):
    """The same with pair i turning `10000 ** (-i / (n - 1))` radians a position, so that the last of n pairs turns 1/10000
    (Ott et al. 2019, arXiv:1904.01038)."""

    @dataclass(frozen=True)
    class Config(SinusoidalEmbed.Config):
        def build(self) -> "FairseqSinusoidalEmbed":
            return FairseqSinusoidalEmbed(self)

    def exponents(self) -> Float[Tensor, " half"]:
        """Of 10000, one for each pair."""
        half = self.cfg.d_model // 2
        return torch.arange(half, dtype=torch.float32) / (half - 1)


PosEmbedConfig = PosEmbed.Config | SinusoidalEmbed.Config


def soft_capped(logits: Float[Tensor, "*batch d_vocab"], cap: float | None) -> Float[Tensor, "*batch d_vocab"]:
    """`cap * tanh(logits / cap)`; the logits themselves without a cap."""
    return logits if cap is None else cap * (logits / cap).tanh()


class Unembed(nn.Module):
    """`x W_U + b_U` with `W_U` [d_model, d_vocab], times `scale`. The soft cap of the logits is the model's to apply."""

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_vocab: int
        bias: bool = False
        soft_cap: float | None = None
        scale: float = 1.0
        tied: bool = False

        def build(self, embed: Embed) -> "Unembed":
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

    def plain(self, x: Stream) -> Logits:
        """The same value, past the hook points."""
        return self.finished(self.product(x))

    def some(self, x: Stream, tokens: Int[Tensor, " token"]) -> Float[Tensor, "batch pos token"]:
        """The logits of these tokens alone, past the hook points."""
        return self.finished(self.product(x, tokens))

    def product(self, x: Stream, tokens: Int[Tensor, " token"] | None = None) -> Logits:
        """`x W_U + b_U`, or the columns of some tokens of it."""
        return _columns(x, self.W_U, self.b_U, tokens)

    def finished(self, logits: Logits) -> Logits:
        """Scaled."""
        return logits if self.cfg.scale == 1.0 else logits * self.cfg.scale

    def untied(self) -> "Unembed":
        """The same with a `W_U` of its own; itself if it has one."""
        if isinstance(self.W_U, nn.Parameter):
            return self
        cfg = self.cfg
        own = Unembed(Unembed.Config(cfg.d_model, cfg.d_vocab, cfg.bias, cfg.soft_cap, cfg.scale))
        own.W_U = nn.Parameter(self.W_U.detach().clone())
        own.b_U, own.hook_in, own.hook_out = self.b_U, self.hook_in, self.hook_out
        return own


class TiedUnembed(Unembed):
    """An unembedding whose `W_U` is the embedding's `W_E`, transposed: one parameter, one gradient, one memory.

    It appears in the state dict as `W_U` all the same, and refuses one that differs from `W_E`.
    """

    _embed: tuple[Embed]
    tied_to = "embed.W_E"  # the name of that weight in a model's state dict

    def __init__(self, cfg: Unembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple: the embedding is no submodule of this one
        super().__init__(cfg)

    def _make_weight(self) -> None:
        """There is none of its own."""

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self._embed[0].W_E.T

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "W_U"] = self.W_U if keep_vars else self.W_U.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        theirs, tied_to = state_dict.get(prefix + "W_U"), state_dict.get(self.tied_to, self._embed[0].W_E)
        own = {name: value for name, value in state_dict.items() if name != prefix + "W_U"}
        super()._load_from_state_dict(own, prefix, *args)
        if theirs is not None and not torch.equal(theirs.T.to(tied_to), tied_to):
            args[-1].append(
                f"'{prefix}W_U' differs from '{self.tied_to}', to which this model ties it; call model.untie() first"
            )


class FactoredUnembed(Unembed):
    """An unembedding from a narrower space: `(x W_proj) W_vocab + b_U` with `W_proj` [d_model, d_embed] and `W_vocab`
    [d_embed, d_vocab]. `W_U` is their product, made whenever it is read."""

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
        """`x W_U + b_U`, past `W_U`."""
        return _columns(F.linear(x, self.W_proj.T), self.W_vocab, self.b_U, tokens)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self.W_proj @ self.W_vocab


class TiedFactoredUnembed(FactoredUnembed):
    """The same with the embedding's `W_E`, transposed, for `W_vocab`: one parameter."""

    _embed: tuple[Embed]

    def __init__(self, cfg: FactoredUnembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple: the embedding is no submodule of this one
        super().__init__(cfg)

    def _make_vocab(self) -> None:
        """There is none of its own."""

    @property
    def W_vocab(self) -> Float[Tensor, "d_embed d_vocab"]:  # type: ignore[override]
        return self._embed[0].W_E.T


def _columns(
    x: Stream, W: Float[Tensor, "d_model d_vocab"], b: Float[Tensor, " d_vocab"] | None, tokens: Tensor | None
) -> Float[Tensor, "batch pos token"]:
    if tokens is None:
        return F.linear(x, W.T, b)
    return F.linear(x, W.T[tokens], None if b is None else b[tokens])
