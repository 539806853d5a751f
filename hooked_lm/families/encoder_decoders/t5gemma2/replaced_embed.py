"""An embedding in which one token has a vector apart from the table."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import Embed, Stream


class ReplacedEmbed(Embed):
    """An embedding whose row of the token `replaced` is `w_replaced` [d_model], which is not scaled; a tied unembedding
    still has the row of `W_E`."""

    axes = {"w_replaced": "d_model"}

    @dataclass(frozen=True)
    class Config(Embed.Config):
        replaced: int = field(kw_only=True)

        def build(self) -> "ReplacedEmbed":
            return ReplacedEmbed(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.w_replaced = nn.Parameter(torch.empty(cfg.d_model))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Stream:
        return torch.where((tokens == self.cfg.replaced)[..., None], self.w_replaced, super().forward(tokens))

    def table(self) -> Float[Tensor, "d_vocab d_model"]:
        """The vectors of all tokens, before the scale."""
        ids = torch.arange(self.cfg.d_vocab, device=self.W_E.device)[:, None]
        return torch.where(ids == self.cfg.replaced, self.w_replaced / self.cfg.scale, self.W_E)
