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

    axes = {"W_E": "[d_vocab] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_vocab: int
        d_model: int
        scale: float = 1.0
        norm: NormConfig | None = None

        def build(self) -> "Embed":
            return Embed(self)

    def __init__(self, cfg: Config, d_row: int | None = None) -> None:
        """`d_row` is the width of `W_E`; None: that of the stream."""
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, d_row or cfg.d_model))
        add_norm(self, "ln", cfg.norm)

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        rows = self.rows(tokens)
        # the scale is rounded to the weights' precision, as the models were trained
        return norm_of(self, "ln")(
            rows if self.cfg.scale == 1.0 else rows * torch.tensor(self.cfg.scale).to(rows.dtype)
        )

    def rows(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        """The vectors of the tokens, before scale and norm."""
        return self.projected(F.embedding(tokens, self.W_E))

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, before scale and norm."""
        return self.projected(self.W_E)

    def projected(self, rows: Float[Tensor, "*rows d_row"]) -> Float[Tensor, "*rows d_model"]:
        """Rows of `W_E` as vectors of the stream."""
        return rows


def soft_capped(logits: Float[Tensor, "*batch d_vocab"], cap: float | None) -> Float[Tensor, "*batch d_vocab"]:
    """`cap * tanh(logits / cap)`; the logits themselves without a cap."""
    return logits if cap is None else cap * (logits / cap).tanh()


class Unembed(nn.Module):
    """`x W_U + b_U` with `W_U` [d_model, d_vocab], times `scale`. The model applies the soft cap."""

    axes = {"W_U": "[d_model] d_vocab"}

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


class TiedUnembed(Unembed):
    """An unembedding whose `W_U` is the transpose of the embedding's `W_E`, which is the only parameter.

    The state dict has an entry `W_U` too; one that differs from `W_E` is refused.
    """

    _embed: tuple[Embed]
    tied_to = "embed.W_E"  # the name of that weight in a model's state dict

    def __init__(self, cfg: Unembed.Config, embed: Embed) -> None:
        object.__setattr__(self, "_embed", (embed,))  # a tuple, so that the embedding is no submodule
        super().__init__(cfg)

    def _make_weight(self) -> None:
        """Makes no parameter."""

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


def columns(
    x: Stream, W: Float[Tensor, "d_model d_vocab"], b: Float[Tensor, " d_vocab"] | None, tokens: Tensor | None
) -> Float[Tensor, "batch pos token"]:
    if tokens is None:
        return F.linear(x, W.T, b)
    return F.linear(x, W.T[tokens], None if b is None else b[tokens])
