"""Tokens and positions into the stream, and the stream out into logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.mlp import on_demand
from hooked_lm.components.norm import RESIDUAL
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]
Logits = Float[Tensor, "batch pos d_vocab"]


class Embed(nn.Module):
    """The rows of `W_E` [d_vocab, d_model] that the tokens name, times `scale`."""

    @dataclass(frozen=True)
    class Config:
        d_vocab: int
        d_model: int
        scale: float = 1.0

        def build(self) -> "Embed":
            return Embed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        rows = F.embedding(tokens, self.W_E)
        # the scale is rounded to the weights' precision, as the models were trained
        return rows if self.cfg.scale == 1.0 else rows * torch.tensor(self.cfg.scale).to(rows)


class PosEmbed(nn.Module):
    """A learned vector per position: the rows of `W_pos` [n_ctx, d_model]."""

    @dataclass(frozen=True)
    class Config:
        n_ctx: int
        d_model: int

        def build(self) -> "PosEmbed":
            return PosEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(self, positions: Int[Tensor, "batch pos"]) -> Stream:
        return F.embedding(positions, self.W_pos)


class Unembed(nn.Module):
    """`x W_U + b_U` with `W_U` [d_model, d_vocab]; then `scale`, and a soft cap `c tanh(x / c)` where there is one."""

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

    def forward(self, x: Stream) -> Logits:
        return self.finished(self.hook_out(F.linear(on_demand(self.hook_in, x), self.W_U.T, self.b_U)))

    def plain(self, x: Stream) -> Logits:
        """The same value, past the hook points."""
        return self.finished(F.linear(x, self.W_U.T, self.b_U))

    def finished(self, logits: Logits) -> Logits:
        """Scaled and capped."""
        if self.cfg.scale != 1.0:
            logits = logits * self.cfg.scale
        if self.cfg.soft_cap is not None:
            logits = self.cfg.soft_cap * (logits / self.cfg.soft_cap).tanh()
        return logits


class TiedUnembed(Unembed):
    """An unembedding whose `W_U` is the embedding's `W_E`, transposed: one parameter, one gradient, one memory.

    It appears in the state dict as `W_U` all the same, and refuses one that differs from `W_E`.
    """

    _embed: tuple[Embed]

    def __init__(self, cfg: Unembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple: the embedding is no submodule of this one
        super().__init__(cfg)

    def _make_weight(self) -> None:
        """There is none of its own."""

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # type: ignore[override]
        return self._embed[0].W_E.T

    def untied(self) -> Unembed:
        """The same with a `W_U` of its own."""
        from dataclasses import replace

        own = Unembed(replace(self.cfg, tied=False))
        own.W_U = nn.Parameter(self.W_U.detach().clone())
        own.b_U, own.hook_in, own.hook_out = self.b_U, self.hook_in, self.hook_out
        return own

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "W_U"] = self.W_U if keep_vars else self.W_U.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        theirs, tied_to = state_dict.get(prefix + "W_U"), state_dict.get("embed.W_E", self._embed[0].W_E)
        own = {name: value for name, value in state_dict.items() if name != prefix + "W_U"}
        super()._load_from_state_dict(own, prefix, *args)
        if theirs is not None and not torch.equal(theirs.T.to(tied_to), tied_to):
            args[-1].append(
                f"'{prefix}W_U' differs from 'embed.W_E', to which this model ties it; call model.untie() first"
            )
