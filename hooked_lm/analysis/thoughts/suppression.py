"""Attention to a sentence suppressed, and how much the predictions of later sentences change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.thoughts.sentences import ThoughtSentence
from hooked_lm.callers import warn_caller
from hooked_lm.hooks import HookPoint, UnknownSite
from hooked_lm.hooks.token_labels import reading
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat

Span = range  # of positions
MOST_NUMBERS = 1 << 27  # of logits in a pass of several sentences: 512 MiB in fp32
ROUNDING = 1e-3  # of the largest logit: more than rounding, less than an effect
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
    next-token distributions that predict them, in nats. Only predictions made after the sentence count; NaN if there are none.
    The text stays as it is. Warns of models whose tokens reach later ones on another way than by attention.
    """
    sites = [name for name in model.hook_dict if name.endswith("attn.hook_attn_scores")]
    if not sites:
        raise UnknownSite("no attention to suppress: no layer of this model has attention scores")

    def run(tokens: Int[Tensor, "row pos"], spans: Sequence[Span]) -> Float[Tensor, "row later d_vocab"]:
        with model.hooks([(site, _Suppression(spans)) for site in sites]), reading([chat.labels[0]] * len(tokens)):
            return model(tokens, logits_to_keep=kept)

    first = min(sentence.stop for sentence in sentences)
    tokens, kept = chat.tokens.to(model.device), chat.shape[1] - first
    unchanged = model(chat, logits_to_keep=kept)[0]
    found, n_rows = torch.full((len(later), len(sentences)), torch.nan), max(1, MOST_NUMBERS // unchanged.numel())
    for start in range(0, len(sentences), min(batch_size, n_rows)):
        some = sentences[start : start + min(batch_size, n_rows)]
        rows = run(tokens.expand(len(some), -1), [range(one.start, one.stop) for one in some])
        if start == 0:
            other = tokens.clone()
            other[0, some[0].start : some[0].stop] = tokens[0, 0]
            _warn_of_other_ways(rows[0], run(other, [range(some[0].start, some[0].stop)])[0])
        for row, (sentence, changed) in enumerate(zip(some, rows, strict=True)):
            divergence = _divergence(unchanged, changed)  # at the position before the token
            for i, span in enumerate(later):
                affected = range(max(span.start - 1, sentence.stop), span.stop - 1)
                if len(affected):
                    found[i, start + row] = divergence[affected.start - first : affected.stop - first].mean()
    return found


def _warn_of_other_ways(suppressed: Float[Tensor, "pos d_vocab"], replaced: Float[Tensor, "pos d_vocab"]) -> None:
    """Warns if other tokens in the place of a suppressed sentence change the predictions after it."""
    change, size = (suppressed - replaced).abs().max(), suppressed.abs().max()
    if change > ROUNDING * size:
        warn_caller(
            "tokens of this model reach later ones not by attention scores alone, but by a state, a convolution or pooled keys: "
            f"without attention to the first sentence its tokens still change later logits by {float(change):.2g}, so that "
            "suppression is less than the whole effect"
        )


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
