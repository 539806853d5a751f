"""Attention to a sentence suppressed, and how much the predictions of later sentences change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.thoughts.sentences import ThoughtSentence
from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import HookPoint, UnknownSite
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat

Span = range  # of positions
MOST_NUMBERS = 1 << 27  # of logits in a pass of several sentences: 512 MiB in fp32
SLICE = 1 << 22  # of logits in a step of a divergence


@dataclass(frozen=True)
class _Suppression:
    """A hook at attention scores: in each row, the positions after a span do not attend to it."""

    spans: Sequence[Span]
    in_blocks = True

    def query_columns(self, hook: HookPoint, shape: tuple[int, ...]) -> range:
        """The queries after the first span."""
        return range(min(span.stop for span in self.spans), shape[-2])

    def __call__(self, scores: Tensor, hook: HookPoint) -> Tensor:
        shown = range(scores.shape[-2]) if hook.columns is None else hook.columns.shown
        queries = torch.tensor(list(shown), device=scores.device)
        scores = scores.clone()
        for row, span in enumerate(self.spans):
            scores[row, :, queries >= span.stop, span.start : span.stop] = float("-inf")
        return scores


@torch.no_grad()
def suppress(
    model: Decoder, chat: Chat, sentences: Sequence[ThoughtSentence], later: Sequence[Span], batch_size: int
) -> Float[Tensor, "later sentence"]:
    """The mean divergence of the predictions of later tokens, if nothing after a sentence attends to it in any layer and head.

    For each of the spans `later` and each sentence: the mean over the tokens of the span of KL(unchanged || suppressed) of the
    next-token distributions that predict them, in nats. NaN for spans that do not follow the sentence. The text stays as it is.
    """
    sites = [name for name in model.hook_dict if name.endswith("attn.hook_attn_scores")]
    if not sites:
        raise UnknownSite("no attention to suppress: no layer of this model has attention scores")
    pooled = [
        layer for layer, block in enumerate(model.blocks) if getattr(getattr(block, "attn", 0), "pools_keys", False)
    ]
    if pooled:
        raise ArgumentError(
            f"the layers {pooled} also attend to blocks that pool several tokens, so that no sentence can be suppressed there"
        )
    first = min(sentence.stop for sentence in sentences)
    tokens, kept = chat.tokens.to(model.device), chat.shape[1] - first
    unchanged = model(tokens, logits_to_keep=kept)[0]
    found, n_rows = torch.full((len(later), len(sentences)), torch.nan), max(1, MOST_NUMBERS // unchanged.numel())
    for start in range(0, len(sentences), min(batch_size, n_rows)):
        some = sentences[start : start + min(batch_size, n_rows)]
        hook = _Suppression([range(one.start, one.stop) for one in some])
        with model.hooks([(site, hook) for site in sites]):
            logits = model(tokens.expand(len(some), -1), logits_to_keep=kept)
        for row, (sentence, changed) in enumerate(zip(some, logits, strict=True)):
            divergence = _divergence(unchanged, changed)  # at the position before the token
            for i, span in enumerate(later):
                affected = range(max(span.start - 1, sentence.stop), span.stop - 1)
                if len(affected):
                    found[i, start + row] = divergence[affected.start - first : affected.stop - first].mean()
    return found


def _divergence(
    unchanged: Float[Tensor, "pos d_vocab"], changed: Float[Tensor, "pos d_vocab"]
) -> Float[Tensor, " pos"]:
    """KL(unchanged || changed) of the distributions with these logits, some positions at a time."""
    step = max(1, SLICE // unchanged.shape[-1])
    found = []
    for one, other in zip(unchanged.split(step), changed.split(step), strict=True):
        log_p, log_q = one.float().log_softmax(-1), other.float().log_softmax(-1)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0))
    return torch.cat(found)
