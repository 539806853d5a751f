"""How a text tower makes one vector of a text: that of one position of the final stream."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]
Pooled = Float[Tensor, "batch d_model"]
Ids = Int[Tensor, "batch pos"]


class EndToken(nn.Module):
    """The vector at the first `end` token of a text (Radford et al. 2021, arXiv:2103.00020).

    `end` None means the first of the largest id: older configs of CLIP name a wrong end token, but its id is the largest.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        end: int | None

        def build(self) -> "EndToken":
            return EndToken(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, tokens: Ids) -> Pooled:
        return self.hook_pooler_out(self.pooled(resid, tokens))

    def pooled(self, resid: Stream, tokens: Ids) -> Pooled:
        """The same, without the hook point. Raises ValueError for a text without an end token."""
        if self.cfg.end is None:
            return resid[torch.arange(len(resid), device=resid.device), tokens.argmax(1)]
        is_end = tokens == self.cfg.end
        if not torch.compiler.is_compiling() and not bool(is_end.any(1).all()):
            raise ValueError(
                f"text {int(is_end.any(1).int().argmin())} has no end token (id {self.cfg.end}), at which this model reads a text"
            )
        return resid[torch.arange(len(resid), device=resid.device), is_end.int().argmax(1)]


class LastToken(nn.Module):
    """The vector at the last position, also if that is padding: the model was trained on texts of one length."""

    @dataclass(frozen=True)
    class Config:
        d_model: int

        def build(self) -> "LastToken":
            return LastToken(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_pooler_out = HookPoint("batch", "d_model")

    def forward(self, resid: Stream, tokens: Ids) -> Pooled:
        return self.hook_pooler_out(self.pooled(resid, tokens))

    def pooled(self, resid: Stream, tokens: Ids) -> Pooled:
        """The same, without the hook point."""
        return resid[:, -1]
