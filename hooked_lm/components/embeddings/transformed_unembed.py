"""An unembedding after a transform that is not linear, as that of masked language models (ModernBERT's decoders)."""

from dataclasses import dataclass, field, replace

from jaxtyping import Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.embed import Embed, Logits, Stream, TiedUnembed, Unembed, columns
from hooked_lm.components.heads import MLMHead
from hooked_lm.hooks import hook_if_listening


class TransformedUnembed(Unembed):
    """`transform(x) W_U + b_U`, where `transform` is `ln(act(x W + b))`.

    A column of `W_U` is no direction of the residual stream, so functions that add up contributions to a logit refuse such a
    model (`check_linear`). A logit lens applies the transform too.
    """

    @dataclass(frozen=True)
    class Config(Unembed.Config):
        transform: MLMHead.Config = field(kw_only=True)

        def build(self, embed: Embed) -> "TransformedUnembed":
            return TiedTransformedUnembed(self, embed) if self.tied else TransformedUnembed(self)

    cfg: Config

    def __init__(self, cfg: Config, *embed: Embed) -> None:
        super().__init__(cfg, *embed)
        self.transform = cfg.transform.build()
        hook_out = self.hook_out
        del self.hook_out
        self.hook_out = hook_out  # sites are in the order of computation

    def forward(self, residual: Stream) -> Logits:
        transformed = self.transform(hook_if_listening(self.hook_in, residual))
        return self.finished(self.hook_out(columns(transformed, self.W_U, self.b_U, None)))

    def product(self, x: Stream, tokens: Int[Tensor, " token"] | None = None) -> Logits:
        """`transform(x) W_U + b_U`, or its columns for some tokens, without the hook points."""
        return columns(self.transform.unhooked(x), self.W_U, self.b_U, tokens)


class TiedTransformedUnembed(TransformedUnembed, TiedUnembed):
    """A `TransformedUnembed` whose `W_U` is the transpose of the embedding's `W_E`."""


def untied(unembed: Unembed) -> Unembed:
    """An unembedding with a parameter `W_U`; the same one if it has one."""
    if isinstance(unembed.W_U, nn.Parameter):
        return unembed
    cfg = unembed.cfg
    own: Unembed
    if isinstance(unembed, TransformedUnembed):
        own = TransformedUnembed(replace(unembed.cfg, tied=False))
        own.transform = unembed.transform
    else:
        own = Unembed(Unembed.Config(cfg.d_model, cfg.d_vocab, cfg.bias, cfg.soft_cap, cfg.scale))
    own.W_U = nn.Parameter(unembed.W_U.detach().clone())
    own.b_U, own.hook_in, own.hook_out = unembed.b_U, unembed.hook_in, unembed.hook_out
    return own


def check_linear(unembed: nn.Module | None) -> None:
    """Raises ValueError if a logit is not a linear function of the normalised residual stream."""
    if isinstance(unembed, TransformedUnembed):
        raise ValueError(
            "unembed.transform, which is not linear, is between the stream and the logits, so a logit is not a sum over "
            "components; use gradients instead: run_with_cache, then backward() from a logit"
        )
